"""The least devices for a target, with plans whose time by devices is written out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import pytest

import planner
from planner import InfeasibleError, UsageError, least_devices
from planner.ask import read_target, sizes_of
from planner.plans import Plan, with_price, with_simulation
from tests.plans.sample import make_plan

GRAPH = planner.load_graph("gpt2", dims={"seq": 128})
CLUSTER = planner.load_cluster("dgx-a100")
SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)


class Steps:
    """Plans by number of devices; infeasible where no time is written."""

    def __init__(self, seconds: Mapping[int, float], price: float = 1.0) -> None:
        self.seconds, self.price = seconds, price
        self.asked: list[int] = []

    def __call__(self, devices: int) -> Plan:
        self.asked.append(devices)
        if devices not in self.seconds:
            raise InfeasibleError(f"{devices} devices are too few")
        plan = with_simulation(make_plan(), self.seconds[devices])
        return with_price(plan, self.price * devices / 3)  # the sample has 3 devices at work


def answer(
    steps: Steps, target: str = "step=2s", least: Literal["devices", "dollars"] = "devices"
) -> planner.ask.TargetAnswer:
    found: planner.ask.TargetAnswer = least_devices(
        read_target(target), GRAPH, CLUSTER, 64, steps, sizes=SIZES, least=least
    )
    return found


def test_the_least_devices_that_reach_the_time_are_found() -> None:
    steps = Steps({size: 60.0 / size for size in SIZES if size >= 4})
    found = answer(steps)
    assert found.plan.predictions.reached_s == 60 / 32  # 24 devices take 2.5 s
    assert steps.asked == [1, 2, 4, 8, 16, 32, 24]  # doubled, then the gap halved
    assert [each.devices for each in found.tried if each.reaches] == [32]
    assert [each.reason for each in found.tried][:2] == ["1 devices are too few", "2 devices are too few"]


def test_a_gap_of_many_nodes_is_halved() -> None:
    steps = Steps({size: 90.0 / size for size in SIZES})
    assert answer(steps).plan.predictions.reached_s == pytest.approx(90 / 48)
    assert steps.asked == [1, 2, 4, 8, 16, 32, 64, 48, 40]


def test_the_least_dollars_may_be_more_devices() -> None:
    seconds = {size: 60.0 / size for size in SIZES} | {64: 0.5}  # 64 devices: faster than twice as fast as 32
    assert answer(Steps(seconds)).plan.predictions.reached_s == 60 / 32
    assert answer(Steps(seconds), least="dollars").plan.predictions.reached_s == 0.5
    with pytest.raises(UsageError, match="no price is known"):
        answer(Steps(seconds, price=0.0), least="dollars")


def test_tokens_in_days_are_a_time_of_a_step() -> None:
    tokens_a_step = 64 * 128
    found = answer(Steps({size: 60.0 / size for size in SIZES}), f"tokens={1000 * tokens_a_step}/1h")
    assert found.most_s == pytest.approx(3.6)
    assert found.plan.predictions.reached_s == 60 / 24


def test_samples_in_hours_are_a_time_of_a_step() -> None:
    assert answer(Steps({1: 1.0}), "samples=3840/2min").most_s == pytest.approx(2.0)  # 60 steps of 64


def test_what_no_number_of_devices_reaches_is_said() -> None:
    flat = Steps({1: 10.0, 2: 6.0, 4: 5.0, 8: 5.0, 16: 5.0, 32: 5.0})
    with pytest.raises(InfeasibleError) as error:
        answer(flat)
    assert "no number of devices does: step=2s needs steps of 2 s" in str(error.value)
    assert "the fastest of those tried takes 5 s on 4 devices" in str(error.value)
    assert "more devices were no faster" in str(error.value)
    assert flat.asked == [1, 2, 4, 8, 16]  # two doublings that save nothing
    with pytest.raises(InfeasibleError, match="64 devices are too few"):
        answer(Steps({}))


def test_what_no_peak_allows_is_not_tried() -> None:
    steps = Steps(dict.fromkeys(SIZES, 1.0))
    with pytest.raises(InfeasibleError, match="no number of devices does: at their peak it takes"):
        answer(steps, "step=1us")
    assert steps.asked == []


@pytest.mark.parametrize(
    "text", ["step", "step=2", "steps=2s", "tokens=1e12", "tokens=1e12/7y", "tokens=0/7d", "step=0s"]
)
def test_what_is_no_target_is_said(text: str) -> None:
    with pytest.raises(UsageError):
        read_target(text)


def test_a_model_without_tokens_takes_samples() -> None:
    with pytest.raises(UsageError, match="the model has no tokens"):
        read_target("tokens=1e12/7d").most_s(64, 0)


def test_numbers_of_devices_are_powers_of_two_in_a_node_then_nodes() -> None:
    assert sizes_of(CLUSTER, 32) == (1, 2, 4, 8, 16, 24, 32)
    assert sizes_of(planner.load_cluster("gb200-nvl72"), 144) == (1, 2, 4, 8, 16, 32, 64, 72, 144)

"""PipeDream-2BW: published memory, prices by hand, and the exact search against trying everything."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UsageError
from planner.solvers.partition.twobw_dp import solve_twobw
from planner.space.partition.twobw import (
    TwoBWDecision,
    TwoBWProblem,
    TwoBWSchedule,
    stage_bytes,
)
from tests.oracles.twobw import try_everything
from tests.shared_data import shared_path


def answers(name: str) -> list[dict[str, Any]]:
    entries = json.loads(shared_path("reference/known_answers.json").read_text())["PipeDream-2BW"]
    return [entry for entry in entries if entry["name"].startswith(name)]


def test_known_memory() -> None:
    (entry,) = answers("worst stage memory")
    given_, expect = entry["input"], entry["expect"]
    depth = given_["d"]
    for schedule in TwoBWSchedule:
        in_flight = schedule.in_flight(depth, given_["m_gpipe"])
        for recompute in (False, True):
            found = stage_bytes(
                schedule,
                given_["W"] / depth,
                given_["A_total"] / depth,
                given_["A_in"],
                depth,
                in_flight,
                recompute=recompute,
            )
            assert found == pytest.approx(expect[schedule.value + ("+R" if recompute else "")])


def problem(**changes: Any) -> TwoBWProblem:
    """Four equal blocks: a sample takes 1 s forward, 2 s backward, keeps 3 bytes; 2 bytes between, weights 4 each."""
    samples = np.array([[1.0], [2.0]])
    terms = {
        "micro_batches": (1, 2),
        "forward_s": samples * np.ones(4),
        "backward_s": samples * np.full(4, 2.0),
        "saved_bytes": samples * np.full(4, 3.0),
        "boundary_bytes": samples * np.full(5, 2.0),
        "weight_bytes": np.full(4, 4.0),
        "devices": 4,
        "global_batch": 8,
        "bandwidth_byte_per_s": 8.0,
    }
    return TwoBWProblem(**{**terms, **changes})


def test_price_by_hand() -> None:
    # 2 pipelines of 2 stages: 4 micro-batches, (2 + 4 + 2 / 8) s each; gradients 2 * 1/2 * 8 / 8 = 1 s
    plan = TwoBWDecision((0, 2, 4), 2, 1, False)
    assert problem().judge(plan).objective == pytest.approx(4 * 6.25)
    flush = problem(schedules=(TwoBWSchedule.FLUSH,)).judge(TwoBWDecision((0, 2, 4), 2, 1, False, TwoBWSchedule.FLUSH))
    assert flush.objective == pytest.approx(5 * 6.25 + 1)
    # recomputed: 2 s more a micro-batch
    assert problem().judge(TwoBWDecision((0, 2, 4), 2, 1, True)).objective == pytest.approx(4 * 8.25)


def test_gradients_set_the_pace_when_micro_batches_are_few() -> None:
    slow = problem(bandwidth_byte_per_s=0.1)
    # one stage, four pipelines, two micro-batches of 12 s; gradients 2 * 3/4 * 16 / 0.1 = 240 s
    assert slow.judge(TwoBWDecision((0, 4), 4, 1, False)).objective == pytest.approx(240)


def test_memory_by_stage() -> None:
    plan = TwoBWDecision((0, 2, 4), 1, 1, False)
    needed = [v.needed for v in problem(memory_bytes=1.0).judge(plan).violations]
    assert needed == [2 * 8 + 2 * 6, 2 * 8 + 2 * 6]
    by_stage = problem(memory_bytes=1.0, in_flight_by_stage=True, optimizer_per_weight=1.0).judge(plan)
    assert [v.needed for v in by_stage.violations] == [3 * 8 + 2 * 6, 3 * 8 + 6]


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (TwoBWDecision((0, 1, 4), 1, 1, False), "option"),
        (TwoBWDecision((0, 2), 1, 1, False), "coverage"),
        (TwoBWDecision((0, 4), 5, 1, False), "devices"),
        (TwoBWDecision((0, 4), 3, 1, False), "divisibility"),
        (TwoBWDecision((0, 1, 2, 3, 4), 1, 4, False), "option"),
        (TwoBWDecision((0, 2, 4), 4, 2, False), "devices"),
    ],
)
def test_malformed(plan: TwoBWDecision, kind: str) -> None:
    assert kind in {v.kind for v in problem().judge(plan).violations}


def test_two_bw_needs_as_many_micro_batches_as_stages() -> None:
    verdict = problem(global_batch=2).judge(TwoBWDecision((0, 1, 2, 3, 4), 1, 1, False))
    assert [v.kind for v in verdict.violations] == ["divisibility"]


def test_recompute_is_chosen_when_memory_is_short() -> None:
    # two stages need 2 * 8 + 2 * 6 = 28 bytes, recomputed 2 * 8 + 6 + 2 * 2 = 26
    tight = problem(memory_bytes=26.0, devices=2)
    result = solve_twobw(tight)
    assert (result.decision.depth, result.decision.recompute) == (2, True)
    assert result.proven
    assert solve_twobw(problem(memory_bytes=1.0)).decision is None


def test_bad_tables() -> None:
    with pytest.raises(UsageError, match="tables"):
        problem(weight_bytes=np.ones(3))


@st.composite
def problems(draw: st.DrawFn) -> TwoBWProblem:
    layers = draw(st.integers(1, 6))
    sizes = draw(st.sampled_from([(1,), (1, 2), (2, 3)]))
    whole = st.integers(0, 9)

    def table(columns: int) -> np.ndarray:
        row = np.array(draw(st.lists(whole, min_size=columns, max_size=columns)), dtype=float)
        return np.array([size * row for size in sizes])

    return TwoBWProblem(
        sizes,
        table(layers),
        table(layers),
        table(layers),
        table(layers + 1),
        np.array(draw(st.lists(whole, min_size=layers, max_size=layers)), dtype=float),
        devices=draw(st.integers(1, 5)),
        global_batch=draw(st.sampled_from([2, 6, 12])),
        bandwidth_byte_per_s=draw(st.sampled_from([0.5, 4.0, math.inf])),
        memory_bytes=draw(st.sampled_from([15.0, 40.0, 80.0, math.inf])),
        schedules=draw(st.sampled_from([(TwoBWSchedule.TWO_BW,), tuple(TwoBWSchedule), (TwoBWSchedule.FLUSH,)])),
        equal=draw(st.booleans()),
        optimizer_per_weight=draw(st.sampled_from([0.0, 2.0])),
        in_flight_by_stage=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(problems())
def test_same_as_trying_everything(instance: TwoBWProblem) -> None:
    oracle, found = try_everything(instance), solve_twobw(instance)
    assert found.objective == pytest.approx(oracle.objective, rel=1e-9)
    assert found.proven

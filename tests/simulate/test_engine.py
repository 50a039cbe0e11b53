"""When actions run: written-out timings of small pipelines."""

from __future__ import annotations

import numpy as np
import pytest

from planner.errors import PlanError
from planner.play import Conditions, StageTimes, Trace, Transfers, run
from planner.schedules import Action, ActionKind, Pipeline, compile_orders, get


def actions(text: str) -> list[Action]:
    found = []
    for token in text.split():
        stage, _, micro_batch = token[1:].partition(".")
        found.append(Action(ActionKind(token[0]), int(stage), int(micro_batch) if micro_batch else -1))
    return found


def times_of(trace: Trace) -> dict[str, tuple[float, float]]:
    """(start, end) of every action by its label and worker."""
    program = trace.program
    return {
        f"{program.label(a)}@{program.worker[a]}": (float(trace.start_s[a]), float(trace.end_s[a]))
        for a in range(len(program.kind))
    }


TWO = ["F0.0 F0.1 B0.0 B0.1 S0 U0", "F1.0 B1.0 F1.1 B1.1 S1 U1"]
TIMES = {"forward_s": [2.0, 3.0], "backward_s": [4.0, 5.0], "receive_s": [0.0, 1.0], "return_s": [0.0, 0.5]}


def test_blocking_transfers_occupy_the_later_stage() -> None:
    trace = run([actions(o) for o in TWO], StageTimes.of(**TIMES, sync_s=1.0, update_s=0.25))
    assert times_of(trace) == {
        "F0.0@0": (0, 2),
        "F0.1@0": (2, 4),
        "F1.0@1": (2, 6),  # 1 of receiving, 3 of work
        "B1.0@1": (6, 11.5),  # 5 of work, 0.5 of sending the gradient
        "B0.0@0": (11.5, 15.5),
        "F1.1@1": (11.5, 15.5),
        "B1.1@1": (15.5, 21),
        "B0.1@0": (21, 25),
        "S1@1": (21, 22),
        "U1@1": (22, 22.25),
        "S0@0": (25, 26),
        "U0@0": (26, 26.25),
    }
    assert trace.compute_s().tolist() == pytest.approx([12.25, 16.25])
    assert trace.communication_s().tolist() == pytest.approx([1.0, 4.0])


def test_overlapped_transfers_occupy_only_the_link() -> None:
    trace = run([actions(o) for o in TWO], StageTimes.of(**TIMES), Conditions(Transfers.OVERLAPPED))
    found = times_of(trace)
    assert found["F1.0@1"] == (3, 6)
    assert found["B1.0@1"] == (6, 11)
    assert found["F1.1@1"] == (11, 14)
    assert found["B0.0@0"] == (11.5, 15.5)
    assert found["B0.1@0"] == (19.5, 23.5)
    assert trace.communication_s().tolist() == [0.0, 0.0]


def test_a_link_carries_one_transfer_at_a_time() -> None:
    orders = [actions("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"), actions("F1.0 F1.1 F1.2 B1.0 B1.1 B1.2")]
    times = StageTimes.of([1.0, 1.0], [1.0, 1.0], [0.0, 5.0], return_s=0.0)
    found = times_of(run(orders, times, Conditions(Transfers.OVERLAPPED)))
    assert [found[f"F1.{m}@1"][0] for m in range(3)] == [6, 11, 16]


def test_links_of_different_pairs_run_side_by_side() -> None:
    orders = [actions("F0.0 F0.1 B0.0 B0.1"), actions("F1.0 B1.0"), actions("F1.1 B1.1")]
    times = StageTimes.of([1.0, 1.0], [1.0, 1.0], [0.0, 5.0], return_s=0.0)
    found = times_of(run(orders, times, Conditions(Transfers.OVERLAPPED)))
    assert (found["F1.0@1"][0], found["F1.1@2"][0]) == (6, 7)


def test_synchronisation_waits_for_all_replicas() -> None:
    orders = [actions("F0.0 B0.0 F0.1 B0.1 S0 U0"), actions("F0.2 B0.2 S0 U0")]
    found = times_of(run(orders, StageTimes.of([1.0], [2.0], sync_s=4.0, update_s=1.0)))
    assert found["S0@0"] == (6, 10)
    assert found["S0@1"] == (6, 10)
    assert found["U0@1"] == (10, 11)


def test_split_backward_lets_the_stage_before_go_on() -> None:
    orders = [actions("F0.0 I0.0 W0.0"), actions("F1.0 I1.0 W1.0")]
    found = times_of(run(orders, StageTimes.of([1.0, 1.0], [3.0, 3.0], weight_grad_s=[1.0, 2.0])))
    assert found == {
        "F0.0@0": (0, 1),
        "F1.0@1": (1, 2),
        "I1.0@1": (2, 3),
        "W1.0@1": (3, 5),
        "I0.0@0": (3, 5),
        "W0.0@0": (5, 6),
    }


def test_no_transfer_between_stages_of_one_worker() -> None:
    orders = [actions("F0.0 F1.0 B1.0 B0.0")]
    for transfers in Transfers:
        assert run(orders, StageTimes.of([1.0, 1.0], [1.0, 1.0], 9.0), Conditions(transfers)).makespan_s == 4


def test_cost_of_following_iterations_is_the_longest_span() -> None:
    orders = [actions("F0.0 B0.0"), actions("F1.0 B1.0")]
    trace = run(orders, StageTimes.of([4.0, 1.0], [1.0, 1.0]))
    assert trace.makespan_s == 7
    assert trace.span_s() == 7
    assert run(orders[:1], StageTimes.of([4.0], [1.0])).span_s() == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"forward_s": [1.0, 2.0], "backward_s": [1.0]}, "differ in length"),
        ({"forward_s": [-1.0], "backward_s": [1.0]}, "negative or not finite"),
        ({"forward_s": [float("nan")], "backward_s": [1.0]}, "negative or not finite"),
    ],
)
def test_times_that_are_refused(given: dict[str, list[float]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        StageTimes.of(**given)


def test_times_for_too_few_stages() -> None:
    with pytest.raises(PlanError, match="2 stages, but times are given for 1"):
        run([actions(o) for o in TWO], StageTimes.of([1.0], [1.0]))


def test_a_hundred_thousand_actions() -> None:
    program = compile_orders(get("1f1b").order(Pipeline((4,) * 16, 4 * 800)))
    trace = run(program, StageTimes.of([1.0] * 16, [2.0] * 16, 0.1))
    assert len(trace.program.kind) > 100_000
    assert np.isfinite(trace.end_s).all()

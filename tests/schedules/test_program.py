"""Orders that cannot run are refused with what is wrong and where."""

from __future__ import annotations

import pytest

from planner.errors import PlanError
from planner.schedules import Action, ActionKind, compile_orders


def order(text: str) -> list[Action]:
    """`F0.1 S0` to actions."""
    actions = []
    for token in text.split():
        stage, _, micro_batch = token[1:].partition(".")
        actions.append(Action(ActionKind(token[0]), int(stage), int(micro_batch) if micro_batch else -1))
    return actions


def test_sources_point_at_the_neighbouring_stage() -> None:
    program = compile_orders([order("F0.0 B0.0 S0 U0"), order("F1.0 B1.0 S1 U1")])
    assert program.source.tolist() == [-1, 5, -1, -1, 0, -1, -1, -1]
    assert [program.label(a) for a in program.sequence] == ["F0.0", "F1.0", "B1.0", "S1", "U1", "B0.0", "S0", "U0"]


def test_several_stages_on_one_worker() -> None:
    program = compile_orders([order("F0.0 F2.0 B2.0 B0.0 S0 S2 U0 U2"), order("F1.0 B1.0 S1 U1")])
    assert program.workers == 2
    assert program.stages == 3


def test_split_backward() -> None:
    program = compile_orders([order("F0.0 I0.0 W0.0 U0"), order("F1.0 I1.0 W1.0 U1")])
    assert program.source.tolist() == [-1, 5, -1, -1, 0, -1, -1, -1]


def test_deadlock_shows_the_cycle() -> None:
    with pytest.raises(PlanError) as caught:
        compile_orders([order("F0.0 B0.0 F0.1 B0.1"), order("F1.0 F1.1 B1.0 B1.1")])
    assert "deadlocks" in str(caught.value)
    assert "worker 0 at B0.0 waits for B1.0; worker 1 at F1.1 waits for F0.1" in str(caught.value)


def test_collectives_in_crossed_order_deadlock() -> None:
    left, right = "F0.0 F1.0 B1.0 B0.0 S0 S1", "F0.1 F1.1 B1.1 B0.1 S1 S0"
    cycle = "worker 0 at S0 waits for S0 of worker 1; worker 1 at S1 waits for S1 of worker 0"
    with pytest.raises(PlanError, match=cycle):
        compile_orders([order(left), order(right)])


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ([""], "no actions"),
        (["F0.0 F0.0 B0.0"], "F0.0 is scheduled more than once"),
        (["F0.0"], "F0.0 needs its backward"),
        (["B0.0"], "B0.0 needs its forward"),
        (["F1.0 B1.0"], "F1.0 needs the forward of the stage before"),
        (["F0.0 B0.0 F0.1 B0.1", "F1.0 B1.0"], "B0.1 needs the backward of the stage after"),
        (["B0.0 F0.0"], "does not come after its forward"),
        (["F0.0", "B0.0"], "does not come after its forward"),
        (["F0.0 I0.0"], "needs its weight gradient"),
        (["F0.0 W0.0 I0.0"], "does not come after its input gradient"),
        (["F0.0 B0.0 S0 S0"], "synchronises a stage more than once"),
    ],
)
def test_orders_that_are_refused(orders: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        compile_orders([order(text) for text in orders])

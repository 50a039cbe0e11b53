"""Orders of ranks as they are executed: where tied gradients are exchanged, and orders that block each other."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import planner
from planner import runtime
from planner.runtime.orders import sequences, tied_exchanges
from tests.runtime import cases


def tied(pipeline: int, schedule: str = "1f1b") -> planner.Plan:
    """A pipeline whose first and last stage share the embedding."""
    return cases.plan(cases.Case("", "gpt", pipeline, {"pipeline": pipeline, "schedule": schedule}, 4))


def ordered(plan: planner.Plan, rank: int, actions: str) -> planner.Plan:
    """The plan with another line of actions for a rank."""
    orders = tuple(
        dataclasses.replace(order, actions=actions) if rank in order.ranks else order for order in plan.schedule.orders
    )
    return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, orders=orders))


@pytest.mark.parametrize(
    ("pipeline", "schedule", "at"),
    [
        (2, "1f1b", {0: ["S0"], 1: ["S1"]}),
        (3, "1f1b", {0: ["S0"], 1: [], 2: ["S2"]}),
        (2, "zb-v", {0: ["S3"], 1: []}),  # one rank has both: the later of its exchanges
        (2, "chimera", {0: ["S1"], 1: ["S1"]}),
    ],
)
def test_a_tied_gradient_is_exchanged_at_the_last_exchange_of_its_stages(
    pipeline: int, schedule: str, at: dict[int, list[str]]
) -> None:
    plan = tied(pipeline, schedule)
    for rank, actions in sequences(plan).items():
        left = tied_exchanges(plan, actions)
        assert [str(action) for action in actions if left.done(action)] == at[rank]


def test_ranks_sum_several_tied_weights_in_one_order() -> None:
    # the stages of a rank share two weights with those of the other: one in both, one in the first of them alone
    plan = cases.plan(cases.Case("", "t5", 2, {"pipeline": 2, "schedule": "zb-v"}, 4))
    assert [tie.stages for tie in plan.shared_parameters] == [(0, 1, 3), (0, 1)]
    for actions in sequences(plan).values():
        left = tied_exchanges(plan, actions)
        summed = [[tie.parameter for tie in ties] for action in actions if (ties := left.done(action))]
        assert summed == [[tie.parameter for tie in plan.shared_parameters]]
    found = runtime.run(plan, cases.model("t5"), steps=0, check=True).check
    assert found is not None
    assert found.largest < 1e-11


def test_orders_that_a_tied_exchange_would_block_are_refused() -> None:
    plan = tied(2)
    assert sequences(ordered(plan, 1, "(F1.0 B1.0)*4 S1 U1"))
    early = ordered(plan, 1, "(F1.0 B1.0)*3 F1.3 S1 B1.3 U1")  # waits for S0, which waits for B1.3
    with pytest.raises(planner.PlanError, match=r"block each other: rank 0 at B0.3, rank 1 at S1"):
        sequences(early)


def test_the_same_orders_without_a_tie_do_not_block() -> None:
    plan = cases.plan(cases.Case("", "gpt, untied", 2, {"pipeline": 2}, 4))
    early = ordered(plan, 1, "(F1.0 B1.0)*3 F1.3 S1 B1.3 U1")
    assert [str(action) for action in sequences(early)[1]][-4:] == ["F1.3", "S1", "B1.3", "U1"]

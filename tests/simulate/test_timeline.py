"""A plan played out: totals, lanes, memory, comparison."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from planner.errors import PlanError
from planner.plans import Plan, encode_orders
from planner.schedules import Action, ActionKind
from planner.simulate import Timeline, simulate
from tests.simulate.plans import GIB, toy_plan


def test_totals_of_a_pipeline_of_equal_stages() -> None:
    """(6 + 3 - 1) * 3 ms, then 2 ms of synchronisation and 0.5 ms of update on stage 0."""
    timeline = simulate(toy_plan())
    assert timeline.step_s == pytest.approx(0.0265)
    assert timeline.samples_per_s == pytest.approx(6 / 0.0265)
    assert timeline.bubble_fraction == pytest.approx(1 - 3 * (6 * 0.003 + 0.002 + 0.0005) / (3 * 0.0265))
    assert [lane.ranks for lane in timeline.lanes] == [(0,), (1,), (2,)]
    for lane in timeline.lanes:
        assert lane.compute_s == pytest.approx(0.0185)
        assert lane.communication_s == pytest.approx(0.002)
        assert lane.compute_s + lane.communication_s + lane.idle_s == pytest.approx(timeline.step_s)


def test_memory_follows_the_micro_batches_in_flight() -> None:
    timeline = simulate(toy_plan())
    assert [lane.in_flight for lane in timeline.lanes] == [3, 2, 1]
    # fixed 2 GiB, 1/4 GiB for each micro-batch, 1/8 GiB of workspace
    assert [lane.memory.peak_bytes / GIB for lane in timeline.lanes] == pytest.approx([2.875, 2.625, 2.375])
    curve = timeline.lanes[2].memory
    assert curve.held_bytes[[0, -1]] / GIB == pytest.approx([2.0, 2.0])
    assert curve.time_s[:4] == pytest.approx([0.0, 0.002, 0.003, 0.005])
    assert curve.held_bytes[:4] / GIB == pytest.approx([2.0, 2.25, 2.375, 2.0])
    assert all(lane.fits for lane in timeline.lanes)
    assert not simulate(toy_plan(capacity_gib=2)).lanes[0].fits


def test_copies_are_played_once_and_share_their_lane() -> None:
    timeline = simulate(toy_plan(copies=2, replicas=(2, 1, 1), micro_batches=8))
    assert timeline.copies == 2
    assert timeline.micro_batches == 8
    assert [lane.ranks for lane in timeline.lanes] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [lane.stages for lane in timeline.lanes] == [(0,), (0,), (1,), (2,)]


def test_copies_that_differ_are_all_played() -> None:
    plan = toy_plan(copies=2, replicas=(1, 1, 1))
    orders = {rank: list(plan.actions(rank)) for rank in range(6)}
    swapped = orders[3]
    at = next(i for i, a in enumerate(swapped) if a.kind is ActionKind.SYNC)
    orders[3] = [
        *(a for a in swapped if a.kind is ActionKind.FORWARD),
        *(a for a in swapped if a.kind is ActionKind.BACKWARD),
        *swapped[at:],
    ]
    timeline = simulate(with_orders(plan, orders))
    assert timeline.copies == 1
    assert len(timeline.lanes) == 6
    assert timeline.lanes[3].in_flight == 6


def with_orders(plan: Plan, orders: dict[int, list[Action]]) -> Plan:
    return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, orders=encode_orders(orders)))


def test_deadlock_names_the_waiting_workers() -> None:
    plan = toy_plan(replicas=(1, 1), starts=(0, 2))
    orders = {rank: list(plan.actions(rank)) for rank in (0, 1)}
    forwards = [a for a in orders[1] if a.kind is ActionKind.FORWARD]
    orders[1] = [*forwards, *(a for a in orders[1] if a.kind is not ActionKind.FORWARD)]
    with pytest.raises(PlanError, match=r"deadlocks: worker 0 at B0\.0 waits for B1\.0"):
        simulate(with_orders(plan, orders))


def test_missing_actions_are_refused() -> None:
    plan = toy_plan()
    orders = {rank: list(plan.actions(rank)) for rank in range(3)}
    orders[1] = [a for a in orders[1] if a.micro_batch != 3]
    with pytest.raises(PlanError, match=r"F2\.3 needs the forward of the stage before"):
        simulate(with_orders(plan, orders))


def stated(plan: Plan, iteration_s: float) -> Plan:
    return dataclasses.replace(plan, predictions=dataclasses.replace(plan.predictions, iteration_s=iteration_s))


def test_prediction_that_agrees_has_no_effects() -> None:
    found = simulate(stated(toy_plan(), 0.0265)).comparison
    assert found.effects == ()
    assert found.difference == pytest.approx(0.0, abs=1e-9)
    assert (found.closed_form_s, found.critical_s, found.simulated_s) == pytest.approx((0.0265, 0.0265, 0.0265))


@pytest.mark.parametrize(
    ("slow", "transfers", "names"),
    [
        (0.002, "blocking", ["stated time", "filled waits"]),
        (0.001, "blocking", ["stated time"]),
        (0.001, "overlapped", ["stated time", "overlapped transfers"]),
    ],
)
def test_effects_add_up_to_the_difference(slow: float, transfers: str, names: list[str]) -> None:
    plan = toy_plan(forward_s=(slow, 0.001, 0.001), backward_s=(2 * slow, 0.002, 0.002), receive_s=0.0003)
    timeline = simulate(stated(plan, 0.06), transfers=transfers)
    found = timeline.comparison
    assert found.simulated_s == timeline.step_s
    assert sum(seconds for _, seconds, _ in found.effects) == pytest.approx(0.06 - timeline.step_s, abs=1e-6)
    assert [name for name, _, _ in found.effects] == names


def test_overlapped_transfers_are_never_slower_here() -> None:
    plan = toy_plan(receive_s=0.0005)
    assert simulate(plan, transfers="overlapped").step_s < simulate(plan).step_s


def test_same_plan_same_timeline() -> None:
    first, second = simulate(toy_plan()), simulate(toy_plan())
    assert np.array_equal(first.trace.end_s, second.trace.end_s)
    assert isinstance(first, Timeline)


def test_stages_out_of_order_are_not_played() -> None:
    plan = toy_plan()
    moved = dataclasses.replace(plan.stages[1], index=2)
    with pytest.raises(PlanError, match="stage 2 stands at place 1"):
        simulate(dataclasses.replace(plan, stages=(plan.stages[0], moved, plan.stages[2])))


def test_a_rank_without_actions_in_a_pipeline_that_never_drains() -> None:
    import planner
    from tests.importers.build import absent, model, node, value

    layers = [node("MatMul", ["x", "v"], ["h"]), node("MatMul", ["h", "w"], ["y"])]
    stored = [absent("v", [8, 8]), absent("w", [8, 8])]
    graph = planner.graph_from_proto(model(layers, [value("x", [1, 8])], [value("y", None)], stored))
    plan = planner.plan_system("pipedream-2bw", graph, planner.load_cluster("v100-pcie-4"), planner.Job(8))
    first, *others = plan.schedule.orders
    moved = dataclasses.replace(first, ranks=(3, *first.ranks[1:]))
    section = dataclasses.replace(plan.schedule, orders=(moved, *others))
    with pytest.raises(PlanError, match="rank 0 has no actions"):
        simulate(dataclasses.replace(plan, schedule=section))

"""A plan for a given schedule worked out again from what it decides: the same stages priced and played anew."""

from __future__ import annotations

import dataclasses

from planner import schedules
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plan import Plan, with_simulation
from planner.plan.files import seal
from planner.plan.works import leaders, work_of
from planner.play import Transfers
from planner.schedules.own_orders import own_schedule
from planner.schedules.types import Pipeline, Schedule
from planner.simulate import simulate
from planner.space.limits import forbidden_choices
from planner.space.pricer import Pricer
from planner.space.types import Configuration, StageChoice
from planner.systems._bench import Bench
from planner.systems._boundaries import Search
from planner.systems._ordered import check_followed
from planner.systems._plan_point import plan_cut
from planner.systems._shapes import Shape


def evaluate_scheduled(plan: Plan, graph: Graph, cluster: Cluster) -> tuple[Plan, str]:
    """The plan as planning for its schedule would write these stages, and why it would not; "" where it would.

    Args:
        plan: made for a schedule that the user gave.
        graph: its model.
        cluster: its hardware.

    Raises:
        UsageError: no schedule has the plan's name, or a limit that such plans cannot keep.
        PlanError: the schedule cannot serve the stages and micro-batches.
        ShardplanError: the model cannot be priced on the cluster.
    """
    schedule, job = _schedule(plan), plan.options
    check_followed(job, schedule)
    own = dataclasses.replace(job, micro_batches=(plan.micro_batches.size,))
    bench = Bench(Pricer(graph, cluster, own), cluster, own)
    stages, copies = len(plan.stages), plan.copies
    count = plan.micro_batches.count // copies
    pipeline = Pipeline((1,) * stages, count)
    holders, repeats = schedule.holders(pipeline), schedule.recomputed_stages(pipeline)
    workers = schedule.workers(pipeline)
    first = plan.stages[0]
    shape = Shape(
        schedule,
        stages,
        workers,
        copies,
        plan.micro_batches.size,
        count,
        first.recompute,
        holders,
        0.0,
        repeats,
        adjacent=copies > 1 and len(first.replicas) > 1 and first.replicas[1][0] == first.replicas[0][0] + 1 < workers,
    )
    transfers = Transfers(plan.schedule.transfers)
    cut = Search(bench, shape, transfers).at((*(stage.blocks[0] for stage in plan.stages), plan.stages[-1].blocks[1]))
    again = plan_cut(bench, cut, transfers, plan.schedule.given, plan.provenance)
    again = seal(dataclasses.replace(again, options=job))
    reason = cut.reason if cut.over_bytes > 0 else _forbidden(plan)
    return with_simulation(again, simulate(again).step_s), reason


def _schedule(plan: Plan) -> Schedule:
    """The schedule by its name, or the orders of one copy where they are the user's own."""
    if plan.schedule.given != "orders":
        return schedules.get(plan.schedule.name)
    ranks, copies = leaders(plan)
    return own_schedule(work_of(plan, ranks, copies=copies), plan.schedule.name)


def _forbidden(plan: Plan) -> str:
    """The first limit of the job that the plan breaks, whatever schedules it would allow the own search."""
    copies = plan.copies
    stages = tuple(StageChoice(*s.blocks, len(s.replicas) // copies, s.recompute) for s in plan.stages)
    count, size = plan.micro_batches.count // copies, plan.micro_batches.size
    decision = Configuration(stages, copies, size, count, plan.schedule.name, plan.stages[0].zero)
    job = dataclasses.replace(plan.options, schedules=(plan.schedule.name,))
    found = forbidden_choices(job, decision, tuple(block.name for block in plan.block_table))
    if job.devices and plan.world_size > job.devices:
        return f"the plan takes {plan.world_size} devices, {job.devices} are allowed"
    return found[0].message if found else ""

"""The best stages for one schedule: any of `planner.schedules` by name, or orders of one's own from a file.

Stages begin balanced within memory; then boundaries are moved as long as the simulated iteration gets shorter. That
finds a cut that no single move improves, not a proven optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from planner import schedules
from planner.errors import InfeasibleError, JobError, PlanError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.memory import fits
from planner.plan import Plan, Provenance, validate, with_simulation
from planner.plan.schedule_section import Given
from planner.play import Transfers
from planner.schedules.own_orders import own_schedule
from planner.schedules.types import OrderError, Schedule
from planner.simulate import simulate
from planner.space.asked import PRICED, in_words, refuse_others
from planner.space.jobs import check_job
from planner.space.pricer import Pricer
from planner.space.types import Job
from planner.systems._bench import Bench
from planner.systems._boundaries import Cut, Search
from planner.systems._plan_point import plan_cut
from planner.systems._shapes import Shape, obstacle, shapes_for
from planner.units import format_bytes

TAKES = PRICED | {"recompute", "pipeline_stages", "data_parallel", "max_stages"}
"""Fields of a job that stages for a given schedule follow."""

HAVE = {"tensor_parallel": 1, "meshes": (1,), "zero": 0, "uniform": True}
"""What all of them have: stages are single devices without ZeRO, as many replicas of each as there are copies."""

MOST_SHAPES = 12
"""Numbers of stages, copies and micro-batch sizes that fit and are simulated at the most, most promising first."""

MOST_IMPROVED = 3
"""Of these, shapes whose boundaries are moved."""


def plan_schedule(
    schedule: str | Path | Schedule,
    graph: Graph,
    cluster: Cluster,
    job: Job,
    *,
    transfers: Transfers | str = Transfers.BLOCKING,
    strict_ops: bool = False,
    provenance: Provenance | None = None,
) -> Plan:
    """The best stages for one schedule, as a plan.

    Args:
        schedule: a name of `planner.schedules` with options, a CSV or JSON file of orders (see `read_orders`), whose
            numbers of stages and micro-batches hold, or a schedule itself.
        graph: the model.
        cluster: the machine.
        job: global batch, precision, optimizer, limits. `pipeline_stages` and `max_stages` count pieces of the model,
            of which a worker has several in some schedules; `data_parallel` the workers that have a piece.
        transfers: what a transfer between stages occupies.
        strict_ops: refuse operators that no rule describes.
        provenance: how the plan came to be, for its file.

    Raises:
        UsageError: no schedule has that name, or a limit that such plans cannot keep.
        PlanError: the orders deadlock (the message shows the cycle) or cannot run (it names the action).
        JobError: stages, micro-batches and devices do not fit the global batch.
        InfeasibleError: no stages fit in memory; the message says what is in the way, and when.
    """
    chosen = _schedule(schedule)
    check_job(job)
    check_followed(job, chosen)
    bench = Bench(Pricer(graph, cluster, job, strict_ops=strict_ops), cluster, job)
    shapes = sorted(shapes_for(bench, chosen), key=lambda shape: (shape.estimate_s, shape.stages, shape.micro_batch))
    if not shapes:
        raise JobError(_nothing(bench, chosen), hint="change the global batch, the devices or the schedule")
    best = _best(bench, shapes, Transfers(transfers))
    if best.over_bytes > 0:
        raise InfeasibleError(f"{chosen.name}: {best.reason}", hint="use more stages, devices or recomputation")
    given: Given = "orders" if chosen.fixed else "name"
    plan = plan_cut(bench, best, Transfers(transfers), given, provenance)
    plan = with_simulation(plan, simulate(plan).step_s)
    wrong = validate(plan)
    if wrong:
        raise PlanError(wrong[0].message, where=chosen.name, hint=wrong[0].hint)
    return plan


def check_followed(job: Job, schedule: Schedule) -> None:
    """Refuse limits that stages for a given schedule do not follow.

    Raises:
        UsageError: names them.
    """
    refuse_others(
        job, TAKES, f"plans for the schedule {schedule.name!r}",
        "leave it out, or let the search choose between 1f1b and gpipe", HAVE,
    )  # fmt: skip


def _schedule(schedule: str | Path | Schedule) -> Schedule:
    if isinstance(schedule, (str, Path)):
        path = Path(schedule)
        if isinstance(schedule, Path) or path.suffix.lower() in (".csv", ".json"):
            work = schedules.read_orders(path)
            try:
                return own_schedule(work, path.stem)
            except OrderError as error:  # with the exchanges that the file leaves out
                raise PlanError(error.problem.message, where=str(path), hint=error.problem.hint) from error
        return schedules.get(schedule)
    return schedule


def _nothing(bench: Bench, schedule: Schedule) -> str:
    words = in_words(bench.job)
    limits = f" with {words}" if words else ""
    if own := schedule.fixed:
        return (
            f"{schedule.name} has {own.stages} stages on {schedule.workers(own)} workers and {own.micro_batches} "
            f"micro-batches, which do not come out for {bench.blocks} blocks, {bench.devices} devices and a global "
            f"batch of {bench.job.global_batch}{limits}"
        )
    why = obstacle(bench, schedule)
    return f"{schedule.name} can serve no number of stages, copies and micro-batches of this job{limits}" + (
        f": {why}" if why else ""
    )


def _best(bench: Bench, shapes: Sequence[Shape], transfers: Transfers) -> Cut:
    """The best cut of the shapes given, the most promising first: some are begun, and the best few of them improved.

    Raises:
        InfeasibleError: some stage exceeds the memory, however the model is cut.
    """
    begun: list[tuple[Search, Cut]] = []
    fastest, least = math.inf, (math.inf, shapes[0])
    for shape in shapes:
        fitting = sum(cut.over_bytes <= 0 for _, cut in begun)
        if fitting >= MOST_SHAPES or len(begun) >= 2 * MOST_SHAPES:
            break
        if shape.bound_s >= fastest:
            continue
        need, room = shape.least_bytes(bench), min(d.usable_bytes for d in bench.cluster.devices)
        least = min(least, (need, shape), key=lambda entry: entry[0])
        if not fits(need, room) and not shape.schedule.fixed:
            continue
        tried = [(search, search.begin()) for search in (Search(bench, s, transfers) for s in shape.placements)]
        begun.append(min(tried, key=lambda entry: entry[1].key))
        if begun[-1][1].over_bytes <= 0:
            fastest = min(fastest, begun[-1][1].seconds)
    if not begun:
        raise InfeasibleError(_least(bench, *least), hint="use more stages, devices or recomputation")
    begun.sort(key=lambda entry: entry[1].key)
    return min((search.improve(cut) for search, cut in begun[:MOST_IMPROVED]), key=lambda cut: cut.key)


def _least(bench: Bench, need: float, shape: Shape) -> str:
    device = min(bench.cluster.devices, key=lambda d: d.usable_bytes)
    again = ", recompute" if shape.recompute else ""
    return (
        f"{shape.schedule.name}: the fullest worker holds {format_bytes(need + device.reserve_bytes)} of "
        f"{format_bytes(float(device.memory_bytes))} at the least ({shape.stages} stages, "
        f"micro-batch {shape.micro_batch}{again})"
    )

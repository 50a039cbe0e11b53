"""The best stages for one schedule: any of `planner.schedules` by name, or orders of one's own from a file.

Stages begin balanced within memory; then boundaries are moved as long as the simulated iteration gets shorter. That
finds a cut that no single move improves, not a proven optimum.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from planner import schedules
from planner.errors import InfeasibleError, JobError, PlanError
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.plan import Plan, Provenance, validate, with_simulation
from planner.schedules.own_orders import OwnOrders, own_schedule
from planner.schedules.program import Program, compile_orders
from planner.schedules.types import ActionKind, ActivationUnit, Pipeline, Schedule, Work
from planner.simulate import StageBytes, StageTimes, Trace, Transfers, run, simulate
from planner.simulate.memory import memory_curve
from planner.simulate.steady import find_pace, rhythm_of
from planner.space.pricer import Pricer
from planner.space.types import Job, StageChoice
from planner.systems._bench import Bench, StageRule
from planner.systems._cuts import balanced, least_need
from planner.systems._planned import plan_point
from planner.systems._price import Figures, price
from planner.systems.types import Point
from planner.units import format_bytes

MOST_SHAPES = 12
"""Numbers of stages, copies and micro-batch sizes that fit and are simulated at the most, most promising first."""

MOST_IMPROVED = 3
"""Of these, shapes whose boundaries are moved."""

MOST_ACTIONS = 600_000
"""Actions that moving the boundaries of one shape may simulate."""

LONGEST = 400_000
"""Longer orders are not simulated."""

Marks = tuple[int, ...]
Holders = tuple[tuple[int, ...], ...]


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
        job: global batch, precision, optimizer, limits.
        transfers: what a transfer between stages occupies.
        strict_ops: refuse operators that no rule describes.
        provenance: how the plan came to be, for its file.

    Raises:
        UsageError: no schedule has that name.
        PlanError: the orders deadlock (the message shows the cycle) or cannot run (it names the action).
        JobError: stages, micro-batches and devices do not fit the global batch.
        InfeasibleError: no stages fit in memory; the message says what is in the way, and when.
    """
    chosen = _schedule(schedule)
    bench = Bench(Pricer(graph, cluster, job, strict_ops=strict_ops), cluster, job)
    shapes = sorted(_shapes(bench, chosen), key=lambda shape: (shape.estimate_s, shape.stages, shape.micro_batch))
    if not shapes:
        raise JobError(_nothing(bench, chosen), hint="change the global batch, the devices or the schedule")
    best = _best(bench, shapes, Transfers(transfers))
    if best.over_bytes > 0:
        raise InfeasibleError(f"{chosen.name}: {best.reason}", hint="use more stages, devices or recomputation")
    plan = plan_point(
        bench, best.point, chosen, best.seconds, Transfers(transfers), holders=best.shape.holders,
        provenance=provenance,
    )  # fmt: skip
    plan = with_simulation(plan, simulate(plan).step_s)
    wrong = validate(plan)
    if wrong:
        raise PlanError(wrong[0].message, where=chosen.name, hint=wrong[0].hint)
    return plan


def _schedule(schedule: str | Path | Schedule) -> Schedule:
    if isinstance(schedule, (str, Path)):
        path = Path(schedule)
        if isinstance(schedule, Path) or path.suffix.lower() in (".csv", ".json"):
            return own_schedule(schedules.read_orders(path), path.stem)
        return schedules.get(schedule)
    return schedule


@dataclass(frozen=True, slots=True)
class _Shape:
    """Numbers of stages, micro-batches and copies, with the orders for them.

    Attributes:
        schedule: the schedule.
        stages, workers: of one copy.
        copies: of the pipeline.
        micro_batch, micro_batches: of one copy.
        recompute: of all stages.
        holders: workers that have each stage.
        bound_s: no cut is faster.
    """

    schedule: Schedule
    stages: int
    workers: int
    copies: int
    micro_batch: int
    micro_batches: int
    recompute: bool
    holders: Holders
    bound_s: float

    @property
    def pipeline(self) -> Pipeline:
        """One copy."""
        return Pipeline((1,) * self.stages, self.micro_batches)

    @property
    def estimate_s(self) -> float:
        """With a pipeline that fills and drains, where it does: the order in which shapes are tried."""
        idle = self.workers - 1 if self.schedule.weight_policy.synchronous else 0
        return self.bound_s * (self.micro_batches + idle) / self.micro_batches

    def least_bytes(self, bench: Bench) -> float:
        """Of the fullest worker, however the model is cut; the runtime's reserve left out.

        With what is in flight where each worker has one stage, else with one micro-batch.
        """
        tables = bench.tables(self.micro_batch)
        each = max(1.0, sum(len(own) for own in self.holders) / self.workers)
        need = tables.needed(StageRule(1 / each), recompute=self.recompute) * each
        least = least_need([need] * self.stages, tables.real)
        alone = all(own == (stage,) for stage, own in enumerate(self.holders))
        if not alone or least > min(d.usable_bytes for d in bench.cluster.devices):
            return least
        kept, versions = self.schedule.in_flight(self.pipeline), self.schedule.weight_versions(self.pipeline)
        if self.schedule.activation_unit is not ActivationUnit.MICRO_BATCH:
            kept = (1,) * self.stages
        rules = [StageRule(k, v) for k, v in zip(kept, versions, strict=True)]
        return least_need([tables.needed(rule, recompute=self.recompute) for rule in rules], tables.real)

    def point(self, marks: Marks) -> Point:
        """The point with these boundaries."""
        return Point(
            tuple(StageChoice(a, b, 1, self.recompute) for a, b in itertools.pairwise(marks)),
            self.copies,
            self.micro_batch,
            self.micro_batches,
            self.schedule.name,
            tuple(range(self.copies * self.workers)),
            slice_devices=self.workers,
        )


def _shapes(bench: Bench, schedule: Schedule) -> Iterator[_Shape]:
    """All shapes that the schedule, the devices and the global batch allow."""
    choices = {"never": (False,), "always": (True,)}.get(bench.job.recompute, (False, True))
    for stages in _stage_counts(bench, schedule):
        holders = _holders(bench, schedule, stages)
        workers = max((worker for own in holders for worker in own), default=bench.devices) + 1
        for size in bench.sizes:
            for copies, count in _dealt(bench, schedule, stages, size):
                if workers * copies > bench.devices or schedule.supports(Pipeline((1,) * stages, count)):
                    continue
                for recompute in choices:
                    total_s = float(bench.tables(size).stage_s(recompute=recompute)[0, -1])
                    bound_s = total_s * count / workers
                    yield _Shape(schedule, stages, workers, copies, size, count, recompute, holders, bound_s)


def _stage_counts(bench: Bench, schedule: Schedule) -> Sequence[int]:
    """Pieces of the model worth trying: those of the orders, else few, multiples of eight, and the most."""
    if isinstance(schedule, OwnOrders):
        return (schedule.stages,)
    most = min(bench.blocks, bench.job.max_stages or bench.blocks)
    return sorted({s for s in (*range(2, 17), *range(24, most + 1, 8), most) if 2 <= s <= most})


def _dealt(bench: Bench, schedule: Schedule, stages: int, size: int) -> Iterator[tuple[int, int]]:
    """(copies, micro-batches of each) that make the global batch."""
    parts, rest = divmod(bench.job.global_batch, size)
    if rest:
        return
    if isinstance(schedule, OwnOrders):
        copies, rest = divmod(parts, schedule.micro_batches)
        if copies and not rest:
            yield copies, schedule.micro_batches
        return
    for copies in range(bench.devices, 0, -1):
        if parts % copies == 0 and 2 * parts // copies * stages <= LONGEST:
            yield copies, parts // copies


def _holders(bench: Bench, schedule: Schedule, stages: int) -> Holders:
    """Workers that have each stage, read off orders of few micro-batches; () where there are none."""
    counts = (schedule.micro_batches,) if isinstance(schedule, OwnOrders) else (stages, 2 * stages, 4 * stages)
    if stages > bench.blocks:
        return ()
    for count in counts:
        pipeline = Pipeline((1,) * stages, count)
        if schedule.supports(pipeline):
            continue
        found: list[set[int]] = [set() for _ in range(stages)]
        work = schedule.work(pipeline)
        for lane, worker in zip(work.lanes, work.lane_workers, strict=True):
            for action in lane:
                found[action.stage].add(worker)
        return tuple(tuple(sorted(own)) for own in found)
    return ()


def _nothing(bench: Bench, schedule: Schedule) -> str:
    if isinstance(schedule, OwnOrders):
        workers = max(schedule.orders.lane_workers) + 1
        return (
            f"{schedule.name} has {schedule.stages} stages on {workers} workers and {schedule.micro_batches} "
            f"micro-batches, which do not come out for {bench.blocks} blocks, {bench.devices} devices and a global "
            f"batch of {bench.job.global_batch}"
        )
    return f"{schedule.name} can serve no number of stages, copies and micro-batches of this job"


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """Boundaries tried: by how much memory is exceeded, the simulated time, and where memory is short."""

    shape: _Shape
    marks: Marks
    over_bytes: float
    seconds: float
    reason: str = ""

    @property
    def key(self) -> tuple[float, float]:
        """What is better is smaller."""
        return self.over_bytes, self.seconds

    @property
    def point(self) -> Point:
        """The point that this is."""
        return self.shape.point(self.marks)


def _best(bench: Bench, shapes: Sequence[_Shape], transfers: Transfers) -> _Cut:
    """The best cut of the shapes given, the most promising first: some are begun, and the best few of them improved.

    Raises:
        InfeasibleError: some stage exceeds the memory, however the model is cut.
    """
    begun: list[tuple[_Search, _Cut]] = []
    fastest, least = math.inf, (math.inf, shapes[0])
    for shape in shapes:
        fitting = sum(cut.over_bytes <= 0 for _, cut in begun)
        if fitting >= MOST_SHAPES or len(begun) >= 2 * MOST_SHAPES:
            break
        if shape.bound_s >= fastest:
            continue
        need, room = shape.least_bytes(bench), min(d.usable_bytes for d in bench.cluster.devices)
        least = min(least, (need, shape), key=lambda entry: entry[0])
        if need > room and not isinstance(shape.schedule, OwnOrders):
            continue
        search = _Search(bench, shape, transfers)
        begun.append((search, search.begin()))
        if begun[-1][1].over_bytes <= 0:
            fastest = min(fastest, begun[-1][1].seconds)
    if not begun:
        raise InfeasibleError(_least(bench, *least), hint="use more stages, devices or recomputation")
    begun.sort(key=lambda entry: entry[1].key)
    return min((search.improve(cut) for search, cut in begun[:MOST_IMPROVED]), key=lambda cut: cut.key)


def _least(bench: Bench, need: float, shape: _Shape) -> str:
    device = min(bench.cluster.devices, key=lambda d: d.usable_bytes)
    again = ", recompute" if shape.recompute else ""
    return (
        f"{shape.schedule.name}: the fullest worker holds {format_bytes(need + device.reserve_bytes)} of "
        f"{format_bytes(float(device.memory_bytes))} at the least ({shape.stages} stages, "
        f"micro-batch {shape.micro_batch}{again})"
    )


def _exchanges(work: Work, stages: int) -> np.ndarray:
    """[stages] how often a worker exchanges a stage's gradients in the orders given."""
    found = np.zeros(stages)
    for lane in work.lanes:
        for stage in {action.stage for action in lane}:
            kinds = Counter(action.kind for action in lane if action.stage == stage)
            counts = (kinds[k] for k in (ActionKind.LAUNCH_SYNC, ActionKind.SYNC, ActionKind.UPDATE) if kinds[k])
            found[stage] = max(found[stage], next(counts, 0))
    return found


class _Search:
    """Moves the boundaries of one shape."""

    def __init__(self, bench: Bench, shape: _Shape, transfers: Transfers) -> None:
        self._bench, self._shape, self._transfers = bench, shape, transfers
        drains = shape.schedule.weight_policy.synchronous or isinstance(shape.schedule, OwnOrders)
        work = shape.schedule.work(shape.pipeline)
        self._parts, self._exchanges = work.parts, _exchanges(work, shape.stages)
        self._program: Program | None = compile_orders(work) if drains else None
        self._tried: dict[Marks, _Cut] = {}
        self._rhythm = rhythm_of(shape.schedule, shape.pipeline)
        self._depth = max(shape.schedule.in_flight(shape.pipeline))
        few = replace(shape.pipeline, micro_batches=self._rhythm)
        self._orders = functools.cache(lambda iterations: compile_orders(shape.schedule.work(few, iterations)))
        actions = sum(len(lane) for lane in work.lanes) * (1 if drains else 8)
        self._most = max(4, MOST_ACTIONS // max(actions, 1))
        self._versions = shape.schedule.weight_versions(shape.pipeline)

    def begin(self) -> _Cut:
        """The best of the balanced cuts."""
        return min((self._cut(marks) for marks in sorted(self._starts())), key=lambda cut: cut.key)

    def improve(self, best: _Cut) -> _Cut:
        """A cut that no move of a boundary improves, or the best of as many as may be simulated."""
        step = max(1, self._bench.blocks // (2 * self._shape.stages))
        while step:
            moved = min((self._cut(m) for m in self._moves(best.marks, step)), key=lambda cut: cut.key, default=best)
            if moved.key < best.key:
                best = moved
            else:
                step //= 2
        return best

    def _starts(self) -> set[Marks]:
        """Balanced within memory, balanced, fullest stage as empty as can be, and even in blocks."""
        bench, shape = self._bench, self._shape
        tables, n = bench.tables(shape.micro_batch), bench.blocks
        stage_s = tables.stage_s(recompute=shape.recompute)
        room = min(d.usable_bytes for d in bench.cluster.devices)
        kept = shape.schedule.in_flight(shape.pipeline)
        each = max(1.0, sum(len(own) for own in shape.holders) / shape.workers)
        needs = [
            tables.needed(StageRule(k / self._parts, v), recompute=shape.recompute) * each
            for k, v in zip(kept, self._versions, strict=True)
        ]
        least = least_need(needs, tables.real) * (1 + 1e-12)
        found = {
            balanced(stage_s, [need <= room for need in needs]),
            balanced(stage_s, [tables.real] * shape.stages),
            balanced(stage_s, [need <= least for need in needs]),
            tuple(round(i * n / shape.stages) for i in range(shape.stages + 1)),
        }
        return {marks for marks in found if marks is not None}

    def _moves(self, marks: Marks, step: int) -> Iterator[Marks]:
        """Each boundary so many blocks up or down, as far as its neighbours allow."""
        for at in range(1, len(marks) - 1):
            for by in (step, -step):
                place = marks[at] + by
                if marks[at - 1] < place < marks[at + 1] and len(self._tried) < self._most:
                    yield (*marks[:at], place, *marks[at + 1 :])

    def _cut(self, marks: Marks) -> _Cut:
        if marks not in self._tried:
            self._tried[marks] = self._play(marks)
        return self._tried[marks]

    def _play(self, marks: Marks) -> _Cut:
        shape = self._shape
        figures = price(self._bench, shape.point(marks), shape.holders)
        hidden = shape.stages > 1 and not shape.schedule.weight_policy.synchronous
        times = StageTimes.of(
            figures.forward_s,
            figures.backward_s,
            figures.receive_s,
            np.zeros(shape.stages) if hidden else figures.sync_s,
            figures.update_s,
            return_s=figures.return_s,
        )
        trace, seconds = self._run(times)
        if hidden:
            seconds = max(seconds, float((figures.sync_s * self._exchanges).max()))
        over, reason = self._over(trace, figures)
        return _Cut(shape, marks, over, seconds, reason)

    def _run(self, times: StageTimes) -> tuple[Trace, float]:
        if self._program is not None:
            trace = run(self._program, times, transfers=self._transfers)
            return trace, trace.span_s() if self._shape.schedule.spans else trace.makespan_s
        count = self._shape.micro_batches
        steady = find_pace(self._orders, self._rhythm, self._depth, lambda p: run(p, times, transfers=self._transfers))
        return steady.trace, steady.iteration_s * count / self._rhythm

    def _over(self, trace: Trace, figures: Figures) -> tuple[float, str]:
        """Bytes by which the fullest worker exceeds its device, and the words for it."""
        sizes = StageBytes(
            figures.weight_bytes + figures.gradient_bytes + figures.optimizer_bytes,
            figures.unit_bytes,
            figures.working_bytes,
            figures.reserve_bytes,
            version_bytes=figures.weight_bytes,
        )
        worst, reason = -math.inf, ""
        for worker in range(self._shape.workers):
            own = [stage for stage, workers in enumerate(figures.holders) if worker in workers]
            have = float(figures.capacity_bytes[own].min())
            curve = memory_curve(trace, worker, sizes)
            need = curve.peak_bytes
            if need - have > worst:
                action = int(curve.action[int(np.argmax(curve.held_bytes > min(have, need - 1)))])
                moment = f"when {trace.program.label(action)} runs" if action >= 0 else "from the start"
                worst = need - have
                reason = f"worker {worker} holds {format_bytes(need)} of {format_bytes(have)}, too much {moment}"
        return max(0.0, worst - 1e-9 * abs(worst)), reason

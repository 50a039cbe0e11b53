"""Pipeline shapes with equally replicated stages, for any schedule: a lower bound and an estimate for each.

A shape is a configuration without its cut: where stages begin, which of them recompute and which sharding each uses
are open. The bound holds for every cut. In a pipeline that drains, a worker waits for the forwards of all stages before
its first one, does its share of the work, and its last gradient goes back through those stages. A worker whose first
stage is number s waits for at least s blocks. The mean over the workers bounds the slowest worker, and the mean work
does not depend on the cut.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.hardware.types import Cluster
from planner.play import Transfers
from planner.schedules import Pipeline, Schedule, get
from planner.solvers.shape_costs import Outline, ShapeCosts, with_exchange_s
from planner.space.configuration import RecomputeChoice
from planner.space.cuts import divisors
from planner.space.jobs import overlap_of
from planner.space.recompute_choices import is_allowed
from planner.space.types import BlockCosts, Job

SchedulesFor = Callable[[str], Schedule]
"""Finds a schedule by its name with options."""


def schedules_with(schedule: Schedule | None) -> SchedulesFor:
    """A lookup in the registry that also knows one unregistered schedule."""
    return lambda name: schedule if schedule is not None and schedule.name == name else get(name)


MAX_ACTIONS = 1_000_000
"""Forwards and backwards of one copy in an iteration that a shape may have, since all of them are simulated."""


def by_engine(job: Job, schedule_of: SchedulesFor) -> tuple[Job, Job]:
    """(the job with only the schedules that `Frontier` bounds in closed form, the job with only the others)."""
    plain = job.transfers is Transfers.BLOCKING and not job.whole_stages
    lines = tuple(name for name in job.schedules if plain and _has_closed_form(schedule_of(name)))
    placed = tuple(name for name in job.schedules if name not in lines)
    return dataclasses.replace(job, schedules=lines), dataclasses.replace(job, schedules=placed)


def _has_closed_form(schedule: Schedule) -> bool:
    """True if the schedule has a closed form and recomputes inside its backwards."""
    return schedule.closed_form and not schedule.recomputed_stages(Pipeline((1, 1), 2))


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """A configuration without its stages; see the module.

    Attributes:
        schedule: with its options.
        shardings: costs of the chain, one per sharding that a stage may pick.
        stages, workers: of one copy.
        copies: copies of the pipeline.
        micro_batches: of one copy.
        zero: ZeRO stage.
        adjacent: the copies of a worker are neighbours.
        passes: passes through each block that the mean worker runs in an iteration.
        beside_s: lower bound on the mean worker's time apart from these passes: ramp, transfers, exchange.
        pass_exchange_s: lower bound on the exchanges in the passes of one micro-batch through all blocks (ZeRO-2, 3).
        overlap: fraction of the passes behind which they hide.
        bound_s: lower bound on the iteration time of any configuration of the shape.
        estimate_s: estimated iteration time with the recomputation that memory requires, idle time and gradient
            exchange; infinite if even equal stages need far more memory than there is.
    """

    schedule: Schedule
    shardings: tuple[BlockCosts, ...]
    stages: int
    workers: int
    copies: int
    micro_batches: int
    zero: int
    adjacent: bool
    passes: float
    beside_s: float
    pass_exchange_s: float
    overlap: float
    bound_s: float
    estimate_s: float

    @property
    def pipeline(self) -> Pipeline:
        """One copy of the pipeline."""
        return Pipeline((1,) * self.stages, self.micro_batches)

    def bound_with_work_s(self, work_s: float) -> float:
        """The bound for configurations in which one micro-batch takes `work_s` seconds through all blocks."""
        busy_s = with_exchange_s(work_s, self.pass_exchange_s, self.overlap)
        return max(self.bound_s, self.beside_s + self.passes * busy_s)

    @property
    def repeats(self) -> bool:
        """True if the schedule's orders have recompute actions."""
        return bool(self.schedule.recomputed_stages(self.pipeline))


class Shapes:
    """Enumerates the shapes of a job.

    Args:
        cluster: the cluster.
        job: which schedules, depths, copies, ZeRO stages and choices of recomputation are allowed.
        schedule_of: schedules by name.
    """

    def __init__(self, cluster: Cluster, job: Job, schedule_of: SchedulesFor) -> None:
        self._cluster, self._job, self._schedule_of = cluster, job, schedule_of
        self._overlap = overlap_of(job, cluster)
        self._devices = job.devices_of(cluster)
        self._pipelines = functools.cache(lambda *size: list(self._pipelines_of(*size)))
        self._outlines: dict[tuple[str, Pipeline], Outline] = {}

    def of(self, shardings: Sequence[BlockCosts], cutoff_s: float) -> Iterator[Shape]:
        """Shapes whose bound is below a cutoff.

        Args:
            shardings: costs of the chain at one micro-batch size, by sharding over the same ranks.
            cutoff_s: seconds.

        O(depths * copies * variants).
        """
        first, job = shardings[0], self._job
        groups, (parts, remainder) = self._devices // first.ranks, divmod(job.global_batch, first.micro_batch)
        costs, fewest_passes = ShapeCosts(shardings, self._cluster, job), self._fewest_passes
        deepest = max([costs.blocks, *(own.workers(own.fixed) for own in self._schedules() if own.fixed)])
        for copies in () if remainder else reversed(divisors(parts, groups)):
            for workers in range(1, min(groups // copies, deepest) + 1):
                if (
                    self._size_allowed(workers, copies)
                    and fewest_passes * (parts // copies) * costs.work_s / workers < cutoff_s
                ):
                    yield from self._shapes_of_size(costs, workers, copies, parts // copies, cutoff_s)

    def ideal_s(self, shardings: Sequence[BlockCosts]) -> float:
        """Lower bound on the time of the global batch: compute spread evenly over all devices, in seconds."""
        groups = max(1, self._devices // shardings[0].ranks)
        work_s = float(np.min([(c.forward_s + c.backward_s).min(axis=0) for c in shardings], axis=0).sum())
        return self._job.global_batch / shardings[0].micro_batch * work_s / groups

    @functools.cached_property
    def _fewest_passes(self) -> float:
        """Fewest passes through a stage per micro-batch of any schedule; below 1 if two micro-batches run together."""
        variants = (v for own in self._schedules() if not own.fixed for v in own.variants(2, 4, recompute=True))
        outlines = (self._outline(v, Pipeline((1,) * v.stage_counts(2)[0], 4)) for v in variants)
        return min((outline.passes / 4 for outline in outlines), default=1.0)

    def _outline(self, schedule: Schedule, pipeline: Pipeline) -> Outline:
        """The outline of a pipeline, remembered: it does not depend on costs."""
        key = schedule.name, pipeline
        if key not in self._outlines:
            self._outlines[key] = Outline.of(schedule, pipeline)
        return self._outlines[key]

    def _schedules(self) -> list[Schedule]:
        """Schedules that the job names."""
        return [self._schedule_of(name) for name in self._job.schedules]

    def _size_allowed(self, workers: int, copies: int) -> bool:
        """True if the job allows pipelines of this depth and this many copies."""
        job = self._job
        depth_allowed = not job.pipeline_stages or workers in job.pipeline_stages
        return depth_allowed and (not job.data_parallel or any(degree % copies == 0 for degree in job.data_parallel))

    def _shapes_of_size(
        self, costs: ShapeCosts, workers: int, copies: int, count: int, cutoff_s: float
    ) -> Iterator[Shape]:
        """Shapes of so many workers, copies and micro-batches (`count`) whose bound is below a cutoff."""
        allowed_zeros = self._job.structure.zero_in_pipelines or self._job.zero
        zeros = [zero for zero in self._job.zero if zero in allowed_zeros]
        inner_replicas = any(sharding.inner_replicas for sharding in costs.shardings)
        for schedule, stages in self._pipelines(workers, count, costs.blocks):
            outline = self._outline(schedule, Pipeline((1,) * stages, count))
            replicas = copies * outline.holders
            if self._job.data_parallel and replicas not in self._job.data_parallel:
                continue
            ramp_s, even_s, ample = costs.ramp_s(outline), math.inf, False
            for zero in sorted(zeros)[: None if replicas > 1 or inner_replicas else 1]:
                beside_s, exchange_s = (
                    ramp_s + costs.tail_s(outline, copies, zero),
                    costs.pass_exchange_s(replicas, zero),
                )
                bound_s = costs.bound_s(outline, beside_s, exchange_s)
                if bound_s >= cutoff_s:
                    continue
                if not ample:  # else higher stages would not be faster
                    even_s, ample = costs.even_s(outline, replicas, zero)
                for adjacent in (True, False) if copies > 1 else (False,):
                    estimate_s = costs.estimate_s(outline, even_s, copies, zero, adjacent=adjacent)
                    yield Shape(
                        schedule, costs.shardings, stages, workers, copies, count, zero, adjacent,
                        outline.passes / len(outline.hosted), beside_s, exchange_s, self._overlap, bound_s,
                        max(bound_s, estimate_s),
                    )  # fmt: skip

    def _pipelines_of(self, workers: int, count: int, blocks: int) -> Iterator[tuple[Schedule, int]]:
        """(schedule with its options, number of stages) pairs that fit this many workers and micro-batches."""
        job = self._job
        max_stages = min(blocks, job.max_stages or blocks)
        for name, schedule in zip(job.schedules, self._schedules(), strict=True):
            if schedule.fixed:
                matches = schedule.workers(schedule.fixed) == workers and schedule.fixed.micro_batches == count
                if (
                    matches
                    and schedule.fixed.stages <= max_stages
                    and self._recomputes_as_allowed(schedule, schedule.fixed)
                ):
                    yield schedule, schedule.fixed.stages
                continue
            if workers < 2:
                continue
            has_options, may_recompute = ":" in name, is_allowed(job.recompute, RecomputeChoice(True))
            for variant in (schedule,) if has_options else schedule.variants(workers, count, recompute=may_recompute):
                for stages in variant.stage_counts(workers):
                    fits = stages <= max_stages and 2 * stages * count <= MAX_ACTIONS
                    pipeline = Pipeline((1,) * stages, count)
                    if fits and not variant.supports(pipeline) and self._recomputes_as_allowed(variant, pipeline):
                        yield variant, stages

    def _recomputes_as_allowed(self, schedule: Schedule, pipeline: Pipeline) -> bool:
        """True unless the schedule's own recompute actions contradict what the job allows."""
        repeats = schedule.recomputed_stages(pipeline)
        recompute_flags = {stage in repeats for stage in range(pipeline.stages)}
        return not repeats or all(is_allowed(self._job.recompute, RecomputeChoice(again)) for again in recompute_flags)

    def obstacle(self, blocks: int) -> str:
        """The first reason why no schedule has any shape, as part of an error message.

        Args:
            blocks: number of blocks of the chain.
        """
        job, reasons, fewest = self._job, [], 0
        for name in job.schedules:
            schedule = self._schedule_of(name)
            if schedule.fixed:
                return (
                    f"{name} has {schedule.fixed.stages} stages on {schedule.workers(schedule.fixed)} workers and "
                    f"{schedule.fixed.micro_batches} micro-batches, which do not come out for {blocks} blocks, "
                    f"{self._devices} devices and a global batch of {job.global_batch}"
                )
            for workers in range(2, self._devices + 1):
                for stages in schedule.stage_counts(workers):
                    reason = schedule.supports(Pipeline((1,) * stages, job.global_batch))
                    if stages > blocks:
                        reason = f"{stages} stages on {workers} workers need as many blocks, the model has {blocks}"
                    reasons += [f"with {stages} stages {reason}" if stages <= blocks else reason] if reason else []
                    fewest = fewest or workers
                if len(reasons) > 8:
                    break
        if not fewest:
            return f"a pipeline needs two devices at the least, and may use {self._devices}"
        return reasons[0] if reasons else "micro-batches, copies and devices do not come out"

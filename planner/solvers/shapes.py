"""Pipeline shapes with equally replicated stages, for any schedule: a lower bound and an estimate for each.

A shape is a configuration without its cut: where stages begin, which of them recompute and which sharding each uses
are open. The bound holds for every cut. In a pipeline that drains, a worker waits for the forwards of all stages before
its first one, does its share of the work, and its last gradient goes back through those stages. A worker whose first
stage is number s waits for at least s blocks. The mean over the workers bounds the slowest worker, and the mean work
depends on the cut only by what memory leaves for activations (`ShapeCosts.least_work_s`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.hardware.types import Cluster
from planner.play import Transfers
from planner.schedules import Pipeline, Schedule, get
from planner.solvers.shape_costs import Outline, ShapeCosts
from planner.space.configuration import RecomputeChoice
from planner.space.cuts import divisors
from planner.space.recompute_choices import is_allowed
from planner.space.types import BlockCosts, Job

SchedulesFor = Callable[[str], Schedule]
"""Finds a schedule by its name with options."""


def schedules_with(schedule: Schedule | None) -> SchedulesFor:
    """A lookup in the registry that also knows one unregistered schedule."""
    return lambda name: schedule if schedule is not None and schedule.name == name else get(name)


HALVINGS = 5
"""Halvings of the distance between a bound and a cutoff in which a closer bound is sought."""

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


@dataclass(frozen=True, eq=False)
class Shape:
    """A configuration without its stages; see the module.

    Attributes:
        costs: of the chain, with one sharding or more that a stage may pick.
        outline: the schedule with its options on one copy of the pipeline.
        copies: copies of the pipeline.
        zero: ZeRO stage.
        adjacent: the copies of a worker are neighbours.
        beside_s: lower bound on the mean worker's time apart from its passes through blocks: ramp, transfers, exchange.
        pass_exchange_s: lower bound on the exchanges in the passes of one micro-batch through all blocks (ZeRO-2, 3).
        bound_s: lower bound on the iteration time of any configuration of the shape that is faster than the cutoff with
            which it was enumerated; no more than that.
    """

    costs: ShapeCosts
    outline: Outline
    copies: int
    zero: int
    adjacent: bool
    beside_s: float
    pass_exchange_s: float
    bound_s: float

    @property
    def schedule(self) -> Schedule:
        """With its options."""
        return self.outline.schedule

    @property
    def pipeline(self) -> Pipeline:
        """One copy of the pipeline."""
        return self.outline.pipeline

    @property
    def shardings(self) -> tuple[BlockCosts, ...]:
        """Costs of the chain, one per sharding that a stage may pick."""
        return self.costs.shardings

    @property
    def stages(self) -> int:
        """Of one copy."""
        return self.outline.pipeline.stages

    @property
    def workers(self) -> int:
        """Of one copy."""
        return len(self.outline.hosted)

    @property
    def micro_batches(self) -> int:
        """Of one copy."""
        return self.outline.pipeline.micro_batches

    @functools.cached_property
    def estimate_s(self) -> float:
        """Estimated iteration time with the recomputation that memory requires, idle time and gradient exchange.

        Infinite if even equal stages need far more memory than there is.
        """
        return max(self.bound_s, self.costs.estimate_s(self.outline, self.copies, self.zero, adjacent=self.adjacent))

    def bound_below_s(self, cutoff_s: float, work_s: float = 0.0) -> float:
        """Lower bound on the configurations that are faster than a cutoff.

        Args:
            cutoff_s: seconds.
            work_s: least seconds of one micro-batch in all blocks, where that is known.
        """
        least_s = self.costs.least_work_s(self.outline, self.copies * self.outline.holders, self.zero, cutoff_s)
        bound_s = self.costs.bound_s(self.outline, self.beside_s, self.pass_exchange_s, max(work_s, least_s))
        return max(self.bound_s, bound_s)

    def closest_bound_s(self, cutoff_s: float) -> float:
        """The highest of the bounds on the configurations that are faster than a cutoff, to a part of its distance.

        The lower the cutoff, the higher the bound: where that reaches the cutoff, no configuration is faster.
        """
        low_s, high_s = self.bound_below_s(cutoff_s), cutoff_s
        for _ in range(HALVINGS if math.isfinite(cutoff_s) else 0):
            middle_s = (low_s + high_s) / 2
            reached = self.bound_below_s(middle_s) >= middle_s
            low_s, high_s = (middle_s, high_s) if reached else (low_s, middle_s)
        return low_s

    @property
    def repeats(self) -> bool:
        """True if the schedule's orders have recompute actions."""
        return bool(self.schedule.recomputed_stages(self.pipeline))


def least(shapes: Iterable[Shape], seconds: Callable[[Shape], float]) -> float:
    """The least seconds of some shapes, which are never below their bounds; infinite if there is no shape."""
    least_s = math.inf
    for shape in sorted(shapes, key=lambda shape: shape.bound_s):
        if shape.bound_s >= least_s:
            break
        least_s = min(least_s, seconds(shape))
    return least_s


class Shapes:
    """Enumerates the shapes of a job.

    Args:
        cluster: the cluster.
        job: which schedules, depths, copies, ZeRO stages and choices of recomputation are allowed.
        schedule_of: schedules by name.
    """

    def __init__(self, cluster: Cluster, job: Job, schedule_of: SchedulesFor) -> None:
        self._cluster, self._job, self._schedule_of = cluster, job, schedule_of
        self._devices = job.devices_of(cluster)
        self._outlines_of_size = functools.cache(lambda *size: list(self._pipelines_of(*size)))
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
        for outline in self._outlines_of_size(workers, count, costs.blocks):
            replicas = copies * outline.holders
            if self._job.data_parallel and replicas not in self._job.data_parallel:
                continue
            ramp_s = costs.ramp_s(outline)
            for zero in sorted(zeros)[: None if replicas > 1 or inner_replicas else 1]:
                beside_s = ramp_s + costs.tail_s(outline, copies, zero)
                exchange_s = costs.pass_exchange_s(replicas, zero)
                if costs.bound_s(outline, beside_s, exchange_s, costs.work_s) >= cutoff_s:
                    continue
                work_s = costs.least_work_s(outline, replicas, zero, cutoff_s)
                bound_s = costs.bound_s(outline, beside_s, exchange_s, work_s)
                if bound_s >= cutoff_s:
                    continue
                for adjacent in (True, False) if copies > 1 else (False,):
                    yield Shape(costs, outline, copies, zero, adjacent, beside_s, exchange_s, bound_s)

    def _pipelines_of(self, workers: int, count: int, blocks: int) -> Iterator[Outline]:
        """Schedules with their options on pipelines that fit this many workers and micro-batches."""
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
                    yield self._outline(schedule, Pipeline((1,) * schedule.fixed.stages, count))
                continue
            if workers < 2:
                continue
            has_options, may_recompute = ":" in name, is_allowed(job.recompute, RecomputeChoice(True))
            for variant in (schedule,) if has_options else schedule.variants(workers, count, recompute=may_recompute):
                for stages in variant.stage_counts(workers):
                    fits = stages <= max_stages and 2 * stages * count <= MAX_ACTIONS
                    pipeline = Pipeline((1,) * stages, count)
                    if fits and not variant.supports(pipeline) and self._recomputes_as_allowed(variant, pipeline):
                        yield self._outline(variant, pipeline)

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

"""Shapes of pipelines whose stages are equally replicated, for any schedule: a bound on each, and an estimate.

A shape is everything of a configuration but where the chain is cut, which stages repeat their forward, and in which of
several ways each shares its operators. No configuration of a shape is faster than its bound: each worker of a pipeline
that drains waits for the forwards of all stages before its first, does its share of all work, and what it has done last
goes back through those stages. A worker whose first stage is number s waits for s blocks at the least; the mean over
the workers bounds the slowest, and their mean work does not depend on the cut.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.hardware.types import Cluster
from planner.play import Transfers
from planner.schedules import Pipeline, Schedule, get
from planner.solvers.shape_figures import Figures, Outline
from planner.space.cuts import divisors
from planner.space.repeats import is_allowed
from planner.space.types import BlockCosts, Job

SchedulesFor = Callable[[str], Schedule]
"""A schedule by its name, with options."""


def schedules_with(own: Schedule | None) -> SchedulesFor:
    """Schedules of the registry, and one that it does not know."""
    return lambda name: own if own is not None and own.name == name else get(name)


LONGEST = 1_000_000
"""Actions of one copy and iteration that a shape may have: all of them are played."""


def by_engine(job: Job, schedule_of: SchedulesFor) -> tuple[Job, Job]:
    """The job with the schedules alone that `Frontier` bounds in closed form, stage by stage, and with the others."""
    plain = job.transfers is Transfers.BLOCKING and not job.whole_stages
    lines = tuple(name for name in job.schedules if plain and _stands_in_line(schedule_of(name)))
    placed = tuple(name for name in job.schedules if name not in lines)
    return dataclasses.replace(job, schedules=lines), dataclasses.replace(job, schedules=placed)


def _stands_in_line(schedule: Schedule) -> bool:
    """Whether its stages stand in line, paced by the slowest, and repeat their forwards within their backwards."""
    return schedule.closed_form and not schedule.recomputed_stages(Pipeline((1, 1), 2))


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """All of a configuration but its stages; see the module.

    Attributes:
        schedule: with its options.
        ways: costs of the chain, one for each way to share operators that a stage may pick.
        stages, workers: of one copy.
        copies: of the pipeline.
        micro_batches: of one copy.
        zero: ZeRO stage.
        adjacent: the copies of a worker are neighbours.
        passes: passes through each block that the mean worker runs in an iteration.
        beside_s: seconds that the mean worker takes beside, at the least.
        bound_s: no configuration of the shape is faster.
        estimate_s: with what memory asks to be repeated, the schedule's idle time and the exchange of gradients;
            infinite where even stages need far more memory than there is.
    """

    schedule: Schedule
    ways: tuple[BlockCosts, ...]
    stages: int
    workers: int
    copies: int
    micro_batches: int
    zero: int
    adjacent: bool
    passes: float
    beside_s: float
    bound_s: float
    estimate_s: float

    @property
    def pipeline(self) -> Pipeline:
        """One copy."""
        return Pipeline((1,) * self.stages, self.micro_batches)

    def least_s(self, work_s: float) -> float:
        """No configuration is faster in which a micro-batch's way through all blocks takes so many seconds."""
        return max(self.bound_s, self.beside_s + self.passes * work_s)

    @property
    def repeats(self) -> bool:
        """Whether the orders repeat forwards by actions of their own."""
        return bool(self.schedule.recomputed_stages(self.pipeline))


class Shapes:
    """The shapes of a job.

    Args:
        cluster: the machine.
        job: which schedules, depths, copies, ZeRO stages and choices of recomputation are allowed.
        schedule_of: schedules by name.
    """

    def __init__(self, cluster: Cluster, job: Job, schedule_of: SchedulesFor) -> None:
        self._cluster, self._job, self._schedule_of = cluster, job, schedule_of
        self._devices = min(job.devices or cluster.device_count, cluster.device_count)
        self._pipelines = functools.cache(lambda *size: list(self._pipelines_of(*size)))
        self._outlines: dict[tuple[str, Pipeline], Outline] = {}

    def of(self, ways: Sequence[BlockCosts], cutoff_s: float) -> Iterator[Shape]:
        """Shapes of pipelines of two workers and more whose bound is below a cutoff.

        Args:
            ways: costs of the chain at one micro-batch size, by way to share operators on the same ranks.
            cutoff_s: seconds.

        O(depths * copies * variants).
        """
        first, job = ways[0], self._job
        groups, (parts, rest) = self._devices // first.ranks, divmod(job.global_batch, first.micro_batch)
        figures, least = Figures(ways, self._cluster, job), self._least_passes
        deepest = max([figures.blocks, *(own.workers(own.fixed) for own in self._known() if own.fixed)])
        for copies in () if rest else reversed(divisors(parts, groups)):
            for workers in range(1, min(groups // copies, deepest) + 1):
                if self._allowed(workers, copies) and least * (parts // copies) * figures.work_s / workers < cutoff_s:
                    yield from self._of_size(figures, workers, copies, parts // copies, cutoff_s)

    def least_s(self, ways: Sequence[BlockCosts]) -> float:
        """Seconds of the global batch if all devices worked on it evenly."""
        groups = max(1, self._devices // ways[0].ranks)
        work_s = float(np.min([(c.forward_s + c.backward_s).min(axis=0) for c in ways], axis=0).sum())
        return self._job.global_batch / ways[0].micro_batch * work_s / groups

    @functools.cached_property
    def _least_passes(self) -> float:
        """Passes through a stage for each micro-batch, at the least: fewer than one where some run two together."""
        tried = (
            (v, Pipeline((1,) * v.stage_counts(2)[0], 4))
            for own in self._known()
            for v in ((own,) if own.fixed else own.variants(2, 4, recompute=True))
            if not own.fixed
        )
        return min((self._outline(*each).passes / 4 for each in tried), default=1.0)

    def _outline(self, schedule: Schedule, pipeline: Pipeline) -> Outline:
        key = schedule.name, pipeline
        if key not in self._outlines:
            self._outlines[key] = Outline.of(schedule, pipeline)
        return self._outlines[key]

    def _known(self) -> list[Schedule]:
        return [self._schedule_of(name) for name in self._job.schedules]

    def _allowed(self, workers: int, copies: int) -> bool:
        """Whether the job allows so many workers in so many copies."""
        job = self._job
        depths = not job.pipeline_stages or workers in job.pipeline_stages
        return depths and (not job.data_parallel or any(wide % copies == 0 for wide in job.data_parallel))

    def _of_size(self, figures: Figures, workers: int, copies: int, count: int, cutoff_s: float) -> Iterator[Shape]:
        piped = self._job.structure.zero_in_pipelines or self._job.zero
        zeros = [stage for stage in self._job.zero if stage in piped]
        inner = any(way.inner_replicas for way in figures.ways)
        for schedule, stages in self._pipelines(workers, count, figures.blocks):
            outline = self._outline(schedule, Pipeline((1,) * stages, count))
            replicas = copies * outline.holders
            if self._job.data_parallel and replicas not in self._job.data_parallel:
                continue
            beside_s = figures.beside_s(outline, copies)
            bound_s = figures.bound_s(outline, beside_s)
            if bound_s >= cutoff_s:
                continue
            for stage in zeros if replicas > 1 or inner else sorted(zeros)[:1]:
                work_s = figures.even_s(outline, replicas if stage else 0)
                for adjacent in (True, False) if copies > 1 else (False,):
                    estimate_s = figures.estimate_s(outline, work_s, copies, stage, adjacent=adjacent)
                    yield Shape(
                        schedule, figures.ways, stages, workers, copies, count, stage, adjacent,
                        outline.passes / len(outline.hosted), beside_s, bound_s, max(bound_s, estimate_s),
                    )  # fmt: skip

    def _pipelines_of(self, workers: int, count: int, blocks: int) -> Iterator[tuple[Schedule, int]]:
        """Schedules with their options, and the numbers of stages that they place on so many workers."""
        job = self._job
        most = min(blocks, job.max_stages or blocks)
        for name, own in zip(job.schedules, self._known(), strict=True):
            if own.fixed:
                ours = own.workers(own.fixed) == workers and own.fixed.micro_batches == count
                if ours and own.fixed.stages <= most and self._wanted(own, own.fixed):
                    yield own, own.fixed.stages
                continue
            if workers < 2:
                continue
            chosen, again = ":" in name, is_allowed(job.recompute, True, ())
            for schedule in (own,) if chosen else own.variants(workers, count, recompute=again):
                for stages in schedule.stage_counts(workers):
                    fits = stages <= most and 2 * stages * count <= LONGEST
                    pipeline = Pipeline((1,) * stages, count)
                    if fits and not schedule.supports(pipeline) and self._wanted(schedule, pipeline):
                        yield schedule, stages

    def _wanted(self, schedule: Schedule, pipeline: Pipeline) -> bool:
        """Whether orders that repeat forwards by actions of their own repeat those that the job wants."""
        repeats = schedule.recomputed_stages(pipeline)
        said = {stage in repeats for stage in range(pipeline.stages)}
        return not repeats or all(is_allowed(self._job.recompute, again, ()) for again in said)

    def obstacle(self, blocks: int) -> str:
        """Why the schedules have no shape at all, said of the first reason that is met.

        Args:
            blocks: of the chain.
        """
        job, reasons, fewest = self._job, [], 0
        for name in job.schedules:
            own = self._schedule_of(name)
            if own.fixed:
                return (
                    f"{name} has {own.fixed.stages} stages on {own.workers(own.fixed)} workers and "
                    f"{own.fixed.micro_batches} micro-batches, which do not come out for {blocks} blocks, "
                    f"{self._devices} devices and a global batch of {job.global_batch}"
                )
            for workers in range(2, self._devices + 1):
                for stages in own.stage_counts(workers):
                    reason = own.supports(Pipeline((1,) * stages, job.global_batch))
                    if stages > blocks:
                        reason = f"{stages} stages on {workers} workers need as many blocks, the model has {blocks}"
                    reasons += [f"with {stages} stages {reason}" if stages <= blocks else reason] if reason else []
                    fewest = fewest or workers
                if len(reasons) > 8:
                    break
        if not fewest:
            return f"a pipeline needs two devices at the least, and may use {self._devices}"
        return reasons[0] if reasons else "micro-batches, copies and devices do not come out"

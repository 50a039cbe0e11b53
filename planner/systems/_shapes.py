"""Numbers of stages, copies and micro-batches that a schedule, the devices and the global batch allow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.memory import fits
from planner.schedules.types import ActivationUnit, Pipeline, Schedule
from planner.space.cuts import least_need
from planner.space.types import StageChoice
from planner.systems._bench import Bench, StageRule
from planner.systems._point import Point

LONGEST = 400_000
"""Longer orders are not simulated."""

Marks = tuple[int, ...]
Holders = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of stages, micro-batches and copies, with the orders for them.

    Attributes:
        schedule: the schedule.
        stages, workers: of one copy.
        copies: of the pipeline.
        micro_batch, micro_batches: of one copy.
        recompute: of all stages.
        holders: workers that have each stage.
        bound_s: no cut is faster.
        repeats: stages that the orders recompute by actions of their own: whole, from what enters them. Of the rest
            `recompute` says nothing then.
        adjacent: the copies of a worker are neighbouring devices, instead of the workers of a copy.
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
    repeats: frozenset[int] = frozenset()
    adjacent: bool = False

    @property
    def placements(self) -> tuple[Shape, ...]:
        """Both ways to place copies: each copy on neighbouring devices, or the copies of each worker."""
        return (self,) if self.copies == 1 else (self, replace(self, adjacent=True))

    @property
    def whole(self) -> bool:
        """Whether recomputation repeats whole stages."""
        return bool(self.repeats)

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
        need = tables.needed(StageRule(1 / each), recompute=self.recompute, whole=self.whole) * each
        least = least_need([need] * self.stages, tables.real)
        alone = all(own == (stage,) for stage, own in enumerate(self.holders))
        if not alone or not fits(least, min(d.usable_bytes for d in bench.cluster.devices)):
            return least
        kept, versions = self.schedule.in_flight(self.pipeline), self.schedule.weight_versions(self.pipeline)
        if self.schedule.activation_unit is not ActivationUnit.MICRO_BATCH:
            kept = (1,) * self.stages
        rules = [StageRule(k, v + self.schedule.weight_buffers) for k, v in zip(kept, versions, strict=True)]
        needs = [tables.needed(rule, recompute=self.recompute, whole=self.whole) for rule in rules]
        return least_need(needs, tables.real)

    def point(self, marks: Marks) -> Point:
        """The point with these boundaries."""
        line = np.arange(self.copies * self.workers)
        ranks = line.reshape(self.workers, self.copies).T.ravel() if self.adjacent else line
        return Point(
            tuple(
                StageChoice(a, b, 1, stage in self.repeats if self.repeats else self.recompute)
                for stage, (a, b) in enumerate(itertools.pairwise(marks))
            ),
            self.copies,
            self.micro_batch,
            self.micro_batches,
            self.schedule.name,
            tuple(ranks.tolist()),
            slice_devices=self.workers,
            whole=self.whole,
        )


def shapes_for(bench: Bench, schedule: Schedule) -> Iterator[Shape]:
    """All shapes that the schedule, the devices and the global batch allow.

    A pipeline has two workers and more: chunks of a single worker are no schedule, and several such workers beside each
    other are plain data parallelism. Orders of one's own say themselves how many they have.
    """
    choices = {"never": (False,), "always": (True,)}.get(bench.job.recompute, (False, True))
    wanted = bench.job.data_parallel
    for stages in _stage_counts(bench, schedule):
        holders, repeats = _holders(bench, schedule, stages)
        workers = _workers(holders)
        if not least_workers(schedule) <= workers <= bench.devices or (repeats and _only_some(bench, stages, repeats)):
            continue
        for size in bench.sizes:
            for copies, count in _dealt(bench, schedule, stages, size):
                if workers * copies > bench.devices or _problem(schedule, stages, holders, count):
                    continue
                if wanted and any(copies * len(own) not in wanted for own in holders):
                    continue
                for recompute in choices:
                    if repeats and not recompute:
                        continue
                    again = len(repeats) == stages if repeats else recompute
                    total_s = float(bench.tables(size).stage_s(recompute=again, whole=bool(repeats))[0, -1])
                    bound_s = total_s * count / workers
                    yield Shape(schedule, stages, workers, copies, size, count, recompute, holders, bound_s, repeats)


def least_workers(schedule: Schedule) -> int:
    """Workers that a pipeline has at the least."""
    return 1 if schedule.fixed is not None else 2


def obstacle(bench: Bench, schedule: Schedule) -> str:
    """What keeps a schedule from having any shape, where it has none."""
    fewest, unsuited, undealt = math.inf, "", ""
    for stages in _stage_counts(bench, schedule):
        holders, _ = _holders(bench, schedule, stages)
        if not holders:
            unsuited = unsuited or schedule.supports(Pipeline((1,) * stages, 2 * stages))
        elif _workers(holders) < least_workers(schedule):
            unsuited = unsuited or f"{stages} stages are all on one worker, which is no pipeline"
        else:
            fewest = min(fewest, _workers(holders))
            dealt = (count for size in bench.sizes for _, count in _dealt(bench, schedule, stages, size))
            undealt = undealt or next(filter(None, (_problem(schedule, stages, holders, c) for c in dealt)), "")
    if bench.devices < fewest < math.inf:
        return f"its pipeline needs {fewest:.0f} devices at the least, and may use {bench.devices}"
    return undealt or unsuited


def _problem(schedule: Schedule, stages: int, holders: Holders, micro_batches: int) -> str:
    """Why numbers of stages and micro-batches do not suit a schedule; every holder of a stage has to have some work."""
    most = max(map(len, holders))
    words = schedule.supports(Pipeline((1,) * stages, micro_batches))
    if not words and micro_batches < most:
        words = f"{micro_batches} micro-batches do not keep {most} workers of each stage at work"
    return f"with {stages} stages {words}" if words else ""


def _workers(holders: Holders) -> int:
    """Workers of one copy; 0 where there are no orders."""
    return max((worker + 1 for own in holders for worker in own), default=0)


def _only_some(bench: Bench, stages: int, repeats: frozenset[int]) -> bool:
    """Whether orders that recompute some stages are not what the job wants: all of them recomputed."""
    return bench.job.recompute == "always" and len(repeats) < stages


def _stage_counts(bench: Bench, schedule: Schedule) -> Sequence[int]:
    """Pieces of the model worth trying: those of the orders or the job, else few, multiples of eight, and the most."""
    job = bench.job
    most = min(bench.blocks, job.max_stages or bench.blocks)
    if schedule.fixed:
        own = schedule.fixed.stages
        known: Sequence[int] = (own,) if own <= (job.max_stages or own) else ()
    else:
        known = job.pipeline_stages or (*range(2, 17), *range(24, most + 1, 8), most)
    allowed = set(job.pipeline_stages or known)
    return sorted({s for s in known if s in allowed and (2 <= s <= most or schedule.fixed)})


def _dealt(bench: Bench, schedule: Schedule, stages: int, size: int) -> Iterator[tuple[int, int]]:
    """(copies, micro-batches of each) that make the global batch."""
    parts, rest = divmod(bench.job.global_batch, size)
    if rest:
        return
    if schedule.fixed:
        copies, rest = divmod(parts, schedule.fixed.micro_batches)
        if copies and not rest:
            yield copies, schedule.fixed.micro_batches
        return
    for copies in range(bench.devices, 0, -1):
        if parts % copies == 0 and 2 * parts // copies * stages <= LONGEST:
            yield copies, parts // copies


def _holders(bench: Bench, schedule: Schedule, stages: int) -> tuple[Holders, frozenset[int]]:
    """Workers that have each stage, and stages that are recomputed by actions of their own; () where the schedule
    cannot serve so many stages."""
    counts = (schedule.fixed.micro_batches,) if schedule.fixed else (stages, 2 * stages, 4 * stages)
    if stages > bench.blocks:
        return (), frozenset()
    for count in counts:
        pipeline = Pipeline((1,) * stages, count)
        if not schedule.supports(pipeline):
            return schedule.holders(pipeline), schedule.recomputed_stages(pipeline)
    return (), frozenset()

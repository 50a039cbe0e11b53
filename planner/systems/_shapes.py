"""Numbers of stages, copies and micro-batches that a schedule, the devices and the global batch allow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.schedules.own_orders import OwnOrders
from planner.schedules.types import ActionKind, ActivationUnit, Pipeline, Schedule, Work
from planner.space.types import StageChoice
from planner.systems._bench import Bench, StageRule
from planner.systems._cuts import least_need
from planner.systems.types import Point

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
        if not alone or least > min(d.usable_bytes for d in bench.cluster.devices):
            return least
        kept, versions = self.schedule.in_flight(self.pipeline), self.schedule.weight_versions(self.pipeline)
        if self.schedule.activation_unit is not ActivationUnit.MICRO_BATCH:
            kept = (1,) * self.stages
        buffers = getattr(self.schedule, "weight_buffers", 0)
        rules = [StageRule(k, v + buffers) for k, v in zip(kept, versions, strict=True)]
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
    """All shapes that the schedule, the devices and the global batch allow."""
    choices = {"never": (False,), "always": (True,)}.get(bench.job.recompute, (False, True))
    wanted = bench.job.data_parallel
    for stages in _stage_counts(bench, schedule):
        holders, repeats = _holders(bench, schedule, stages)
        workers = max((worker for own in holders for worker in own), default=bench.devices) + 1
        for size in bench.sizes:
            for copies, count in _dealt(bench, schedule, stages, size):
                if workers * copies > bench.devices or schedule.supports(Pipeline((1,) * stages, count)):
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


def _stage_counts(bench: Bench, schedule: Schedule) -> Sequence[int]:
    """Pieces of the model worth trying: those of the orders or the job, else few, multiples of eight, and the most."""
    job = bench.job
    most = min(bench.blocks, job.max_stages or bench.blocks)
    if isinstance(schedule, OwnOrders):
        known: Sequence[int] = (schedule.stages,) if schedule.stages <= (job.max_stages or schedule.stages) else ()
    else:
        known = job.pipeline_stages or (*range(2, 17), *range(24, most + 1, 8), most)
    allowed = set(job.pipeline_stages or known)
    return sorted({s for s in known if s in allowed and (2 <= s <= most or isinstance(schedule, OwnOrders))})


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


def _holders(bench: Bench, schedule: Schedule, stages: int) -> tuple[Holders, frozenset[int]]:
    """Workers and recomputed stages as in orders of few micro-batches; () where there are none."""
    counts = (schedule.micro_batches,) if isinstance(schedule, OwnOrders) else (stages, 2 * stages, 4 * stages)
    if stages > bench.blocks:
        return (), frozenset()
    pipelines = (Pipeline((1,) * stages, count) for count in counts)
    served = next((pipeline for pipeline in pipelines if not schedule.supports(pipeline)), None)
    return stage_workers(schedule.work(served), stages) if served else ((), frozenset())


def stage_workers(work: Work, stages: int) -> tuple[Holders, frozenset[int]]:
    """Workers that have each stage, and stages that are recomputed by actions of their own, as the orders have it."""
    found: list[set[int]] = [set() for _ in range(stages)]
    for lane, worker in zip(work.lanes, work.lane_workers, strict=True):
        for action in lane:
            found[action.stage].add(worker)
    again = (a.stage for lane in work.lanes for a in lane if a.kind is ActionKind.RECOMPUTE)
    return tuple(tuple(sorted(own)) for own in found), frozenset(again)

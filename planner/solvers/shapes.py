"""Shapes of pipelines whose stages are equally replicated, for any schedule: numbers, a bound on each and an estimate.

A shape is everything of a configuration but where the chain is cut and, with `recompute` "auto", which stages repeat
their forward. No configuration of a shape is faster than its bound: each worker of a pipeline that drains waits for the
forwards of all stages before its first, does its share of all work, and what it has done last goes back through those
stages. A worker whose first stage is number s waits for s blocks at the least; the mean over the workers bounds the
slowest, and their mean work does not depend on the cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from planner.costs.precision import optimizer_state_bytes
from planner.hardware.collectives import collective_s, send_terms
from planner.hardware.types import Cluster, Collective
from planner.play import Transfers
from planner.schedules import get
from planner.schedules.types import Pipeline, Schedule
from planner.space.settled import precision_of
from planner.space.types import BlockCosts, Job

REACH = 0.5
"""How far above all of the forward the part that even stages must repeat may lie: uneven ones may still fit."""

LONGEST = 1_000_000
"""Actions of one copy and iteration that a shape may have: all of them are played."""

MOST_COPIES = 3
"""Numbers of copies that are tried for a depth: those that use the most devices."""


class Recompute(StrEnum):
    """Which stages repeat their forward, and how."""

    NEVER = "never"
    ALWAYS = "always"
    AUTO = "auto"
    """As few stages as memory asks for, block by block."""
    WHOLE_STAGES = "whole-stages"
    """All stages, each from what enters it."""


@dataclass(frozen=True, slots=True)
class ShapeLimits:
    """Which shapes are looked at.

    Attributes:
        schedules: names, each with or without options; without them every variant worth trying.
        workers: pipelines of so many workers; empty for all worth trying.
        stages: numbers of stages (chunks); empty for all that the schedules place on the workers.
        recompute: choices.
        zero: ZeRO stages.
        copies: whether whole pipelines may stand beside each other.
        transfers: what a transfer between stages occupies.
        deepest: only pipelines as deep as there are devices and blocks.
    """

    schedules: tuple[str, ...]
    workers: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = (Recompute.AUTO,)
    zero: tuple[int, ...] = (0,)
    copies: bool = True
    transfers: Transfers = Transfers.BLOCKING
    deepest: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """All of a configuration but its cut; see the module.

    Attributes:
        schedule: with its options.
        costs: of the chain at the micro-batch size, operators shared as `costs.sharding` says.
        stages, workers: of one copy.
        copies: of the pipeline.
        micro_batches: of one copy.
        zero: ZeRO stage.
        recompute: which stages repeat their forward.
        adjacent: the copies of a worker are neighbours.
        transfers: what a transfer between stages occupies.
        bound_s: no configuration of the shape is faster.
        estimate_s: with the schedule's own idle time and the exchange of gradients: shapes are tried in this order.
    """

    schedule: Schedule
    costs: BlockCosts
    stages: int
    workers: int
    copies: int
    micro_batches: int
    zero: int
    recompute: Recompute
    adjacent: bool
    transfers: Transfers
    bound_s: float
    estimate_s: float

    @property
    def pipeline(self) -> Pipeline:
        """One copy."""
        return Pipeline((1,) * self.stages, self.micro_batches)


def shapes_of(costs: BlockCosts, cluster: Cluster, job: Job, limits: ShapeLimits) -> Iterator[Shape]:
    """All shapes of one way to share operators at one micro-batch size; O(depths * variants * copies)."""
    groups = min(job.devices or cluster.device_count, cluster.device_count) // costs.ranks
    parts, rest = divmod(job.global_batch, costs.micro_batch)
    if rest or groups < 1:
        return
    known = _Bounds(costs, cluster, job)
    for workers in _depths(groups, known.blocks, limits):
        for copies in _copies(groups, workers, parts, job, limits):
            count = parts // copies
            for recompute in limits.recompute:
                again = recompute in (Recompute.ALWAYS, Recompute.WHOLE_STAGES)
                for schedule, stages in _pipelines(limits, workers, count, known.blocks, recomputed=again):
                    if 2 * stages * count > LONGEST:
                        continue
                    yield from known.shapes(schedule, stages, workers, copies, count, recompute, limits)


def _depths(groups: int, blocks: int, limits: ShapeLimits) -> list[int]:
    """Depths worth trying: all up to 16, multiples of 8, divisors of the number of groups, the deepest and its even
    one."""
    if limits.workers:
        return sorted({w for w in limits.workers if w <= groups})
    most = min(groups, blocks)
    if limits.deepest:
        return [most]
    divisors = [d for d in range(1, most + 1) if groups % d == 0]
    tried = (*range(2, 17), *range(24, most + 1, 8), *divisors, most, most - most % 2)
    return sorted({d for d in tried if 2 <= d <= most})


def _copies(groups: int, workers: int, parts: int, job: Job, limits: ShapeLimits) -> list[int]:
    """Copies of a pipeline that the devices hold and that share the micro-batches, the most first."""
    if not limits.copies:
        return [1]
    wanted = job.data_parallel
    fitting = (c for c in range(groups // workers, 0, -1) if parts % c == 0 and (not wanted or c in wanted))
    return [c for c, _ in zip(fitting, range(MOST_COPIES), strict=False)]


def _pipelines(
    limits: ShapeLimits, workers: int, micro_batches: int, blocks: int, *, recomputed: bool
) -> Iterator[tuple[Schedule, int]]:
    """Schedules with their options, and the numbers of stages that they can place on the workers."""
    for name in limits.schedules:
        for schedule in get(name).variants(workers, micro_batches, recompute=recomputed):
            for stages in schedule.stage_counts(workers):
                if stages > blocks or (limits.stages and stages not in limits.stages):
                    continue
                if not schedule.supports(Pipeline((1,) * stages, micro_batches)):
                    yield schedule, stages


class _Bounds:
    """What all shapes of one way to share operators have in common."""

    def __init__(self, costs: BlockCosts, cluster: Cluster, job: Job) -> None:
        self.costs, self.cluster, self.job = costs, cluster, job
        forward_s, backward_s = costs.forward_s.min(axis=0), costs.backward_s.min(axis=0)
        repeated = np.ones(len(forward_s), bool) if costs.repeated is None else costs.repeated
        self.work_s = float((forward_s + backward_s).sum())
        self.largest_s = float((forward_s + backward_s).max())
        self.repeat_s = {
            Recompute.ALWAYS: float(forward_s[repeated].sum()),
            Recompute.WHOLE_STAGES: float(forward_s.sum()),
        }
        self.filled_s = np.concatenate([[0.0], np.cumsum(forward_s)])
        self.drained_s = np.concatenate([[0.0], np.cumsum(backward_s)])
        self.share = float(forward_s.sum()) / self.work_s if self.work_s else 0.0
        self.elements = float(costs.parameter_elements.sum())
        chosen = precision_of(job, cluster)
        self._bytes = chosen.weight_bytes, chosen.gradient_bytes, optimizer_state_bytes(job.optimizer, chosen)
        self._room = max(device.usable_bytes for device in cluster.devices) - float(costs.workspace_bytes.max())
        self._saved_bytes, again_bytes = (
            float(costs.saved_bytes[0, -1]),
            float(np.diagonal(costs.checkpoint_bytes).sum()),
        )
        self._freed_bytes = self._saved_bytes - again_bytes
        self._synced: dict[tuple[int, int, bool, int], float] = {}
        self._sent: dict[tuple[int, bool], tuple[float, float]] = {}

    @property
    def blocks(self) -> int:
        """Blocks of the chain."""
        return len(self.filled_s) - 1

    def shapes(
        self,
        schedule: Schedule,
        stages: int,
        workers: int,
        copies: int,
        count: int,
        recompute: Recompute,
        limits: ShapeLimits,
    ) -> Iterator[Shape]:
        """The shapes that differ in ZeRO stage and in how copies are placed."""
        pipeline = Pipeline((1,) * stages, count)
        work_s = self.work_s + self.repeat_s.get(recompute, 0.0)
        bound_s = max(count * work_s / workers, count * self.largest_s)
        idle_s = schedule.idle_s(pipeline, self.share * work_s / stages, (1 - self.share) * work_s / stages)
        forwards, backwards = schedule.ramp(pipeline)
        first = [own[0] for own in schedule.placement(pipeline) if own]
        ramp_s = forwards * self.filled_s[first] + backwards * self.drained_s[first]
        crossing = sum(schedule.crossings(pipeline)) if limits.transfers is Transfers.BLOCKING else 0
        passes = count * crossing / workers
        bound_s = max(bound_s, (count * work_s + float(ramp_s.sum())) / workers + passes * self._sending_s(1, False)[0])
        held = np.array(schedule.held(pipeline), float) / schedule.parts / stages
        for zero in limits.zero if copies > 1 else (min(limits.zero),):
            repeated = self._repeated(schedule, pipeline, held, copies if zero else 1, recompute)
            again_s = count * repeated * self.repeat_s[Recompute.ALWAYS] / workers
            for adjacent in (True, False) if copies > 1 else (False,):
                exchange_s = self._exchange_s(workers, copies, adjacent, zero)
                sending_s = self._sending_s(copies, adjacent)[1]
                busy_s = count * work_s / workers + idle_s + again_s + passes * sending_s
                estimate_s = busy_s + exchange_s if schedule.drains else max(busy_s, exchange_s)
                yield Shape(
                    schedule, self.costs, stages, workers, copies, count, zero, recompute, adjacent, limits.transfers,
                    bound_s, max(bound_s, estimate_s),
                )  # fmt: skip

    def _sending_s(self, copies: int, adjacent: bool) -> tuple[float, float]:
        """Seconds to pass a boundary both ways: the least of any boundary and link, and the mean to a neighbour."""
        stride = self.costs.ranks * (copies if adjacent else 1)
        if (stride, adjacent) not in self._sent:
            costs, ranks = self.costs, self.costs.ranks
            moved = np.stack([costs.boundary_bytes, costs.gradient_boundary_bytes])[:, 1:-1]
            near = send_terms(self.cluster, 0, min(1, self.cluster.device_count - 1), 1)
            here = send_terms(self.cluster, 0, min(stride, self.cluster.device_count - 1), ranks)
            gathers = [table for table in (costs.gather_s, costs.gradient_gather_s) if table is not None]
            more = sum((float(table[1:-1].mean()) for table in gathers), 0.0)
            least = sum(float(near.seconds(payload[:, None]).min(initial=0.0)) for payload in moved if payload.all())
            mean = sum(float(here.seconds(payload[:, None]).mean()) for payload in moved) if moved.size else 0.0
            self._sent[stride, adjacent] = least if moved.size else 0.0, mean + more
        return self._sent[stride, adjacent]

    def _repeated(
        self, schedule: Schedule, pipeline: Pipeline, held: np.ndarray, shards: int, recompute: Recompute
    ) -> float:
        """Part of the forward that even stages must repeat to fit; infinite where that is not enough.

        Args:
            schedule: how many versions of the weights are kept.
            pipeline: its stages.
            held: by worker, the part of all activations of a micro-batch that it keeps, in micro-batches.
            shards: of the optimizer's state.
            recompute: which stages repeat their forward anyway.
        """
        weight, gradient, state = self._bytes
        versions = max(schedule.weight_versions(pipeline)) + schedule.weight_buffers
        hosted = sum(len(own) for own in schedule.placement(pipeline)) / pipeline.stages
        resident = (versions * weight + gradient + state / shards) * self.elements * hosted / len(held)
        over = resident + held * self._saved_bytes - self._room
        if recompute is not Recompute.AUTO:
            return 0.0
        part = np.maximum(over, 0.0) / np.maximum(held * self._freed_bytes, 1.0)
        return float(part.mean()) if (part <= 1.0 + REACH).all() else math.inf

    def _exchange_s(self, workers: int, copies: int, adjacent: bool, zero: int) -> float:
        """An even share of the gradients summed over the copies of a worker."""
        key = (workers, copies, adjacent, int(zero > 0))
        if copies < 2:
            return 0.0
        if key not in self._synced:
            ranks, chosen = self.costs.ranks, precision_of(self.job, self.cluster)
            stride = ranks if adjacent else ranks * workers
            payload = self.elements / workers * chosen.gradient_bytes
            kind = Collective.REDUCE_SCATTER if zero else Collective.ALL_REDUCE
            factor = 2.0 if zero else 1.0
            group = np.arange(copies, dtype=np.int64) * stride
            seconds = collective_s(self.cluster, kind, group, payload, max(1, (ranks if adjacent else workers * ranks)))
            self._synced[key] = factor * seconds
        return self._synced[key]


def least_bound_s(shapes: Sequence[Shape]) -> float:
    """No configuration of the shapes is faster."""
    return min((shape.bound_s for shape in shapes), default=float("inf"))

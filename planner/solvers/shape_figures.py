"""What shapes of pipelines cost, at the least and about: of some ways to share operators, and of what a schedule makes
of a number of stages and micro-batches."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import optimizer_state_bytes
from planner.hardware.collectives import collective_s, send_terms
from planner.hardware.types import Cluster, Collective
from planner.play import Transfers
from planner.schedules import Pipeline, Schedule
from planner.space.jobs import precision_of
from planner.space.ranges import Ranges
from planner.space.types import BlockCosts, Job

REACH = 1.5
"""How far the memory that even stages need at the least may be above what there is: uneven ones may still fit."""


@dataclass(frozen=True, eq=False)
class Outline:
    """What a schedule makes of a pipeline of single replicas, whatever its stages cost.

    Attributes:
        schedule: with its options.
        pipeline: one copy.
        hosted: int64 [workers], stages of each worker.
        first: int64 [workers], the first of them, of workers that have any.
        holders: workers that have a stage.
        passes: passes through a stage in an iteration, over all its holders; of the stage that has the fewest.
        ramp: see `Schedule.ramp`.
        crossings: boundaries that lie between workers.
    """

    schedule: Schedule
    pipeline: Pipeline
    hosted: np.ndarray
    first: np.ndarray
    holders: int
    passes: float
    ramp: tuple[float, float]
    crossings: int

    @staticmethod
    def of(schedule: Schedule, pipeline: Pipeline) -> Outline:
        """O(stages of all workers)."""
        placement, holders = schedule.placement(pipeline), schedule.holders(pipeline)
        found = [0] * pipeline.stages
        for own, counts in zip(placement, schedule.workload(pipeline), strict=True):
            for stage, count in zip(own, counts, strict=True):
                found[stage] += count
        apart = [not set(before) & set(here) for before, here in itertools.pairwise(holders)]
        crosses = schedule.crossings(pipeline)[1:]
        return Outline(
            schedule,
            pipeline,
            np.array([len(own) for own in placement]),
            np.array([own[0] for own in placement if own]),
            len(holders[0]),
            float(min(found)),
            schedule.ramp(pipeline),
            sum(crossed and alone for crossed, alone in zip(crosses, apart, strict=True)),
        )

    @functools.cached_property
    def held(self) -> np.ndarray:
        """float64 [workers], units of activations that each keeps at the most; O(actions of few micro-batches)."""
        return np.array(self.schedule.held(self.pipeline), float)

    @functools.cached_property
    def versions(self) -> np.ndarray:
        """float64 [workers], copies of a weight, and buffers as large, that each keeps at the most."""
        found = np.array(self.schedule.weight_versions(self.pipeline), float) + self.schedule.weight_buffers
        return np.array([found[list(own)].max(initial=0.0) for own in self.schedule.placement(self.pipeline)])


class Figures:
    """What all shapes of some ways to share operators have in common."""

    def __init__(self, ways: Sequence[BlockCosts], cluster: Cluster, job: Job) -> None:
        self.ways, self._cluster, self._job = tuple(ways), cluster, job
        forward_s = np.min([costs.forward_s.min(axis=0) for costs in ways], axis=0)
        backward_s = np.min([costs.backward_s.min(axis=0) for costs in ways], axis=0)
        both_s = np.min([(costs.forward_s + costs.backward_s).min(axis=0) for costs in ways], axis=0)
        if job.recompute == "always":
            repeated = ways[0].repeated
            both_s = both_s + (forward_s if job.whole_stages or repeated is None else forward_s * repeated)
        self.work_s, self._largest_s = float(both_s.sum()), float(both_s.max())
        self._filled_s = np.concatenate([[0.0], np.cumsum(forward_s)])
        self._drained_s = np.concatenate([[0.0], np.cumsum(backward_s)])
        self._share = float(forward_s.sum()) / max(float((forward_s + backward_s).sum()), 1e-300)
        self._elements = min(float(costs.parameter_elements.sum()) for costs in ways)
        self._left = min(float(_left(costs).sum()) for costs in ways)
        self._alone = min(
            float(_left(c).sum()) - sum(tie.shard_elements * (len(tie.blocks) - 1) for tie in c.ties) for c in ways
        )
        update_s = min(float(c.update_s.min(axis=0).sum()) for c in ways)
        self._update_s = self._alone / max(self._elements, 1e-300) * update_s
        self._tails: dict[tuple[int, float], float] = {}
        self._chosen = precision_of(job, cluster)
        self._state_bytes = optimizer_state_bytes(job.optimizer, self._chosen)
        self._kept_bytes, self._kept_s = _hull(ways, job)
        workspace = min(float(costs.workspace_bytes.max()) for costs in ways)
        self._room = max(device.usable_bytes for device in cluster.devices) - workspace
        self._synced: dict[tuple[int, int, bool, bool], float] = {}
        self._sent: dict[int, tuple[float, float]] = {}

    @property
    def blocks(self) -> int:
        """Blocks of the chain."""
        return len(self._filled_s) - 1

    def bound_s(self, outline: Outline, beside_s: float) -> float:
        """No configuration is faster, wherever the chain is cut; `beside_s` as below."""
        mean_s = beside_s + outline.passes * self.work_s / len(outline.hosted)
        return max(mean_s, outline.passes * self._largest_s / outline.holders)

    def beside_s(self, outline: Outline, copies: int) -> float:
        """The least that the mean worker takes beside its share of the blocks' work: it fills and drains, sends and
        exchanges."""
        schedule, workers = outline.schedule, len(outline.hosted)
        forwards, backwards = outline.ramp
        ramp_s = forwards * self._filled_s[outline.first] + backwards * self._drained_s[outline.first]
        sending_s = self._crossings(outline) * outline.passes * self._sending_s(1)[0]
        mean_s = (float(ramp_s.sum()) + sending_s) / workers
        if schedule.drains and not schedule.spans and not schedule.launches:
            mean_s += self._tail_s(workers, outline.holders, copies)
        return mean_s

    def _tail_s(self, workers: int, holders: int, copies: int) -> float:
        """The least that exchange and update of a worker's weights take, of the mean worker.

        Ranks that exchange are neighbours at best and have the links to themselves; times grow with the bytes at most
        in proportion, so that the mean worker's are no longer than the mean. Nothing where exchanges may be hidden.
        """
        job, group, parts = self._job, copies * holders, workers / holders
        if job.overlap or max(job.zero) > 1:
            return 0.0
        if (group, parts) not in self._tails:
            payload = self._alone / parts * self._chosen.gradient_bytes
            ranks = np.arange(group, dtype=np.int64) * self.ways[0].ranks
            ways_s = [
                factor * collective_s(self._cluster, kind, ranks, payload, 1)
                for kind, factor in ((Collective.ALL_REDUCE, 1.0), (Collective.REDUCE_SCATTER, 2.0))
            ]
            update_s = self._update_s / parts / (group if max(job.zero) else 1)
            self._tails[group, parts] = update_s + (min(ways_s) if group > 1 else 0.0)
        return self._tails[group, parts]

    def even_s(self, outline: Outline, shards: int) -> float:
        """Seconds that a worker of even stages that fit works and waits for others, transfers left out.

        Args:
            outline: the shape.
            shards: replicas over which the optimizer's state is cut; 0 where it is not.
        """
        work_s = self._fitting_s(outline, self._left / shards if shards else self._elements)
        if math.isinf(work_s):
            return work_s
        schedule, pipeline = outline.schedule, outline.pipeline
        each_s = work_s / pipeline.stages
        idle_s = schedule.idle_s(pipeline, self._share * each_s, (1 - self._share) * each_s)
        return outline.passes * work_s / len(outline.hosted) + idle_s

    def estimate_s(self, outline: Outline, even_s: float, copies: int, zero: int, *, adjacent: bool) -> float:
        """About how long even stages take that fit and work and wait for `even_s`, with transfers and exchanges."""
        workers = len(outline.hosted)
        stride = self.ways[0].ranks * (copies if adjacent else 1)
        crossed = outline.passes * self._crossings(outline) / workers
        busy_s = even_s + crossed * self._sending_s(stride)[1]
        exchange_s = self._exchange_s(workers // outline.holders, copies * outline.holders, adjacent, zero > 0)
        return busy_s + exchange_s if outline.schedule.drains else max(busy_s, exchange_s)

    def _crossings(self, outline: Outline) -> int:
        """Boundaries over which transfers stop workers."""
        return outline.crossings if self._job.transfers is Transfers.BLOCKING else 0

    def _fitting_s(self, outline: Outline, updated: float) -> float:
        """Seconds of all blocks for one micro-batch, as much repeated or shared leanly as even stages need to fit.

        The ranks that update a copy's weights, one of each worker, update so many elements together.
        """
        stages = outline.pipeline.stages
        each = outline.versions * self._chosen.held_weight_bytes + self._chosen.held_gradient_bytes
        room = self._room - (each * self._elements + self._state_bytes * updated) * outline.hosted / stages
        kept = np.maximum(room, 0.0) * stages * outline.schedule.parts / np.maximum(outline.held, 1)
        if (kept * REACH < self._kept_bytes[0]).any():
            return float("inf")
        return float(np.interp(kept, self._kept_bytes, self._kept_s).mean())

    def _sending_s(self, stride: int) -> tuple[float, float]:
        """Seconds to pass a boundary both ways: the least of any boundary and link, and the mean to a neighbour."""
        if stride not in self._sent:
            moved = [np.stack([c.boundary_bytes, c.gradient_boundary_bytes])[:, 1:-1] for c in self.ways]
            last = self._cluster.device_count - 1
            near = send_terms(self._cluster, 0, min(1, last), 1)
            here = send_terms(self._cluster, 0, min(stride, last), stride)
            least, mean = [], []
            for costs, (out, back) in zip(self.ways, moved, strict=True):
                if not out.size:
                    continue
                gathers = [t[1:-1] for t in (costs.gather_s, costs.gradient_gather_s) if t is not None]
                more = np.sum(gathers, axis=0) if gathers else np.zeros(len(out))
                least.append(float((near.seconds(out) * (out > 0) + near.seconds(back) * (back > 0) + more).min()))
                mean.append(float((here.seconds(out) * (out > 0) + here.seconds(back) * (back > 0) + more).mean()))
            self._sent[stride] = min(least, default=0.0), min(mean, default=0.0)
        return self._sent[stride]

    def _exchange_s(self, workers: int, copies: int, adjacent: bool, sharded: bool) -> float:
        """An even share of the gradients summed over the copies of a worker."""
        key = (workers, copies, adjacent, sharded)
        if copies < 2:
            return 0.0
        if key not in self._synced:
            ranks = self.ways[0].ranks
            stride = ranks if adjacent else ranks * workers
            payload = self._left / workers * self._chosen.gradient_bytes
            kind = Collective.REDUCE_SCATTER if sharded else Collective.ALL_REDUCE
            group = np.minimum(np.arange(copies, dtype=np.int64) * stride, self._cluster.device_count - 1)
            seconds = collective_s(self._cluster, kind, np.unique(group), payload, ranks * workers)
            self._synced[key] = (2.0 if sharded else 1.0) * seconds
        return self._synced[key]


def _left(costs: BlockCosts) -> np.ndarray:
    """[n] trainable elements that replicas exchange of each block."""
    return costs.parameter_elements if costs.shard_elements is None else costs.shard_elements


def _hull(ways: Sequence[BlockCosts], job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Bytes kept of a micro-batch by all blocks, ascending, and the least seconds of all blocks that keep so much.

    Every block picks a way to share its operators, and whether to repeat its forward, apart from the others.
    """
    options, at = [], np.arange(len(ways[0].parameter_elements))
    for costs in ways:
        both_s = (costs.forward_s + costs.backward_s).mean(axis=0)
        for way in Ranges(costs).ways(job.recompute, whole_stages=job.whole_stages):
            kept, more_s = costs.saved_bytes[at, at], way.repeat_s[:, at, at].mean(axis=0)
            less = np.where(more_s > 0, np.minimum(way.saved_bytes[at, at], kept), kept)
            options.append((less, both_s + more_s))
    bytes_, seconds = (np.array(column) for column in zip(*options, strict=True))
    steps: list[tuple[float, float, float]] = []
    least_bytes = least_s = 0.0
    for block in range(bytes_.shape[1]):
        points = sorted(zip(bytes_[:, block].tolist(), seconds[:, block].tolist(), strict=True))
        line = _lower(points)
        least_bytes, least_s = least_bytes + line[0][0], least_s + line[0][1]
        steps += [((b[1] - a[1]) / (b[0] - a[0]), b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(line)]
    steps.sort()
    return (
        least_bytes + np.concatenate([[0.0], np.cumsum([step[1] for step in steps])]),
        least_s + np.concatenate([[0.0], np.cumsum([step[2] for step in steps])]),
    )


def _lower(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points by bytes, those on the line from the leanest to the fastest that no mixture of others is below."""
    found: list[tuple[float, float]] = []
    for x, y in points:
        if found and y >= found[-1][1]:
            continue
        while found and x <= found[-1][0]:
            found.pop()
        while len(found) > 1 and (found[-1][1] - found[-2][1]) * (x - found[-2][0]) >= (y - found[-2][1]) * (
            found[-1][0] - found[-2][0]
        ):
            found.pop()
        found.append((x, y))
    return found

"""Lower bounds and estimates of pipeline shapes, from the costs of the chain and the outline of a schedule."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import optimizer_state_bytes
from planner.exchange import Phase, phase_s, recipe_of
from planner.hardware.collectives import send_terms
from planner.hardware.types import Cluster
from planner.play import Transfers
from planner.schedules import Pipeline, Schedule
from planner.space.configuration import KEEP_ALL
from planner.space.cuts import stage_starts
from planner.space.jobs import overlap_of, precision_of
from planner.space.ranges import Ranges, least_added
from planner.space.types import BlockCosts, Job
from planner.sums import float_sum

_ROUNDING = 1e-9
"""Relative slack for rounding where bounds count bytes."""

MEMORY_TOLERANCE = 1.5
"""Factor by which the least memory of equal stages may exceed the device's: unequal stages may still fit."""


@dataclass(frozen=True, eq=False)
class Outline:
    """Facts about a schedule on a pipeline of single replicas that do not depend on the stages' costs.

    Attributes:
        schedule: with its options.
        pipeline: one copy.
        hosted: int64 [workers], number of stages on each worker.
        first: int64, the first stage of each worker that has any.
        holders: number of workers that hold each stage.
        passes: passes through a stage in an iteration, summed over its holders, of the stage with the fewest.
        ramp: see `Schedule.ramp`.
        crossings: number of boundaries between different workers.
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
        """The outline of a schedule on a pipeline; O(stages of all workers)."""
        placement, holders = schedule.placement(pipeline), schedule.holders(pipeline)
        passes = [0] * pipeline.stages
        for hosted, counts in zip(placement, schedule.workload(pipeline), strict=True):
            for stage, count in zip(hosted, counts, strict=True):
                passes[stage] += count
        apart = [not set(before) & set(after) for before, after in itertools.pairwise(holders)]
        crossings = schedule.crossings(pipeline)[1:]
        return Outline(
            schedule,
            pipeline,
            np.array([len(hosted) for hosted in placement]),
            np.array([hosted[0] for hosted in placement if hosted]),
            len(holders[0]),
            float(min(passes)),
            schedule.ramp(pipeline),
            sum(crosses and distinct for crosses, distinct in zip(crossings, apart, strict=True)),
        )

    @functools.cached_property
    def held(self) -> np.ndarray:
        """float64 [workers], peak units of activations on each worker; O(actions of few micro-batches)."""
        return np.array(self.schedule.held(self.pipeline), float)

    @functools.cached_property
    def kept_of_each(self) -> np.ndarray:
        """float64 [workers], `Schedule.kept_of_each` in micro-batches, descending; 0 if stages are recomputed whole."""
        if self.schedule.recomputed_stages(self.pipeline):
            return np.zeros(len(self.hosted))
        return -np.sort(-np.array(self.schedule.kept_of_each(self.pipeline))) / self.schedule.parts

    @functools.cached_property
    def keeping(self) -> tuple[bytes, float, int, float]:
        """What `ShapeCosts.least_work_s` takes from an outline; equal for all numbers of chunks of `interleaved`."""
        return self.kept_of_each.tobytes(), float(self.versions.min()), self.holders, self.passes

    @functools.cached_property
    def versions(self) -> np.ndarray:
        """float64 [workers], most versions and buffers of a weight that a worker keeps."""
        copies = np.array(self.schedule.weight_versions(self.pipeline), float) + self.schedule.weight_buffers
        return np.array([copies[list(hosted)].max(initial=0.0) for hosted in self.schedule.placement(self.pipeline)])


class ShapeCosts:
    """Costs that all shapes with the same choice of shardings have in common."""

    def __init__(self, shardings: Sequence[BlockCosts], cluster: Cluster, job: Job) -> None:
        self.shardings, self._cluster, self._job = tuple(shardings), cluster, job
        forward_s = np.min([costs.forward_s.min(axis=0) for costs in shardings], axis=0)
        backward_s = np.min([costs.backward_s.min(axis=0) for costs in shardings], axis=0)
        both_s = np.min([(costs.forward_s + costs.backward_s).min(axis=0) for costs in shardings], axis=0)
        if job.recompute == "always":
            repeated = shardings[0].repeated
            both_s = both_s + (forward_s if job.whole_stages or repeated is None else forward_s * repeated)
        self.work_s, self._largest_block_s = float(both_s.sum()), float(both_s.max())
        self._block_s = np.add.reduceat(both_s, np.flatnonzero(stage_starts(shardings[0], job)[:-1])).tolist()
        self._least_cache: dict[tuple[object, ...], float] = {}
        self._forward_before_s = np.concatenate([[0.0], np.cumsum(forward_s)])
        self._backward_before_s = np.concatenate([[0.0], np.cumsum(backward_s)])
        self._forward_share = float(forward_s.sum()) / max(float((forward_s + backward_s).sum()), 1e-300)
        self._elements = min(float(costs.parameter_elements.sum()) for costs in shardings)
        self._once = min(
            float(c.parameter_elements.sum()) - float_sum(tie.elements * (len(tie.blocks) - 1) for tie in c.ties)
            for c in shardings
        )
        self._exchanged = min(float(costs.exchanged_elements.sum()) for costs in shardings)
        self._exchanged_once = min(
            float(c.exchanged_elements.sum()) - float_sum(tie.shard_elements * (len(tie.blocks) - 1) for tie in c.ties)
            for c in shardings
        )
        update_s = min(float(c.update_s.min(axis=0).sum()) for c in shardings)
        self._update_s = self._exchanged_once / max(self._elements, 1e-300) * update_s
        self._precision, self._overlap = precision_of(job, cluster), overlap_of(job, cluster)
        self._state_bytes = optimizer_state_bytes(job.optimizer, self._precision)
        self._hulls = {split: _hull(shardings, job, split=split) for split in (False, True)}
        self._kept_before = _most_kept(shardings)
        workspace = min(float(costs.workspace_bytes.max()) for costs in shardings)
        self._room_bytes = cluster.largest_bytes - workspace
        self._even_s, self._unevenness = functools.cache(self._make_even_s), functools.cache(self._make_unevenness)
        self._nearby_s, self._sending_s = functools.cache(self._make_nearby_s), functools.cache(self._make_sending_s)
        self._exchange_s = functools.cache(self._make_exchange_s)

    @property
    def blocks(self) -> int:
        """Blocks of the chain."""
        return len(self._forward_before_s) - 1

    def bound_s(self, outline: Outline, beside_s: float, pass_exchange_s: float, work_s: float) -> float:
        """Lower bound on the iteration time for any cut, in seconds.

        Args:
            outline: the schedule on its pipeline.
            beside_s: the sum of `ramp_s` and `tail_s`.
            pass_exchange_s: see there.
            work_s: least seconds of one micro-batch in all blocks.
        """
        work_s = with_exchange_s(work_s, pass_exchange_s, self._overlap)
        mean_s = beside_s + outline.passes * work_s / len(outline.hosted)
        return max(mean_s, outline.passes * self._largest_block_s / outline.holders)

    def least_work_s(self, outline: Outline, replicas: int, zero: int, cutoff_s: float) -> float:
        """Least seconds of one micro-batch in all blocks, of any cut that fits in memory and takes less than a cutoff.

        The workers' memory holds the state of all blocks, and of the activations what `Schedule.kept_of_each` says; a
        worker that may take only so long keeps only so many. So that blocks keep as much as possible, the state lies
        where activations are kept longest. O(workers), remembered.

        Infinite if there is none. Without a cutoff, which is to say while no plan is known, nothing is recomputed then:
        the judge says what is lacking.
        """
        key = outline.keeping, replicas, zero, cutoff_s
        if key not in self._least_cache:
            least_s = self._least_work_s(outline, replicas, zero, cutoff_s)
            self._least_cache[key] = self.work_s if math.isinf(least_s) and math.isinf(cutoff_s) else least_s
        return self._least_cache[key]

    def _least_work_s(self, outline: Outline, replicas: int, zero: int, cutoff_s: float) -> float:
        kept, room_bytes = outline.kept_of_each, self._cluster.largest_bytes * (1 + _ROUNDING)
        longest_s = cutoff_s * outline.holders / outline.passes
        own_bytes = float(np.interp(longest_s, *self._kept_before)) if math.isfinite(cutoff_s) else math.inf
        with np.errstate(invalid="ignore"):
            most_bytes = np.minimum(np.where(kept > 0, kept * own_bytes, 0.0), room_bytes)
        state_bytes = outline.holders * self._state_of_all(outline.keeping[1], replicas, zero)
        taken_bytes = state_bytes - (room_bytes * len(kept) - float(most_bytes.sum()))
        if taken_bytes > most_bytes.sum():
            return math.inf
        if not kept[-1]:
            return self.work_s
        if taken_bytes > 0:
            most_bytes = most_bytes - np.clip(taken_bytes - (np.cumsum(most_bytes) - most_bytes), 0.0, most_bytes)
        bytes_by_point, s_by_point = self._hulls[False]
        kept_bytes = float((most_bytes / kept).sum()) / outline.holders * (1 + _ROUNDING)
        if kept_bytes < bytes_by_point[0]:
            return math.inf
        return max(self.work_s, float(np.interp(kept_bytes, bytes_by_point, s_by_point)))

    def _state_of_all(self, versions: float, replicas: int, zero: int) -> float:
        """Least bytes of weights, gradients and optimizer state of all blocks."""
        shard = self._exchanged_once / replicas
        weights, gradients, states = (self._once if group is None else shard for group in recipe_of(zero).held)
        held = self._precision.held_weight_bytes * versions * weights
        return held + self._precision.held_gradient_bytes * gradients + self._state_bytes * states

    def pass_exchange_s(self, replicas: int, zero: int) -> float:
        """Lower bound on the exchanges of a micro-batch in the passes through all blocks, hidden or not."""
        return float_sum(
            self._nearby_s(replicas, zero, self._exchanged, phase) for phase in (Phase.FORWARD, Phase.BACKWARD)
        )

    def ramp_s(self, outline: Outline) -> float:
        """Lower bound on the mean worker's ramp and transfers."""
        forwards, backwards = outline.ramp
        ramp_s = forwards * self._forward_before_s[outline.first] + backwards * self._backward_before_s[outline.first]
        sending_s = self._crossings(outline) * outline.passes * self._sending_s(1)[0]
        return (float(ramp_s.sum()) + sending_s) / len(outline.hosted)

    def tail_s(self, outline: Outline, copies: int, zero: int) -> float:
        """Lower bound on the mean worker's time for gradient exchange and update; 0 where the exchange may be hidden.

        Times grow at most in proportion to the bytes, so the time of the mean bytes is no more than the mean time.
        """
        schedule, group, parts = outline.schedule, copies * outline.holders, len(outline.hosted) / outline.holders
        if self._overlap or not schedule.drains or schedule.spans or schedule.launches:
            return 0.0
        update_s = self._update_s / parts / (group if recipe_of(zero).optimizer else 1)
        return update_s + self._nearby_s(group, zero, self._exchanged_once / parts, Phase.END)

    def _make_nearby_s(self, replicas: int, zero: int, elements: float, phase: Phase) -> float:
        """Seconds of a phase's exchanges among replicas that are neighbours and have the links to themselves."""
        ranks = np.arange(replicas, dtype=np.int64) * self.shardings[0].ranks
        return phase_s(self._cluster, recipe_of(zero), phase, ranks, self._precision, elements)

    def _make_even_s(self, outline: Outline, replicas: int, zero: int) -> float:
        """Seconds that the slowest worker works and idles, without transfers; infinite if equal stages cannot fit.

        Args:
            outline: the schedule on its pipeline.
            replicas: of a stage, over which ZeRO shards.
            zero: ZeRO stage.
        """
        work_s = self._fitting_s(outline, replicas, zero)
        if math.isinf(work_s):
            return work_s
        schedule, pipeline = outline.schedule, outline.pipeline
        work_s *= self._unevenness(len(outline.hosted))
        each_s = work_s / pipeline.stages
        idle_s = schedule.idle_s(pipeline, self._forward_share * each_s, (1 - self._forward_share) * each_s)
        return outline.passes * work_s / len(outline.hosted) + idle_s

    def _make_unevenness(self, workers: int) -> float:
        """Work of the slowest worker over that of the mean one, in the most even cut into so many parts; at least 1.

        Blocks are not divided: 96 layers and a loss as long as a third of one leave a twelfth 8 layers and the loss.
        """
        return slowest_part(self._block_s, workers) * workers / max(self.work_s, 1e-300)

    def estimate_s(self, outline: Outline, copies: int, zero: int, *, adjacent: bool) -> float:
        """Estimated iteration time of equal stages, with transfers and gradient exchange; infinite if they cannot fit.

        Args:
            outline: the schedule on its pipeline.
            copies: copies of the pipeline.
            zero: ZeRO stage.
            adjacent: the copies of a worker are neighbours.
        """
        even_s = self._even_s(outline, copies * outline.holders, zero)
        if math.isinf(even_s):
            return even_s
        workers = len(outline.hosted)
        stride = self.shardings[0].ranks * (copies if adjacent else 1)
        crossed = outline.passes * self._crossings(outline) / workers
        busy_s = even_s + crossed * self._sending_s(stride)[1]
        parts = workers // outline.holders
        forward_s, backward_s, end_s = self._exchange_s(parts, copies * outline.holders, zero, adjacent)
        hiding_s = self._overlap * self.work_s / parts
        hiding_forward_s, hiding_backward_s = self._forward_share * hiding_s, (1 - self._forward_share) * hiding_s
        exposed_s = max(0.0, forward_s - hiding_forward_s) + max(0.0, backward_s - hiding_backward_s)
        busy_s += outline.passes / outline.holders * exposed_s
        end_s = max(0.0, end_s - max(0.0, hiding_backward_s - backward_s))
        return busy_s + end_s if outline.schedule.drains else max(busy_s, end_s)

    def _crossings(self, outline: Outline) -> int:
        """Number of boundaries whose transfers block a worker."""
        return outline.crossings if self._job.transfers is Transfers.BLOCKING else 0

    def _fitting_s(self, outline: Outline, replicas: int, zero: int) -> float:
        """Seconds of one micro-batch through all blocks with the recomputation that equal stages need to fit."""
        stages, shard = outline.pipeline.stages, self._exchanged / replicas
        weights, gradients, states = (self._elements if group is None else shard for group in recipe_of(zero).held)
        held_bytes = outline.versions * self._precision.held_weight_bytes * weights
        held_bytes = held_bytes + self._precision.held_gradient_bytes * gradients + self._state_bytes * states
        room_bytes = self._room_bytes - held_bytes * outline.hosted / stages
        kept_bytes = np.maximum(room_bytes, 0.0) * stages * outline.schedule.parts / np.maximum(outline.held, 1)
        bytes_by_point, s_by_point = self._hulls[outline.schedule.split_backward]
        if (kept_bytes * MEMORY_TOLERANCE < bytes_by_point[0]).any():
            return float("inf")
        return float(np.interp(kept_bytes, bytes_by_point, s_by_point).mean())

    def _make_sending_s(self, stride: int) -> tuple[float, float]:
        """(least seconds of any boundary both ways over the fastest link, mean seconds to a rank `stride` away)."""
        moved = [np.stack([c.boundary_bytes, c.gradient_boundary_bytes])[:, 1:-1] for c in self.shardings]
        last = self._cluster.device_count - 1
        nearest = send_terms(self._cluster, 0, min(1, last), 1)
        neighbour = send_terms(self._cluster, 0, min(stride, last), stride)
        least_s, mean_s = [], []
        for costs, (out, back) in zip(self.shardings, moved, strict=True):
            if not out.size:
                continue
            gathers = [t[1:-1] for t in (costs.gather_s, costs.gradient_gather_s) if t is not None]
            gather_s = np.sum(gathers, axis=0) if gathers else np.zeros(len(out))
            nearest_s, neighbour_s = (
                link.seconds(out) * (out > 0) + link.seconds(back) * (back > 0) + gather_s
                for link in (nearest, neighbour)
            )
            least_s.append(float(nearest_s.min()))
            mean_s.append(float(neighbour_s.mean()))
        return min(least_s, default=0.0), min(mean_s, default=0.0)

    def _make_exchange_s(self, workers: int, copies: int, zero: int, adjacent: bool) -> tuple[float, float, float]:
        """Seconds of the exchanges of an even share over the copies of a worker: a forward, a backward, the end."""
        ranks, share = self.shardings[0].ranks, self._exchanged / workers
        stride = ranks if adjacent else ranks * workers
        group = np.unique(np.minimum(np.arange(copies, dtype=np.int64) * stride, self._cluster.device_count - 1))
        forward_s, backward_s, end_s = (
            phase_s(self._cluster, recipe_of(zero), phase, group, self._precision, share, ranks * workers)
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.END)
        )
        return forward_s, backward_s, end_s


def with_exchange_s(work_s: float, exchange_s: float, overlap: float) -> float:
    """Least seconds of work whose exchanges hide behind a fraction of it."""
    return max(work_s, exchange_s + (1 - overlap) * work_s)


HALVINGS = 14
"""Halvings of the range in which the slowest part of a chain is sought."""


def slowest_part(seconds: Sequence[float], parts: int) -> float:
    """Work of the slowest part of a chain in its most even cut, to a few ten-thousandths of the largest block.

    Args:
        seconds: by block.
        parts: at most as many; some may be empty.

    A limit can be kept if parts that are filled up to it, first to last, suffice: O(halvings parts log(blocks)).
    """
    ends = list(itertools.accumulate(seconds))
    least = max(ends[-1] / parts, *seconds)
    most = least + max(seconds)
    for _ in range(HALVINGS):
        limit, end = (least + most) / 2, 0
        for _ in range(parts):
            end = bisect.bisect_right(ends, (ends[end - 1] if end else 0.0) + limit)
        least, most = (least, limit) if end >= len(ends) else (limit, most)
    return most


def _hull(shardings: Sequence[BlockCosts], job: Job, *, split: bool) -> tuple[np.ndarray, np.ndarray]:
    """(bytes kept of a micro-batch by all blocks, ascending; least seconds of all blocks that keep no more).

    Every block picks its device type, its sharding and its recomputation independently of the others, and counts with
    what it adds to a stage at the least. With `split` a micro-batch may keep as little as between the halves of its
    backward.
    """
    options = []
    for costs in shardings:
        both_s, ranges = (costs.forward_s + costs.backward_s).min(axis=0), Ranges(costs, by_block=least_added)
        ways = ranges.ways(job.recompute, whole_stages=job.whole_stages)
        for choice in (*ways, *([ranges.way(KEEP_ALL)] if any(way.choice.layers for way in ways) else [])):
            repeat_s, kept_bytes = choice.repeat_s.min(axis=0), np.minimum(choice.saved_bytes, ranges.saved_bytes)
            if split and costs.waiting_bytes is not None:
                kept_bytes = np.minimum(kept_bytes, costs.waiting_bytes)
            options.append((kept_bytes, both_s + repeat_s))
    bytes_by_option, s_by_option = (np.array(column) for column in zip(*options, strict=True))
    steps: list[tuple[float, float, float]] = []
    least_bytes = least_s = 0.0
    for block in range(bytes_by_option.shape[1]):
        points = sorted(zip(bytes_by_option[:, block].tolist(), s_by_option[:, block].tolist(), strict=True))
        hull = _lower_hull(points)
        least_bytes, least_s = least_bytes + hull[0][0], least_s + hull[0][1]
        steps += [((b[1] - a[1]) / (b[0] - a[0]), b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(hull)]
    steps.sort()
    return (
        least_bytes + np.concatenate([[0.0], np.cumsum([step[1] for step in steps])]),
        least_s + np.concatenate([[0.0], np.cumsum([step[2] for step in steps])]),
    )


def _most_kept(shardings: Sequence[BlockCosts]) -> tuple[np.ndarray, np.ndarray]:
    """(seconds of one micro-batch, ascending; most bytes that blocks which take no longer may keep of it)."""
    kept_bytes, both_s = (
        np.array(column)
        for column in zip(
            *((np.diagonal(c.saved_bytes), (c.forward_s + c.backward_s).min(axis=0)) for c in shardings), strict=True
        )
    )
    ratio, most_bytes = (kept_bytes / np.maximum(both_s, 1e-300)).max(axis=0), kept_bytes.max(axis=0)
    order = np.argsort(-ratio)
    seconds = np.divide(most_bytes, ratio, out=np.zeros_like(ratio), where=ratio > 0)[order]
    return np.concatenate([[0.0], np.cumsum(seconds)]), np.concatenate([[0.0], np.cumsum(most_bytes[order])])


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Lower convex hull of (bytes, seconds) points in ascending order of bytes, from the leanest to the fastest."""
    hull: list[tuple[float, float]] = []
    for x, y in points:
        if hull and y >= hull[-1][1]:
            continue
        while hull and x <= hull[-1][0]:
            hull.pop()
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull

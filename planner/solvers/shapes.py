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
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import optimizer_state_bytes
from planner.hardware.collectives import collective_s, send_terms
from planner.hardware.types import Cluster, Collective
from planner.play import Transfers
from planner.schedules import get
from planner.schedules.types import Pipeline, Schedule
from planner.space.divisors import divisors
from planner.space.settled import precision_of
from planner.space.types import BlockCosts, Job

SchedulesFor = Callable[[str], Schedule]
"""A schedule by its name, with options."""


def schedules_with(own: Schedule | None) -> SchedulesFor:
    """Schedules of the registry, and one that it does not know."""
    return lambda name: own if own is not None and own.name == name else get(name)


LONGEST = 1_000_000
"""Actions of one copy and iteration that a shape may have: all of them are played."""

REACH = 1.5
"""How far the memory that even stages need at the least may be above what there is: uneven ones may still fit."""


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
    bound_s: float
    estimate_s: float

    @property
    def pipeline(self) -> Pipeline:
        """One copy."""
        return Pipeline((1,) * self.stages, self.micro_batches)

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
        self._pipelines = functools.cache(self._served)

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
        return min((passes(schedule, pipeline) / 4 for schedule, pipeline in tried), default=1.0)

    def _known(self) -> list[Schedule]:
        return [self._schedule_of(name) for name in self._job.schedules]

    def _allowed(self, workers: int, copies: int) -> bool:
        """Whether the job allows so many workers in so many copies."""
        job = self._job
        depths = not job.pipeline_stages or workers in job.pipeline_stages
        return depths and (not job.data_parallel or any(wide % copies == 0 for wide in job.data_parallel))

    def _of_size(self, figures: Figures, workers: int, copies: int, count: int, cutoff_s: float) -> Iterator[Shape]:
        for schedule, stages in self._pipelines(workers, count, figures.blocks):
            pipeline = Pipeline((1,) * stages, count)
            holders = schedule.holders(pipeline)
            if self._job.data_parallel and copies * len(holders[0]) not in self._job.data_parallel:
                continue
            bound_s = figures.bound_s(schedule, pipeline, copies)
            if bound_s >= cutoff_s:
                continue
            zero = self._job.zero if copies * len(holders[0]) > 1 else (min(self._job.zero),)
            for stage in zero:
                for adjacent in (True, False) if copies > 1 else (False,):
                    estimate_s = figures.estimate_s(schedule, pipeline, copies, stage, adjacent=adjacent)
                    yield Shape(
                        schedule, figures.ways, stages, workers, copies, count, stage, adjacent, bound_s,
                        max(bound_s, estimate_s),
                    )  # fmt: skip

    def _served(self, workers: int, count: int, blocks: int) -> list[tuple[Schedule, int]]:
        """Schedules with their options, and the numbers of stages that they place on so many workers."""
        return list(self._pipelines_of(workers, count, blocks))

    def _pipelines_of(self, workers: int, count: int, blocks: int) -> Iterator[tuple[Schedule, int]]:
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
            chosen = ":" in name
            for schedule in (own,) if chosen else own.variants(workers, count, recompute=job.recompute != "never"):
                for stages in schedule.stage_counts(workers):
                    fits = stages <= most and 2 * stages * count <= LONGEST
                    pipeline = Pipeline((1,) * stages, count)
                    if fits and not schedule.supports(pipeline) and self._wanted(schedule, pipeline):
                        yield schedule, stages

    def _wanted(self, schedule: Schedule, pipeline: Pipeline) -> bool:
        """Whether orders that repeat forwards by actions of their own repeat those that the job wants."""
        repeats, choice = schedule.recomputed_stages(pipeline), self._job.recompute
        return not repeats or choice == "auto" or (choice == "always" and len(repeats) == pipeline.stages)

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


def passes(schedule: Schedule, pipeline: Pipeline) -> float:
    """Passes through a stage in an iteration, over all workers that hold it; of the stage that has the fewest."""
    found = [0] * pipeline.stages
    for own, counts in zip(schedule.placement(pipeline), schedule.workload(pipeline), strict=True):
        for stage, count in zip(own, counts, strict=True):
            found[stage] += count
    return float(min(found))


class Figures:
    """What all shapes of some ways to share operators have in common."""

    def __init__(self, ways: Sequence[BlockCosts], cluster: Cluster, job: Job) -> None:
        self.ways, self._cluster, self._job = tuple(ways), cluster, job
        forward_s = np.min([costs.forward_s.min(axis=0) for costs in ways], axis=0)
        backward_s = np.min([costs.backward_s.min(axis=0) for costs in ways], axis=0)
        both_s = np.min([(costs.forward_s + costs.backward_s).min(axis=0) for costs in ways], axis=0)
        if job.recompute == "always":
            both_s = both_s + np.where(_repeated(ways[0], job), forward_s, 0.0)
        self.work_s, self._largest_s = float(both_s.sum()), float(both_s.max())
        self._filled_s = np.concatenate([[0.0], np.cumsum(forward_s)])
        self._drained_s = np.concatenate([[0.0], np.cumsum(backward_s)])
        self._share = float(forward_s.sum()) / max(float((forward_s + backward_s).sum()), 1e-300)
        self._elements = min(float(costs.parameter_elements.sum()) for costs in ways)
        self._alone = min(
            float(c.parameter_elements.sum()) - sum(tie.elements * (len(tie.blocks) - 1) for tie in c.ties)
            for c in ways
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

    def bound_s(self, schedule: Schedule, pipeline: Pipeline, copies: int) -> float:
        """No configuration is faster, wherever the chain is cut."""
        placement, count = schedule.placement(pipeline), passes(schedule, pipeline)
        forwards, backwards = schedule.ramp(pipeline)
        first = [own[0] for own in placement if own]
        ramp_s = forwards * self._filled_s[first] + backwards * self._drained_s[first]
        sending_s = self._crossings(schedule, pipeline) * count * self._sending_s(1)[0]
        mean_s = (count * self.work_s + float(ramp_s.sum()) + sending_s) / len(placement)
        if schedule.drains and not schedule.spans and not schedule.launches:
            mean_s += self._tail_s(len(placement), len(schedule.holders(pipeline)[0]), copies)
        return max(mean_s, count * self._largest_s / len(schedule.holders(pipeline)[0]))

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

    def estimate_s(self, schedule: Schedule, pipeline: Pipeline, copies: int, zero: int, *, adjacent: bool) -> float:
        """About how long even stages take that fit."""
        workers, count = len(schedule.placement(pipeline)), passes(schedule, pipeline)
        holders = len(schedule.holders(pipeline)[0])
        work_s = self._fitting_s(schedule, pipeline, copies * holders if zero else 1)
        each_s = work_s / pipeline.stages
        idle_s = schedule.idle_s(pipeline, self._share * each_s, (1 - self._share) * each_s)
        stride = self.ways[0].ranks * (copies if adjacent else 1)
        crossed = count * self._crossings(schedule, pipeline) / workers
        busy_s = count * work_s / workers + idle_s + crossed * self._sending_s(stride)[1]
        exchange_s = self._exchange_s(workers // holders, copies * holders, adjacent, zero > 0)
        return busy_s + exchange_s if schedule.drains else max(busy_s, exchange_s)

    def _crossings(self, schedule: Schedule, pipeline: Pipeline) -> int:
        """Boundaries over which transfers stop workers."""
        if self._job.transfers is not Transfers.BLOCKING:
            return 0
        holders = schedule.holders(pipeline)
        apart = [not set(before) & set(here) for before, here in itertools.pairwise(holders)]
        return sum(crosses and alone for crosses, alone in zip(schedule.crossings(pipeline)[1:], apart, strict=True))

    def _fitting_s(self, schedule: Schedule, pipeline: Pipeline, shards: int) -> float:
        """Seconds of all blocks for one micro-batch, as much repeated or shared leanly as even stages need to fit."""
        held = np.array(schedule.held(pipeline), float)
        placement = schedule.placement(pipeline)
        hosted = np.array([len(own) for own in placement]) / pipeline.stages
        versions = np.array(schedule.weight_versions(pipeline), float) + schedule.weight_buffers
        version = np.array([versions[list(own)].max(initial=0.0) for own in placement])
        each = version * self._chosen.weight_bytes + self._chosen.gradient_bytes + self._state_bytes / shards
        room = self._room - each * self._elements * hosted
        kept = np.maximum(room, 0.0) * pipeline.stages * schedule.parts / np.maximum(held, 1)
        if (kept * REACH < self._kept_bytes[0]).any():
            return float("inf")
        return float(np.interp(kept, self._kept_bytes, self._kept_s).mean())

    def _sending_s(self, stride: int) -> tuple[float, float]:
        """Seconds to pass a boundary both ways: the least of any boundary and link, and the mean to a neighbour."""
        if stride not in self._sent:
            moved = [np.stack([c.boundary_bytes, c.gradient_boundary_bytes])[:, 1:-1] for c in self.ways]
            last = self._cluster.device_count - 1
            near = send_terms(self._cluster, 0, min(1, last), 1)
            here = send_terms(self._cluster, 0, min(stride, last), self.ways[0].ranks)
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
            payload = self._elements / workers * self._chosen.gradient_bytes
            kind = Collective.REDUCE_SCATTER if sharded else Collective.ALL_REDUCE
            group = np.minimum(np.arange(copies, dtype=np.int64) * stride, self._cluster.device_count - 1)
            seconds = collective_s(self._cluster, kind, np.unique(group), payload, ranks * workers)
            self._synced[key] = (2.0 if sharded else 1.0) * seconds
        return self._synced[key]


def _repeated(costs: BlockCosts, job: Job) -> np.ndarray:
    """[n] whether a recomputed stage repeats the block."""
    every = job.whole_stages or costs.repeated is None
    return np.ones(len(costs.parameter_elements), bool) if every else np.asarray(costs.repeated)


def _hull(ways: Sequence[BlockCosts], job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Bytes kept of a micro-batch by all blocks, ascending, and the least seconds of all blocks that keep so much.

    Every block picks a way to share its operators, and whether to repeat its forward, apart from the others.
    """
    options = []
    for costs in ways:
        seconds, kept = (costs.forward_s + costs.backward_s).mean(axis=0), np.diagonal(costs.saved_bytes)
        if job.recompute != "always":
            options.append((kept, seconds))
        if job.recompute != "never":
            again = _repeated(costs, job)
            more = np.zeros_like(kept) if costs.kept_bytes is None else costs.kept_bytes
            less = np.where(again, np.minimum(np.diagonal(costs.checkpoint_bytes) + more, kept), kept)
            options.append((less, seconds + np.where(again, costs.forward_s.mean(axis=0), 0.0)))
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

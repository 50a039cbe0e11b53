"""Lower bounds that prune the exact DP: the blocks before a cut (`relax`), and whether a cutoff is reachable at all.

`relax` minimises each of the three parts of an objective by a DP of its own, independently of the other two.

`FeasibilityTest` rules out problems before they are solved, by compute, memory and synchronisation. It ignores where
stages lie: transfers are free, and every stage runs on the fastest and largest device, shards over all devices and
synchronises over the fastest links.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.solvers._objectives import NewStage, Prefix, TimeObjective
from planner.solvers._stages import StagePrices
from planner.space.formulate import warm_up_tables
from planner.space.problem import StageProblem
from planner.space.ranges import StageNeeds, first_true


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Lower bounds on blocks 0..p-1 on devices 0..a-1, float64 [C, n + 1, W + 1]; infinite if nothing passes (p, a).

    Attributes:
        objective: the time that is bounded.
        path_s, delay_s, slowest_s: its parts, see `Prefix`, by the number of stages behind the cut; C is 1 where the
            bounds hold for any number of stages.
    """

    objective: TimeObjective
    path_s: np.ndarray
    delay_s: np.ndarray
    slowest_s: np.ndarray

    @property
    def bound_s(self) -> float:
        """Lower bound on the objective of any decision; infinite if none is left."""
        return float(self.objective.total_s(self.delay_s[0, -1, -1], self.slowest_s[0, -1, -1]))

    def before(self, i: int, at: np.ndarray, behind: np.ndarray) -> Prefix:
        """Bounds on the stages before block i on devices 0..a-1, for each a in `at` with so many stages behind it."""
        key = np.minimum(behind, len(self.delay_s) - 1), i, at
        return Prefix(self.path_s[key], self.delay_s[key], self.slowest_s[key])


def band(problem: StageProblem, objective: TimeObjective, cutoff_s: float) -> tuple[np.ndarray, np.ndarray]:
    """int64 [n + 1] each: fewest and most devices before a cut at p that a cutoff allows, by compute alone; O(n)."""
    total = float(problem.least_s[-1])
    if math.isinf(cutoff_s):
        zeros = np.zeros(len(problem.least_s), dtype=np.int64)
        return zeros, zeros + problem.slice_devices
    before, after = problem.least_s, total - problem.least_s

    def devices(compute: np.ndarray) -> np.ndarray:
        available = objective.available_s(cutoff_s, total, compute)
        least = np.divide(problem.micro_batches * compute, available, out=np.zeros_like(compute), where=compute > 0)
        return np.asarray(np.ceil(least * (1 - 1e-9) - 1e-9), dtype=np.int64)

    return devices(before), problem.slice_devices - devices(after)


_MOST_COUNTED = 4_000_000
"""Most entries of a table of bounds by number of stages; where there were more, bounds hold for any number."""


def relax(problem: StageProblem, prices: StagePrices, objective: TimeObjective, cutoff_s: float) -> Relaxation:
    """Bounds for decisions faster than the cutoff; O(R n^2 W C) at most, far less under a tight cutoff.

    Stages are counted where the problem allows certain numbers of them and these do not follow from the devices, which
    they do if all stages have equally many.
    """
    free, counts = _relaxed(problem, prices, objective, cutoff_s, 0), problem.stage_counts
    size = (int(counts.max(initial=0)) + 1) * free.delay_s.size
    if not len(counts) or size > _MOST_COUNTED or len(np.unique(problem.replicas)) == 1 or free.bound_s >= cutoff_s:
        return free
    by_count = _relaxed(problem, prices, objective, cutoff_s, int(counts[-1]))

    def behind(least: np.ndarray) -> np.ndarray:
        left = (least[counts[counts >= stages] - stages].min(axis=0) for stages in range(len(least)))
        return np.stack(list(left))

    return Relaxation(objective, behind(by_count.path_s), behind(by_count.delay_s), behind(by_count.slowest_s))


def _relaxed(
    problem: StageProblem, prices: StagePrices, objective: TimeObjective, cutoff_s: float, count: int
) -> Relaxation:
    """Bounds by the number of stages before each cut, up to `count`; for any number if it is 0."""
    n, width = problem.blocks, problem.slice_devices
    parts = Prefix(*(np.full((count + 1, n + 1, width + 1), np.inf) for _ in range(3)))
    for part in (parts.path_s, parts.delay_s, parts.slowest_s):
        part[0, 0] = 0.0
    fewest, most = band(problem, objective, cutoff_s)
    stops = longest(problem, objective, cutoff_s)
    pruning = _Pruning(objective, most, most_passing(problem.replicas, problem.passing, width), stops, cutoff_s)
    by_replicas = [np.flatnonzero(problem.replicas == count) for count in np.unique(problem.replicas)]
    most_stages, fewest_stages = problem.max_stages or n, np.full(n + 1, n)
    fewest_stages[0] = 0
    for i in range(n):
        live = np.flatnonzero(np.isfinite(parts.delay_s[: count or 1, i]).any(axis=0))
        live = live[(live >= fewest[i]) & (live <= most[i])]
        if len(live) and fewest_stages[i] < most_stages:
            nearest = i + 1 if fewest_stages[i] + 1 < most_stages else n
            np.minimum(fewest_stages[nearest:], fewest_stages[i] + 1, out=fewest_stages[nearest:])
            size = len(problem.replicas) * (live[-1] - live[0] + 1) * (stops[:, i].max() + 1 - nearest)
            for options in (np.arange(len(problem.replicas)),) if size <= _SMALL else by_replicas:
                _extend(problem, prices, parts, pruning, (i, nearest), options, live)
    return Relaxation(objective, parts.path_s, parts.delay_s, parts.slowest_s)


def longest(problem: StageProblem, objective: TimeObjective, cutoff_s: float) -> np.ndarray:
    """int64 [R, n], end (exclusive) of the longest stage from block i with replicas[o] that stays below a cutoff."""
    stops = np.full((len(problem.replicas), problem.blocks), problem.blocks)
    if math.isinf(cutoff_s):
        return stops
    total, before = float(problem.least_s[-1]), problem.least_s[:-1]
    for o, replicas in enumerate(problem.replicas.tolist()):
        longest_s = before + objective.longest_s(cutoff_s, total, before, problem.micro_batches // replicas) * (
            1 + 1e-9
        )
        stops[o] = np.minimum(problem.blocks, np.searchsorted(problem.least_s, longest_s, side="right") - 1)
    return stops


def most_passing(replicas: np.ndarray, passing: np.ndarray, devices: int) -> np.ndarray:
    """int64 [W + 1], most micro-batches that pass a stage ending at device a before its first backward; O(R W).

    The stages after it fill the remaining devices.

    Args:
        replicas: int64 [R], numbers of replicas that a stage may have.
        passing: int64 [R, X + 1], see `StageProblem`.
        devices: W.
    """
    most = np.zeros(devices + 1, dtype=np.int64)
    for a in range(devices - 1, -1, -1):
        fits = np.flatnonzero(replicas <= devices - a)
        most[a] = passing[fits, most[a + replicas[fits]]].max(initial=0)
    return most


_SMALL = 16384
"""Entries of the tables of all options up to which these are extended at once instead of by number of replicas."""


@dataclass(frozen=True, eq=False)
class _Pruning:
    """Limits that prune stages of the relaxation.

    Attributes:
        objective: the time that is bounded.
        most: int64 [n + 1], most devices before each cut.
        passing: most micro-batches that pass a stage, by the device where it ends (`most_passing`).
        stops: ends of the longest stages (`longest`).
        cutoff_s: decisions at or above it are ignored, in seconds.
    """

    objective: TimeObjective
    most: np.ndarray
    passing: np.ndarray
    stops: np.ndarray
    cutoff_s: float


def _extend(
    problem: StageProblem,
    prices: StagePrices,
    parts: Prefix,
    pruning: _Pruning,
    ends: tuple[int, int],
    options: np.ndarray,
    live: np.ndarray,
) -> None:
    """Extend the bounds by all stages that begin with block i, for some options.

    `ends` is i and the nearest end (exclusive) that a stage may have. Arrays have shape [options, places, stops], where
    they depend on the stages before with the number of these in front.
    """
    i, nearest = ends
    low, width = int(live[0]), problem.slice_devices
    options = options[problem.replicas[options] <= width - low]
    stop = int(pruning.stops[options, i].max(initial=0))
    if stop < nearest:
        return
    r = problem.replicas[options]
    high = min(int(live[-1]), width - int(r.min()))
    starts, o = np.arange(low, high + 1), options[:, None]
    at = np.minimum(starts, width - r[:, None])  # those that do not fit are ruled out below
    most = pruning.passing[at + r[:, None]]
    later = np.minimum(width - at - r[:, None], problem.in_flight.shape[1] - 1)
    forward, work, end = prices.choose(
        problem.place[o, at], i, slice(nearest - 1, stop), problem.in_flight[o, later][..., None]
    )
    if i == 0 and stop > 1:
        several = np.arange(nearest - 1, stop) < problem.blocks - 1
        end = end + np.where(several, prices.tied_s[o, at][..., None], 0.0)
    receive, back, transfer = (t[o, at, i][..., None] for t in (prices.receive_s, prices.return_s, prices.transfer_s))
    places = slice(low, high + 1)
    one_more = min(1, len(parts.delay_s) - 1)
    numbers = np.flatnonzero(np.isfinite(parts.delay_s[: len(parts.delay_s) - one_more, i]).any(axis=1))
    old = slice(numbers[0], numbers[-1] + 1)
    new = slice(old.start + one_more, old.stop + one_more)
    before = Prefix(*(p[old, i, places][:, None, :, None] for p in (parts.path_s, parts.delay_s, parts.slowest_s)))
    later_s = (problem.least_s[-1] - problem.least_s[nearest : stop + 1])[None, :]
    fits = np.isfinite(work + transfer)
    work, transfer = np.where(fits, work, 0.0), np.where(fits, transfer, 0.0)
    stage = NewStage(
        replicas=r,
        turns=problem.micro_batches // r[:, None, None],
        first=i == 0,
        forward_s=forward + receive,
        backward_s=work - forward + back,
        work_s=work + transfer,
        end_s=end,
        later_s=later_s,
        in_flight=problem.in_flight[o, most][..., None],
        filling=problem.filling[o, most][..., None],
    )
    delay = np.maximum(before.delay_s, before.path_s + end) + stage.work_s
    slowest = pruning.objective.slowest_s(stage, before)
    beaten = pruning.objective.total_s(delay + later_s, slowest) >= pruning.cutoff_s
    beaten |= ~fits | ((starts + r[:, None])[..., None] > np.minimum(pruning.most[nearest : stop + 1], width))
    beaten |= np.arange(nearest, stop + 1) > pruning.stops[options, i][:, None, None]
    if beaten.all():
        return
    path = before.path_s + stage.forward_s
    for known, seconds in ((parts.path_s, path), (parts.delay_s, delay), (parts.slowest_s, slowest)):
        least = np.where(beaten, np.inf, seconds)
        for count in np.unique(r).tolist():
            room = max(0, min(high, width - count) - low + 1)
            target = known[new, nearest : stop + 1, low + count : low + count + room]
            np.minimum(target, least[:, r == count, :room].min(axis=1).swapaxes(1, 2), out=target)


_ROUNDING = 1e-9
"""Relative slack for rounding when a cutoff is tested."""


@dataclass(eq=False)
class FeasibilityTest:
    """Tests whether a problem may have a decision below a cutoff; O(R n^2) to prepare for any number of cutoffs.

    Attributes:
        needs: lower bounds on time and memory of stages.
        objective: the time that decisions are compared by.
        schedule: name of the schedule.
        devices: devices of the copy.
        micro_batches: micro-batches of the copy.
        replicas: int64 [R], numbers of replicas that a stage may have, ascending.
        sync_s: float64 [R], least latency of synchronising a stage, in seconds.
        sync_s_per_element: float64 [R], least further time per parameter.
        pass_terms: float64 [R, 2] least seconds a block and a parameter of the exchanges in a forward, and the same of
            those in a backward pass; None if there are none.
        update_share: float64 [R], fraction of the optimizer step that one replica takes.
        overlap: fraction of a pass behind which its exchanges hide, and of a backward behind which the others do.
    """

    needs: StageNeeds
    objective: TimeObjective
    schedule: str
    devices: int
    micro_batches: int
    replicas: np.ndarray
    sync_s: np.ndarray
    sync_s_per_element: np.ndarray
    pass_terms: tuple[np.ndarray, np.ndarray] | None
    update_share: np.ndarray
    overlap: float

    def __post_init__(self) -> None:
        needs, column = self.needs, (slice(None), None, None)
        turns = self.micro_batches // self.replicas[column]
        sync_s = self.sync_s[column] + self.sync_s_per_element[column] * needs.elements
        sync_s = np.where(needs.elements > 0, sync_s, 0.0)
        step_s = self.update_share[column] * needs.update_s
        end_s = np.maximum(sync_s - self.overlap * needs.hiding_s, 0.0) + step_s
        self._least_s = self.objective.reach_s(turns, needs, list(self._turns_s()), end_s)
        tables = warm_up_tables(self.schedule, self.replicas, self.devices, self.micro_batches)
        self._in_flight, passing, self._filling = tables
        kept, which = np.unique(self._in_flight, return_inverse=True)
        self._kept: np.ndarray = np.asarray(which).reshape(self._in_flight.shape)
        self._fitting = needs.first_blocks(kept)
        self._passing = np.zeros(0, dtype=np.int64)
        if self.objective.counts_passing:
            self._passing = most_passing(self.replicas, passing, self.devices)[::-1]

    def _turns_s(self) -> Iterator[np.ndarray]:
        """[R or 1, n, n] least seconds of one micro-batch in a stage, by choice of recomputation.

        A pass takes its work and the part of its exchanges that this does not hide; both grow with every block.
        """
        needs, terms, shown = self.needs, self.pass_terms, 1 - self.overlap
        if terms is None:
            yield from ((needs.plain_s + repeat_s)[None] for repeat_s in needs.repeat_s)
            return
        out_s, back_s = (np.tensordot(each, needs.exchanged, axes=1) for each in terms)
        forward_s = np.maximum(needs.forward_s, out_s + shown * needs.forward_s)
        for repeat_s in needs.repeat_s:
            backward_s = needs.backward_s + repeat_s
            backward_s = np.maximum(backward_s, back_s + shown * backward_s)
            yield np.maximum(needs.plain_s + repeat_s, forward_s + backward_s)

    def possible(self, cutoff_s: float) -> bool:
        """True unless stages that are each fast enough cannot cover all blocks with the memory and devices of the copy.

        Greedy from the end: for each x, the last x devices take as many blocks as possible, which leaves the fewest
        blocks to the others. The micro-batches in flight follow from x. O(R n (n + devices)).
        """
        limit_s = cutoff_s * (1 + _ROUNDING)
        fast = [first_true(least_s <= limit_s) for least_s in self._least_s]
        n, options = self.needs.plain_s.shape[0], np.arange(len(self.replicas))
        first = np.full(self.devices + 1, n)
        for x in range(int(self.replicas[0]), self.devices + 1):
            count = int(np.searchsorted(self.replicas, x, side="right"))
            o, behind = options[:count], x - self.replicas[:count]
            last = first[behind] - 1
            kept = self._kept[o, np.minimum(behind, self._kept.shape[1] - 1)]
            start = functools.reduce(
                np.minimum,
                [np.maximum(f[o, last], fit[kept, last]) for f, fit in zip(fast, self._fitting, strict=True)],
            )
            if len(self._passing):
                start = np.maximum(start, self._after_wait(o, last, behind, limit_s))
            first[x] = min(first[x - 1], int(np.minimum(start, last + 1).min()))
            if first[x] == 0:
                return True
        return False

    def _after_wait(self, o: np.ndarray, last: np.ndarray, behind: np.ndarray, limit_s: float) -> np.ndarray:
        """First block of the longest stages below a time, with their transfers and the wait for the first gradient."""
        needs = self.needs
        later_s = needs.whole_s - np.append(needs.before_s, needs.whole_s)[last + 1]
        filling = self._filling[o, self._passing[behind]]
        wait_s = np.maximum(later_s[:, None] - filling[:, None] * needs.forward_s[last], 0.0)
        turns = (self.micro_batches // self.replicas[o])[:, None]
        return first_true(needs.before_s + turns * (needs.plain_s[last] + needs.transfer_s) + wait_s <= limit_s)

"""What the blocks before a cut cost at the least: bounds that tell the exact DP which partial decisions to forget.

Each of the three parts of an objective is minimised by a DP of its own, as if the other two did not matter.

Whether a problem can hold a decision faster than a cutoff, by compute, memory and synchronisation: a look before it
is solved.

Nothing here knows where stages lie: transfers are free, every stage runs on the fastest and the largest device, shards
what it can over all devices and synchronises where that is fastest.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from planner.solvers._objectives import NewStage, Objective, Prefix
from planner.solvers._stages import StageTables
from planner.space.formulate import warm_up_tables
from planner.space.problem import StageProblem
from planner.space.ranges import StageNeeds


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Least costs of blocks 0..p-1 on devices that end at a, [n + 1, W + 1]; infinite where no decision passes (p, a).

    Attributes:
        objective: what is minimised.
        path_s, delay_s, slowest_s: its parts, see `Prefix`.
    """

    objective: Objective
    path_s: np.ndarray
    delay_s: np.ndarray
    slowest_s: np.ndarray

    @property
    def bound_s(self) -> float:
        """No decision is faster; infinite when none is left."""
        return float(self.objective.total_s(self.delay_s[-1, -1], self.slowest_s[-1, -1]))

    def before(self, i: int, at: np.ndarray) -> Prefix:
        """The stages before block i on devices that end at some places."""
        return Prefix(self.path_s[i, at], self.delay_s[i, at], self.slowest_s[i, at])


@dataclass(frozen=True, eq=False)
class Band:
    """What a cutoff leaves possible, by compute alone.

    Attributes:
        first: [n + 1] least devices before a cut at p.
        last: [n + 1] most devices before it.
    """

    first: np.ndarray
    last: np.ndarray


def band(problem: StageProblem, tables: StageTables, objective: Objective, cutoff_s: float) -> Band:
    """The band of a cutoff; O(n)."""
    total = float(tables.least_s[-1])
    if math.isinf(cutoff_s):
        zeros = np.zeros(len(tables.least_s), dtype=np.int64)
        return Band(zeros, zeros + problem.slice_devices)
    before, after = tables.least_s, total - tables.least_s

    def devices(compute: np.ndarray) -> np.ndarray:
        available = objective.available_s(cutoff_s, total, compute)
        least = np.divide(problem.micro_batches * compute, available, out=np.zeros_like(compute), where=compute > 0)
        return np.asarray(np.ceil(least * (1 - 1e-9) - 1e-9), dtype=np.int64)

    return Band(devices(before), problem.slice_devices - devices(after))


def relax(problem: StageProblem, tables: StageTables, objective: Objective, cutoff_s: float) -> Relaxation:
    """Bounds for decisions faster than the cutoff; O(R n^2 W) at most, far less under a tight cutoff."""
    n, width = problem.blocks, problem.slice_devices
    parts = Prefix(*(np.full((n + 1, width + 1), np.inf) for _ in range(3)))
    parts.path_s[0] = parts.delay_s[0] = parts.slowest_s[0] = 0.0
    limits = band(problem, tables, objective, cutoff_s)
    stops = longest(problem, tables, objective, cutoff_s)
    cut = _Cut(objective, limits, most_passing(problem.replicas, problem.passing, width), stops, cutoff_s)
    alike = [np.flatnonzero(problem.replicas == count) for count in np.unique(problem.replicas)]
    for i in range(n):
        live = np.flatnonzero(np.isfinite(parts.delay_s[i]))
        live = live[(live >= limits.first[i]) & (live <= limits.last[i])]
        if len(live):
            for options in alike:
                _extend(problem, tables, parts, cut, i, options, live)
    return Relaxation(objective, parts.path_s, parts.delay_s, parts.slowest_s)


def longest(problem: StageProblem, tables: StageTables, objective: Objective, cutoff_s: float) -> np.ndarray:
    """[R, n] one past the last block of the longest stage from block i with replicas[o] that keeps below a cutoff."""
    found = np.full((len(problem.replicas), problem.blocks), problem.blocks)
    if math.isinf(cutoff_s):
        return found
    total, before = float(tables.least_s[-1]), tables.least_s[:-1]
    for o, replicas in enumerate(problem.replicas.tolist()):
        most = before + objective.longest_s(cutoff_s, total, before, problem.micro_batches // replicas) * (1 + 1e-9)
        found[o] = np.minimum(problem.blocks, np.searchsorted(tables.least_s, most, side="right") - 1)
    return found


def most_passing(replicas: np.ndarray, passing: np.ndarray, devices: int) -> np.ndarray:
    """[W + 1] most micro-batches that can pass a stage that ends at a before its first backward, by the stages after
    it, which fill all W devices; O(R W).

    Args:
        replicas: int64 [R], what a stage may have.
        passing: int64 [R, X + 1], see `StageProblem`.
        devices: W.
    """
    found = np.zeros(devices + 1, dtype=np.int64)
    for a in range(devices - 1, -1, -1):
        fits = np.flatnonzero(replicas <= devices - a)
        found[a] = passing[fits, found[a + replicas[fits]]].max(initial=0)
    return found


@dataclass(frozen=True, eq=False)
class _Cut:
    """What decides which stages are left out: an objective's cutoff, its band, what can pass by place, and the longest
    stages (`longest`)."""

    objective: Objective
    limits: Band
    passing: np.ndarray
    stops: np.ndarray
    cutoff_s: float


def _extend(
    problem: StageProblem,
    tables: StageTables,
    parts: Prefix,
    cut: _Cut,
    i: int,
    options: np.ndarray,
    live: np.ndarray,
) -> None:
    """Add all stages of blocks i..j, any j before the longest one's stop, in some options of as many replicas.

    Arrays are of shape [options, places, stops].
    """
    r, width, stop = int(problem.replicas[options[0]]), problem.slice_devices, int(cut.stops[options, i].max())
    low, high = int(live[0]), min(int(live[-1]), width - r)
    if stop <= i or high < low:
        return
    at, o = np.arange(low, high + 1), options[:, None]
    later = np.minimum(width - at - r, problem.in_flight.shape[1] - 1)
    forward, work, end = tables.choose(problem.place[o, at], i, slice(i, stop), problem.in_flight[o, later][..., None])
    if i == 0 and stop > 1:
        several = np.arange(stop) < problem.blocks - 1
        end = end + np.where(several, tables.tied_s[o, at][..., None], 0.0)
    receive, back, both = (t[o, at, i][..., None] for t in (tables.receive_s, tables.return_s, tables.transfer_s))
    here = slice(low, high + 1)
    before = Prefix(*(part[i, here][:, None] for part in (parts.path_s, parts.delay_s, parts.slowest_s)))
    rest_s = (tables.least_s[-1] - tables.least_s[i + 1 : stop + 1])[None, :]
    most = cut.passing[at + r]
    fits = np.isfinite(work)
    stage = NewStage(
        replicas=r,
        turns=problem.micro_batches // r,
        first=i == 0,
        forward_s=forward + receive,
        backward_s=np.where(fits, work, 0.0) - forward + back,
        work_s=work + both,
        end_s=end,
        later_s=rest_s,
        in_flight=problem.in_flight[o, most][..., None],
        filling=problem.filling[o, most][..., None],
    )
    delay = np.maximum(before.delay_s, before.path_s + end) + stage.work_s
    slowest = cut.objective.slowest_s(stage, before)
    beaten = cut.objective.total_s(delay + rest_s, slowest) >= cut.cutoff_s
    beaten |= ~fits | ((at + r)[:, None] > cut.limits.last[i + 1 : stop + 1])
    beaten |= np.arange(i + 1, stop + 1) > cut.stops[options, i][:, None, None]
    targets = (slice(i + 1, stop + 1), slice(low + r, high + r + 1))
    for old, new in (
        (parts.path_s, before.path_s + stage.forward_s),
        (parts.delay_s, delay),
        (parts.slowest_s, slowest),
    ):
        np.minimum(old[targets], np.where(beaten, np.inf, new).min(axis=0).T, out=old[targets])


_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Share:
    """What one copy of the pipeline has to work with.

    Attributes:
        schedule: name of the schedule.
        devices: devices of the copy.
        micro_batches: micro-batches of the copy.
        replicas: int64 [R], what a stage may have, ascending.
        sync_s: [R] seconds that synchronising a stage takes at the least, without its bytes.
        sync_s_per_element: [R] and for each of its parameters.
        update_share: [R] part of the optimizer step that one replica takes.
        overlap: fraction of a backward behind which synchronisation hides.
    """

    schedule: str
    devices: int
    micro_batches: int
    replicas: np.ndarray
    sync_s: np.ndarray
    sync_s_per_element: np.ndarray
    update_share: np.ndarray
    overlap: float


class Reach:
    """Least times of one problem by an objective, to be held against any number of cutoffs; O(R n^2) to prepare."""

    def __init__(self, needs: StageNeeds, share: Share, objective: Objective) -> None:
        self._needs, self._share = needs, share
        column = (slice(None), None, None)
        turns = share.micro_batches // share.replicas[column]
        sync_s = share.sync_s[column] + share.sync_s_per_element[column] * needs.elements
        sync_s = np.where(needs.elements > 0, sync_s, 0.0)
        step_s = share.update_share[column] * needs.update_s
        end_s = np.maximum(sync_s - share.overlap * needs.hiding_s, 0.0) + step_s
        self._least_s = objective.reach_s(turns, needs, end_s)
        tables = warm_up_tables(share.schedule, share.replicas, share.devices, share.micro_batches)
        self._in_flight, passing, self._filling = tables
        kept, which = np.unique(self._in_flight, return_inverse=True)
        self._kept: np.ndarray = np.asarray(which).reshape(self._in_flight.shape)
        self._fitting = needs.first_blocks(kept)
        self._passing = np.zeros(0, dtype=np.int64)
        if objective.counts_passing:
            self._passing = most_passing(share.replicas, passing, share.devices)[::-1]

    def possible(self, cutoff_s: float) -> bool:
        """Whether stages that are fast enough one by one fit in memory and take no more devices than there are.

        With x devices the last stages hold as many blocks as possible: fewer blocks before them are served by the
        others no worse, and x is what their micro-batches in flight are counted from. O(R n (n + devices)).
        """
        share, needs = self._share, self._needs
        most_s = cutoff_s * (1 + _ROUNDING)
        fast = [_first(least_s <= most_s) for least_s in self._least_s]
        n, options = needs.plain_s.shape[0], np.arange(len(share.replicas))
        first = np.full(share.devices + 1, n)
        for x in range(int(share.replicas[0]), share.devices + 1):
            count = int(np.searchsorted(share.replicas, x, side="right"))
            o, behind = options[:count], x - share.replicas[:count]
            last = first[behind] - 1
            kept = self._kept[o, np.minimum(behind, self._kept.shape[1] - 1)]
            start = functools.reduce(
                np.minimum,
                [np.maximum(f[o, last], fit[kept, last]) for f, fit in zip(fast, self._fitting, strict=True)],
            )
            if len(self._passing):
                start = np.maximum(start, self._after_wait(o, last, behind, most_s))
            first[x] = min(first[x - 1], int(np.minimum(start, last + 1).min()))
            if first[x] == 0:
                return True
        return False

    def _after_wait(self, o: np.ndarray, last: np.ndarray, behind: np.ndarray, most_s: float) -> np.ndarray:
        """First block of the longest stages that keep below a time with their transfers and the wait for the first
        gradient."""
        needs = self._needs
        later_s = needs.whole_s - np.append(needs.before_s, needs.whole_s)[last + 1]
        filling = self._filling[o, self._passing[behind]]
        wait_s = np.maximum(later_s[:, None] - filling[:, None] * needs.forward_s[last], 0.0)
        turns = (self._share.micro_batches // self._share.replicas[o])[:, None]
        return _first(needs.before_s + turns * (needs.plain_s[last] + needs.transfer_s) + wait_s <= most_s)


def _first(holds: np.ndarray) -> np.ndarray:
    """Index of the first true along the last axis; its length where there is none."""
    return np.asarray(np.where(holds.any(axis=-1), holds.argmax(axis=-1), holds.shape[-1]))

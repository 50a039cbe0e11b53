"""What the blocks before a cut cost at the least: bounds that tell the exact DP which partial decisions to forget.

Each of the three parts of an objective is minimised by a DP of its own, as if the other two did not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.solvers._objective import NewStage, Objective, Prefix
from planner.solvers._stages import StageTables
from planner.space.problem import StageProblem


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
    passing = most_passing(problem.replicas, problem.passing, width)
    for i in range(n):
        live = np.flatnonzero(np.isfinite(parts.delay_s[i]))
        live = live[(live >= limits.first[i]) & (live <= limits.last[i])]
        if len(live):
            for o in range(len(problem.replicas)):
                cut = _Cut(objective, limits, passing, cutoff_s)
                _extend(problem, tables, parts, cut, (i, int(stops[o, i])), o, live)
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
    """What decides which stages are left out: an objective's cutoff, its band, and what can pass by place."""

    objective: Objective
    limits: Band
    passing: np.ndarray
    cutoff_s: float


def _extend(
    problem: StageProblem,
    tables: StageTables,
    parts: Prefix,
    cut: _Cut,
    blocks: tuple[int, int],
    o: int,
    live: np.ndarray,
) -> None:
    """Add all stages of blocks i..j, any j before the longest one's stop, that have replicas[o]."""
    i, stop = blocks
    r, width = int(problem.replicas[o]), problem.slice_devices
    low, high = int(live[0]), min(int(live[-1]), width - r)
    if stop <= i or high < low:
        return
    at = np.arange(low, high + 1)
    later = np.minimum(width - at - r, problem.in_flight.shape[1] - 1)
    forward, work, end = tables.choose(problem.place[o, at], i, slice(i, stop), problem.in_flight[o, later][:, None])
    if i == 0 and stop > 1:
        several = np.arange(stop) < problem.blocks - 1
        end = end + np.where(several, tables.tied_s[o, at][:, None], 0.0)
    receive, back, both = (t[o, at, i][:, None] for t in (tables.receive_s, tables.return_s, tables.transfer_s))
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
        in_flight=problem.in_flight[o, most][:, None],
        filling=problem.filling[o, most][:, None],
    )
    delay = np.maximum(before.delay_s, before.path_s + end) + stage.work_s
    slowest = cut.objective.slowest_s(stage, before)
    beaten = cut.objective.total_s(delay + rest_s, slowest) >= cut.cutoff_s
    beaten |= ~fits | ((at + r)[:, None] > cut.limits.last[i + 1 : stop + 1])
    targets = (slice(i + 1, stop + 1), slice(low + r, high + r + 1))
    for old, new in (
        (parts.path_s, before.path_s + stage.forward_s),
        (parts.delay_s, delay),
        (parts.slowest_s, slowest),
    ):
        np.minimum(old[targets], np.where(beaten, np.inf, new).T, out=old[targets])

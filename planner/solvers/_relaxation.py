"""What the blocks before a cut cost at the least: bounds that tell the exact DP which partial decisions to forget.

Each of the three parts of the objective is minimised by a DP of its own, as if the other two did not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from planner.solvers._stages import StageTables
from planner.space.problem import StageProblem


@dataclass(frozen=True, eq=False)
class Relaxation:
    """Least costs of blocks 0..p-1 on devices that end at a, [n + 1, W + 1]; infinite where no decision passes (p, a).

    Attributes:
        path_s: forward passes and transfers in, up to the cut: what the first micro-batch needs to get there.
        delay_s: longest of: all work of one micro-batch before the cut, and any path that ends with a stage's end
            there.
        pace_s: largest (m_i - 1) t_i.
    """

    path_s: np.ndarray
    delay_s: np.ndarray
    pace_s: np.ndarray

    @property
    def bound_s(self) -> float:
        """No decision is faster; infinite when none is left."""
        return float(self.delay_s[-1, -1] + self.pace_s[-1, -1])


@dataclass(frozen=True, eq=False)
class Band:
    """What a cutoff leaves possible, by compute alone.

    With all stages' (m/r - 1) t at most `pace_s`, blocks of compute C need at least m C / (pace_s + C) devices: r
    devices take at most pace_s r / (m - r).

    Attributes:
        pace_s: largest (m_i - 1) t_i of a decision faster than the cutoff.
        first: [n + 1] least devices before a cut at p.
        last: [n + 1] most devices before it.
    """

    pace_s: float
    first: np.ndarray
    last: np.ndarray


def band(problem: StageProblem, tables: StageTables, cutoff_s: float) -> Band:
    """The band of a cutoff; O(n)."""
    total = float(tables.least_s[-1])
    pace = max(0.0, cutoff_s - total)
    if math.isinf(pace):
        zeros = np.zeros(len(tables.least_s), dtype=np.int64)
        return Band(pace, zeros, zeros + problem.slice_devices)
    before, after = tables.least_s, total - tables.least_s

    def devices(compute: np.ndarray) -> np.ndarray:
        least = np.divide(
            problem.micro_batches * compute, pace + compute, out=np.zeros_like(compute), where=compute > 0
        )
        return np.asarray(np.ceil(least * (1 - 1e-9) - 1e-9), dtype=np.int64)

    return Band(pace, devices(before), problem.slice_devices - devices(after))


def relax(problem: StageProblem, tables: StageTables, cutoff_s: float) -> Relaxation:
    """Bounds for decisions faster than the cutoff; O(R n^2 W) at most, far less under a tight cutoff."""
    n, width = problem.blocks, problem.slice_devices
    path, delay, pace = (np.full((n + 1, width + 1), np.inf) for _ in range(3))
    path[0] = delay[0] = pace[0] = 0.0
    limits = band(problem, tables, cutoff_s)
    rest_s = tables.least_s[-1] - tables.least_s
    stops = longest(problem, tables, limits)
    for i in range(n):
        live = np.flatnonzero(np.isfinite(delay[i]))
        live = live[(live >= limits.first[i]) & (live <= limits.last[i])]
        if len(live):
            for o in range(len(problem.replicas)):
                stop = int(stops[o, i])
                _extend(problem, tables, (path, delay, pace), (limits, rest_s, cutoff_s), (i, stop), o, live)
    return Relaxation(path, delay, pace)


def longest(problem: StageProblem, tables: StageTables, limits: Band) -> np.ndarray:
    """[R, n] one past the last block of the longest stage from block i with replicas[o] that keeps the pace."""
    found = np.full((len(problem.replicas), problem.blocks), problem.blocks)
    for o, replicas in enumerate(problem.replicas.tolist()):
        turns = problem.micro_batches // replicas - 1
        if turns and not math.isinf(limits.pace_s):
            most = tables.least_s[:-1] + limits.pace_s / turns * (1 + 1e-9)
            found[o] = np.minimum(problem.blocks, np.searchsorted(tables.least_s, most, side="right") - 1)
    return found


def _extend(
    problem: StageProblem,
    tables: StageTables,
    parts: tuple[np.ndarray, np.ndarray, np.ndarray],
    cut: tuple[Band, np.ndarray, float],
    blocks: tuple[int, int],
    o: int,
    live: np.ndarray,
) -> None:
    """Add all stages of blocks i..j, any j before the longest one's stop, that have replicas[o]."""
    i, stop = blocks
    path, delay, pace = parts
    limits, rest_s, cutoff_s = cut
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
    receive, transfer = tables.receive_s[o, at, i][:, None], tables.transfer_s[o, at, i][:, None]
    before = slice(low, high + 1)
    total = work + transfer
    turns = problem.micro_batches // r - 1
    new_pace = np.broadcast_to(pace[i, before][:, None], total.shape)
    if turns:
        new_pace = np.maximum(new_pace, turns * total)
    new_delay = np.maximum(delay[i, before][:, None], path[i, before][:, None] + end) + total
    beaten = new_delay + new_pace + rest_s[i + 1 : stop + 1] >= cutoff_s
    beaten |= (at + r)[:, None] > limits.last[i + 1 : stop + 1]
    new_path = np.where(beaten, np.inf, path[i, before][:, None] + forward + receive)
    targets = (slice(i + 1, stop + 1), slice(low + r, high + r + 1))
    for old, new in (
        (path, new_path),
        (delay, np.where(beaten, np.inf, new_delay)),
        (pace, np.where(beaten, np.inf, new_pace)),
    ):
        np.minimum(old[targets], new.T, out=old[targets])

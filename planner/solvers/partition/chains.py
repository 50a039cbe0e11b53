"""What searches over chains of stages share: sums of runs of layers, the least slowest stage, the least longest one."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterable

import numpy as np

from planner.solvers.partition import Deadline

_EXACT = 2.0**53
"""Whole numbers up to here are floats, and so are their sums and differences."""


def run_sums(figures: np.ndarray) -> np.ndarray:
    """Sums over all runs of a chain, each rounded once, so that they are to the last bit what a judge's `fsum` gives.

    float64 [n + 1, n + 1]: entry (i, j) is `math.fsum(figures[i:j])`; with i > j it is minus the sum of j..i.

    Args:
        figures: float64 [n] finite.

    Complexity: O(n^2); vectorised for whole numbers such as bytes, n^2 divisions of long integers for others.
    """
    return _run_sums(np.ascontiguousarray(figures, dtype=np.float64).tobytes())


@functools.lru_cache(maxsize=64)
def _run_sums(content: bytes) -> np.ndarray:
    figures = np.frombuffer(content, dtype=np.float64)
    if (figures == np.rint(figures)).all() and np.abs(figures).sum() < _EXACT:
        return prefix_differences(figures)
    ratios = [value.as_integer_ratio() for value in figures.tolist()]
    unit = max(denominator for _, denominator in ratios)
    whole = [numerator * (unit // denominator) for numerator, denominator in ratios]
    sums = np.zeros((len(whole) + 1,) * 2)
    before = list(itertools.accumulate(whole, initial=0))
    for i, start in enumerate(before):
        # The quotient of two integers is rounded once, as fsum is.
        sums[i, i + 1 :] = [(stop - start) / unit for stop in before[i + 1 :]]
    return np.asarray(sums - sums.T)


STEP = 1e-12
"""Relative improvement too small to look for."""


def prefix_differences(figures: np.ndarray) -> np.ndarray:
    """float64 [n + 1, n + 1]: entry (i, j) is about the sum of figures i..j-1, rounded as prefix sums are; O(n^2)."""
    total = np.concatenate([[0.0], np.cumsum(figures)])
    return np.asarray(total[None, :] - total[:, None])


def real_runs(layers: int) -> np.ndarray:
    """bool [layers + 1, layers + 1] whether entry (i, j) is a run of layers i..j-1, one at least."""
    marks = np.arange(layers + 1)
    return marks[:, None] < marks[None, :]


def least_slowest(stages: Iterable[np.ndarray], deadline: Deadline) -> tuple[float, list[int]]:
    """The cut of a chain into stages whose slowest is fastest: its time, and its boundaries as positions.

    Args:
        stages: by stage, float64 [marks, marks] its time from one mark to another; infinite where that is no stage.
        deadline: when to stop.

    Returns:
        the slowest stage (infinite when there is no cut) and the positions of the boundaries among the marks, first
        and last included.

    Raises:
        OutOfTime: the deadline passed.

    Complexity: O(stages * marks^2), vectorised.
    """
    best: np.ndarray | None = None
    choices: list[np.ndarray] = []
    for times in stages:
        deadline.check()
        through = times[:1] if best is None else np.maximum(best[:, None], times)
        choices.append(through.argmin(axis=0))
        best = through.min(axis=0)
    if best is None:
        return math.inf, []
    at = [len(best) - 1]
    for choice in reversed(choices):
        at.append(int(choice[at[-1]]))
    return float(best[-1]), at[::-1]


class LongestStage:
    """Minimise a sum of stage times plus a weight times the longest of them, by branching on the longest.

    Let g(T) be the least sum when no stage takes more than T. A plan with longest stage m has a sum of at least g(m),
    so g(T) + weight * a bounds all plans with their longest stage in [a, T]; and the plan behind g(T), whose longest
    stage is m, settles all of [m, T] at once. Ranges of T are split, best bound first, until none can beat the plan
    found.

    Args:
        values: all values the longest stage can take, ascending.
        weight: of the longest stage.
        incumbent: objective of a plan known already.
    """

    def __init__(self, values: np.ndarray, weight: float, incumbent: float = float("inf")) -> None:
        self.values = values
        self.weight = weight
        self.incumbent = incumbent
        self._ranges: list[tuple[float, int, int, float]] = []  # bound, first value, last value, least sum
        self._current = (0, -1, -1, 0.0)
        self._begun = False
        self._push(0, len(values) - 1, 0.0)

    @property
    def bound(self) -> float:
        """What no plan beats, as far as settled."""
        done = self.incumbent * (1 - STEP) if np.isfinite(self.incumbent) else np.inf
        return min(done, self._ranges[0][0]) if self._ranges else done

    def next_cap(self) -> tuple[float, float] | None:
        """A cap to find the least sum for, and the sum from which on it is of no use; None when all is settled."""
        while self._ranges:
            _, first, last, least = heapq.heappop(self._ranges)
            shortest = float(self.values[first])
            if least + self.weight * shortest >= self.incumbent * (1 - STEP):
                continue
            if np.isfinite(self.incumbent) and self.weight:
                longest = (self.incumbent - least) / self.weight
                last = min(last, int(np.searchsorted(self.values, longest, side="right")) - 1)
            if last < first:
                continue
            cap_at = last  # at first without a cap: whether there is any plan, and what its longest stage is
            if self._begun:
                middle = (shortest + float(self.values[last])) / 2
                cap_at = min(max(int(np.searchsorted(self.values, middle, side="right")) - 1, first), last)
            self._begun = True
            self._current = (first, cap_at, last, least)
            return float(self.values[cap_at]), self.incumbent - self.weight * shortest
        return None

    def settle(self, least_sum: float, longest: float) -> None:
        """Say what was found under the last cap: the least sum and the longest stage of its plan; infinite if none."""
        first, cap_at, last, before = self._current
        if np.isfinite(least_sum):
            self.incumbent = min(self.incumbent, least_sum + self.weight * longest)
            self._push(first, int(np.searchsorted(self.values, longest)) - 1, least_sum)
        self._push(cap_at + 1, last, before)

    def _push(self, first: int, last: int, least_sum: float) -> None:
        if first > last:
            return
        bound = least_sum + self.weight * float(self.values[first])
        if bound < self.incumbent * (1 - STEP):
            heapq.heappush(self._ranges, (bound, first, last, least_sum))

"""The least sum of stage times plus a weight times the longest of them."""

from __future__ import annotations

import heapq

import numpy as np

STEP = 1e-12
"""Relative improvement too small to look for."""


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

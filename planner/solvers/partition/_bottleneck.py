"""Branch and bound on a bottleneck: the outer search of the solvers of iteration time and of chains."""

from __future__ import annotations

import heapq

import numpy as np

STEP = 1e-12
"""Relative improvements below this are not searched for."""


class BottleneckSearch:
    """Minimise a sum plus a weight times a bottleneck (the longest stage, or the longest pause) by branching on it.

    Let g(T) be the least sum if the bottleneck is at most T. All plans with a bottleneck in [a, T] have an objective of
    at least g(T) + weight * a. If the plan behind g(T) has the bottleneck m, it is the best of all plans with a
    bottleneck in [m, T]. Ranges of T are split, lowest bound first, until no bound is below the best objective.

    Args:
        values: all values that the bottleneck can take, ascending.
        weight: of the bottleneck.
        incumbent: objective of a known plan.
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
        """Lower bound on the objective of every plan."""
        solved_bound = self.incumbent * (1 - STEP) if np.isfinite(self.incumbent) else np.inf
        return min(solved_bound, self._ranges[0][0]) if self._ranges else solved_bound

    def next_cap(self) -> tuple[float, float] | None:
        """A cap to compute the least sum for, and the sum from which on it is useless; None when no range is left."""
        while self._ranges:
            _, first, last, least_sum = heapq.heappop(self._ranges)
            smallest = float(self.values[first])
            if least_sum + self.weight * smallest >= self.incumbent * (1 - STEP):
                continue
            if np.isfinite(self.incumbent) and self.weight:
                largest = (self.incumbent - least_sum) / self.weight
                last = min(last, int(np.searchsorted(self.values, largest, side="right")) - 1)
            if last < first:
                continue
            cap_at = last  # the first pass has no cap: is there any plan, and what is its bottleneck?
            if self._begun:
                middle = (smallest + float(self.values[last])) / 2
                cap_at = min(max(int(np.searchsorted(self.values, middle, side="right")) - 1, first), last)
            self._begun = True
            self._current = (first, cap_at, last, least_sum)
            return float(self.values[cap_at]), self.incumbent - self.weight * smallest
        return None

    def settle(self, least_sum: float, bottleneck: float) -> None:
        """Take the least sum under the last cap and the bottleneck of its plan; both infinite if there is none."""
        first, cap_at, last, before = self._current
        if np.isfinite(least_sum):
            self.incumbent = min(self.incumbent, least_sum + self.weight * bottleneck)
            self._push(first, int(np.searchsorted(self.values, bottleneck)) - 1, least_sum)
        self._push(cap_at + 1, last, before)

    def _push(self, first: int, last: int, least_sum: float) -> None:
        if first > last:
            return
        bound = least_sum + self.weight * float(self.values[first])
        if bound < self.incumbent * (1 - STEP):
            heapq.heappush(self._ranges, (bound, first, last, least_sum))

"""`ChainStages` exactly: the best stages and devices of each pipeline, by a chain DP.

For each pipeline, a DP over (devices used, type of the last one, layers placed) minimises the largest pace under the
memory. If transfers also pause the pipeline, the DP runs with a limit on the pause, and `BottleneckSearch` branches on
that limit to minimise the largest pace plus the largest pause.

Sums over runs of layers equal the judge's `fsum` to the last bit.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from planner.memory import fits
from planner.solvers.partition import PARTITION_SOLVERS, Deadline, PartitionSolver, Search
from planner.space.partition import ChainDecision, ChainStages, Pipeline

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


_EXACT = 2.0**53
"""Sums and differences of integers up to here are exact in floats."""


def run_sums(figures: np.ndarray) -> np.ndarray:
    """Sums over all runs of a chain, each rounded once, as `math.fsum` does.

    float64 [n + 1, n + 1]: entry (i, j) is `math.fsum(figures[i:j])`; with i > j it is minus the sum of j..i.

    Args:
        figures: float64 [n] finite.

    Complexity: O(n^2); vectorised for whole numbers such as bytes, n^2 fractions for others.
    """
    return _run_sums(np.ascontiguousarray(figures, dtype=np.float64).tobytes())


@functools.lru_cache(maxsize=64)
def _run_sums(content: bytes) -> np.ndarray:
    figures = np.frombuffer(content, dtype=np.float64)
    if (figures == np.rint(figures)).all() and np.abs(figures).sum() < _EXACT:
        return prefix_differences(figures)
    # A fraction is rounded once as a float, as fsum is.
    before = list(itertools.accumulate(map(Fraction, figures.tolist()), initial=Fraction(0)))
    return np.array([[float(stop - start) for stop in before] for start in before])


def prefix_differences(figures: np.ndarray) -> np.ndarray:
    """float64 [n + 1, n + 1]: entry (i, j) is about the sum of figures i..j-1, rounded as prefix sums are; O(n^2)."""
    total = np.concatenate([[0.0], np.cumsum(figures)])
    return np.asarray(total[None, :] - total[:, None])


_SLACK = 1 + 1e-12
State = tuple[tuple[int, ...], int]
"""Devices used of each type and type of the last one; for a given line of devices, (place,) and its type."""
Cut = tuple[float, tuple[int, ...], tuple[int, ...]]
"""The largest pace, the boundaries, the types of the devices."""


def solve_chain(search: Search) -> None:
    """Find the best plan over all pipelines and prove it; pipelines that cannot be better are skipped."""
    problem: ChainStages = search.problem
    search.space = "stages in line"
    for points, pipeline in enumerate(problem.pipelines, start=1):
        search.deadline.check()
        _offer_best(search, pipeline)
        search.count(points=points)
    search.prove(search.objective)


def _offer_best(search: Search, pipeline: Pipeline) -> None:
    """Offer plans of a pipeline, the best of them included, unless none is better than the best plan so far."""
    problem: ChainStages = search.problem
    stages = pipeline.stages
    if stages > problem.layers:
        return
    if pipeline.rounds * float(problem.compute_s.min(axis=0).sum()) / stages >= search.objective * _SLACK:
        return
    tables = _Tables(problem, pipeline, search.deadline)
    pauses = np.unique(tables.pause[tables.real]) if pipeline.stops else np.zeros(1)
    limits = BottleneckSearch(pauses, 1.0, search.objective)
    while (step := limits.next_cap()) is not None:
        pace, marks, types = tables.split(step[0]) or (math.inf, (), ())
        if marks:
            search.offer(ChainDecision(marks, pipeline, types))
        limits.settle(pace, step[0])


class _Tables:
    """[n + 1, n + 1] pace, pause and memory of all runs of layers (start, stop) in one pipeline."""

    def __init__(self, problem: ChainStages, pipeline: Pipeline, deadline: Deadline) -> None:
        self.problem, self.pipeline, self.deadline = problem, pipeline, deadline
        marks = np.arange(problem.layers + 1)
        self.real = marks[:, None] < marks
        self.weights, self.saved = run_sums(problem.weight_bytes), run_sums(problem.saved_bytes)
        self.crossing = problem.boundary_bytes.copy()
        self.crossing[0] = self.crossing[-1] = 0.0
        self.work = [prefix_differences(compute_s) for compute_s in problem.compute_s]
        self.pause = np.broadcast_to(self._priced(0, -1, pipeline.line[0] if pipeline.line else 0)[1], self.real.shape)
        self._stages: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def _priced(self, place: int, last: int, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Pace and pause of every run as the stage at a place; `last` is the device type before it, -1 for none."""
        line, rates = self.pipeline.line, self.problem.bandwidth_byte_per_s
        behind = line[place + 1] if place + 1 < len(line) else kind
        entering = self.crossing[:, None] / rates[last if last >= 0 else kind, kind]
        return self.pipeline.pace_and_pause(self.work[kind], entering, self.crossing[None, :] / rates[kind, behind])

    def _stage(self, place: int, last: int, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Pace (infinite where it does not fit) and pause of every run as the stage at a place; cached."""
        if (place, last, kind) not in self._stages:
            needed = self.pipeline.kept_bytes(place, self.weights, self.saved)
            within = self.real & fits(needed, float(self.problem.memory_bytes[kind]))
            pace, pause = self._priced(place, last, kind)
            self._stages[place, last, kind] = np.where(within, pace, np.inf), pause
        return self._stages[place, last, kind]

    def _states(self) -> Iterator[tuple[State, list[State]]]:
        """States in the order of devices used, each with its predecessors; none for a first stage."""
        if self.pipeline.line:
            line: list[State] = [((place,), kind) for place, kind in enumerate(self.pipeline.line)]
            yield from ((state, line[max(place - 1, 0) : place]) for place, state in enumerate(line))
            return
        counts = self.problem.counts
        multisets = itertools.product(*(range(count + 1) for count in counts))
        for used in sorted((u for u in multisets if 1 <= sum(u) <= self.pipeline.stages), key=lambda u: (sum(u), u)):
            for kind in (k for k, count in enumerate(used) if count):
                before = tuple(count - (i == kind) for i, count in enumerate(used))
                yield (used, kind), [(before, last) for last, count in enumerate(before) if count]

    def split(self, most_pause: float) -> Cut | None:
        """The cut with the least largest pace if no pause exceeds a limit; None if there is none."""
        best: dict[State, np.ndarray] = {}
        origin: dict[State, tuple[list[State], np.ndarray, np.ndarray]] = {}
        place_of: dict[State, int] = {}
        for state, before in self._states():
            self.deadline.check()
            place = place_of[state] = place_of[before[0]] + 1 if before else 0
            stages = [self._stage(place, last, state[1]) for _, last in before or [((), -1)]]
            stage_times = np.stack([np.where(pause <= most_pause * _SLACK, pace, np.inf) for pace, pause in stages])
            if before:
                stage_times = np.maximum(np.stack([best[b] for b in before])[:, :, None], stage_times)
            else:
                stage_times[:, 1:] = np.inf
            predecessor = stage_times.argmin(axis=0)
            least_s = stage_times.min(axis=0)
            cut = least_s.argmin(axis=0)
            best[state] = least_s.min(axis=0)
            origin[state] = before, cut, predecessor[cut, np.arange(len(cut))]
        ends = [
            (float(best[state][-1]), state) for state, place in place_of.items() if place + 1 == self.pipeline.stages
        ]
        slowest, state = min(ends)
        if math.isinf(slowest):
            return None
        marks, types = [self.problem.layers], [state[1]]
        while origin[state][0]:
            before, cut, predecessor = origin[state]
            state = before[int(predecessor[marks[-1]])]
            marks.append(int(cut[marks[-1]]))
            types.append(state[1])
        return slowest, (0, *reversed(marks)), () if self.pipeline.line else tuple(reversed(types))


PARTITION_SOLVERS.register("chain-dp", PartitionSolver(ChainStages, solve_chain))

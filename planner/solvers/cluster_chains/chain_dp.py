"""`ChainStages` exactly: the best stages and devices of each pipeline, by a chain DP.

For each pipeline, `FastestLine` over (devices used, type of the last one) minimises the largest pace under the memory.
If transfers also pause the pipeline, the DP runs with a limit on the pause, and `search_bottlenecks` branches on that
limit to minimise the largest pace plus the largest pause.

Sums over runs of layers equal the judge's `fsum` to the last bit.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np

from planner.memory import fits
from planner.solvers.cluster_chains.chain import ChainDecision, ChainPipeline, ChainStages
from planner.solvers.cluster_chains.search import SearchState
from planner.sums import float_sum

STEP = 1e-12
"""Relative improvements below this are not searched for."""


def search_bottlenecks(
    values: np.ndarray,
    weight: float,
    best: float,
    solve: Callable[[float, float], tuple[float, float]],
    prove: Callable[[float], None] = lambda _: None,
) -> None:
    """Minimise a sum plus a weight times a bottleneck (the longest stage, or the longest pause) by branching on it.

    Let g(T) be the least sum if the bottleneck is at most T. All plans with a bottleneck in [a, T] have an objective of
    at least g(T) + weight * a. If the plan behind g(T) has the bottleneck m, it is the best of all plans with a
    bottleneck in [m, T]. Ranges of T are split, lowest bound first, until no bound is below the best objective.

    Args:
        values: all values that the bottleneck can take, ascending.
        weight: of the bottleneck.
        best: objective of a known plan.
        solve: offers the plan with the least sum under a cap on the bottleneck, and returns its sum and bottleneck;
            infinite if there is no such plan, or none whose sum is below the second argument.
        prove: called with lower bounds on the objective of every plan.
    """
    ranges = [(weight * float(values[0]), 0, len(values) - 1, 0.0)] if len(values) else []
    begun = False
    while ranges and ranges[0][0] < best * (1 - STEP):
        prove(ranges[0][0])
        _, first, last, least_sum = heapq.heappop(ranges)
        smallest = float(values[first])
        if math.isfinite(best) and weight:
            last = min(last, int(np.searchsorted(values, (best - least_sum) / weight, side="right")) - 1)
        if last < first:
            continue
        middle = (smallest + float(values[last])) / 2
        cap_at = min(max(int(np.searchsorted(values, middle, side="right")) - 1, first), last) if begun else last
        begun = True  # the first pass has no cap: is there any plan, and what is its bottleneck?
        least, bottleneck = solve(float(values[cap_at]), best - weight * smallest)
        if math.isfinite(least):
            best = min(best, least + weight * bottleneck)
            below = int(np.searchsorted(values, bottleneck)) - 1
            heapq.heappush(ranges, (least + weight * smallest, first, below, least))
        if cap_at < last:
            heapq.heappush(ranges, (least_sum + weight * float(values[cap_at + 1]), cap_at + 1, last, least_sum))
    prove(best * (1 - STEP))


_SLACK = 1 + 1e-12
_EXACT = 2.0**53
"""Whole numbers below this are exact as floats."""

State = TypeVar("State", bound=Hashable)
Leading = Callable[[State], Iterable[tuple[State, np.ndarray]]]
"""The states before a state, each with the [n + 1, n + 1] times of the stages that lead from it."""


class FastestLine(Generic[State]):
    """The least largest time of stages in line between cuts, for each state: what was used so far.

    Args:
        start: state before the first stage.
        first: [rows, n + 1] 0 where a line may begin, else infinite; a row for each beginning.
        states: all others, in an order in which they can be reached.
        leading: entry (i, j) of a table of times is that of the stage between the cuts i and j.

    Attributes:
        best: by state, [rows, n + 1] least largest time of lines to each cut.

    O(rows n^2) for each state and state before it.
    """

    def __init__(self, start: State, first: np.ndarray, states: Iterable[State], leading: Leading[State]) -> None:
        self.best: dict[State, np.ndarray] = {start: first}
        self._start, self._leading = start, leading
        for state in states:
            best = np.full_like(first, np.inf)
            for before, seconds in leading(state):
                for row, times in enumerate(self.best[before]):
                    reached = np.flatnonzero(times < np.inf)
                    if len(reached):
                        begin, end = int(reached[0]), int(reached[-1]) + 1  # stages lead to later cuts only
                        totals = np.maximum(times[begin:end, None], seconds[begin:end, begin:]).min(axis=0)
                        np.minimum(best[row, begin:], totals, out=best[row, begin:])
            self.best[state] = best

    def path(self, state: State, row: int, stop: int) -> list[tuple[State, State, int, int]]:
        """States before and after each stage, and the cuts before and after it, for the line to a state and a cut.

        Of equal lines the one whose last stage comes first in `leading`, and then is longest.
        """
        stages = []
        while state != self._start:
            for before, seconds in self._leading(state):
                times = np.maximum(self.best[before][row], seconds[:, stop])
                at = int(times.argmin())
                if times[at] == self.best[state][row, stop]:
                    break
            else:
                raise RuntimeError("a figure of the table has no stage behind it")
            if at < stop:
                stages.append((before, state, at, stop))
            state, stop = before, at
        return stages[::-1]


def _run_sums(figures: np.ndarray) -> np.ndarray:
    """[n + 1, n + 1] `math.fsum(figures[i:j])` for i < j, else 0: to the last bit what the judge computes.

    O(n^2) for whole numbers, as bytes are, else O(n^3).
    """
    count, values = len(figures) + 1, figures.tolist()
    if float_sum(values) < _EXACT and all(map(float.is_integer, values)):
        total = np.concatenate([[0.0], np.cumsum(figures)])
        return np.triu(total - total[:, None])
    return np.array([[math.fsum(values[i:j]) for j in range(count)] for i in range(count)])


_Place = tuple[tuple[int, ...], int]
"""Devices used of each type and type of the last one (-1: none); for a given line of devices, (place,) and its type."""
_START: _Place = ((), -1)


def solve_chain(search: SearchState) -> None:
    """Find the best plan over all pipelines and prove it; pipelines that cannot be better are skipped."""
    problem: ChainStages = search.problem
    search.space = "stages in line"
    weights, saved = _run_sums(problem.weight_bytes), _run_sums(problem.saved_bytes)
    for points, pipeline in enumerate(problem.pipelines, start=1):
        search.deadline.check()
        if pipeline.stages <= problem.layers:
            _offer_best(search, _Stages(problem, pipeline, weights, saved))
        search.count(points=points)
    search.prove(search.objective)


def _offer_best(search: SearchState, stages: _Stages) -> None:
    """Offer plans of a pipeline, the best of them included, unless none is better than the best plan so far."""
    problem, pipeline = stages.problem, stages.pipeline
    if pipeline.rounds * float(problem.compute_s.min(axis=0).sum()) / pipeline.stages >= search.objective * _SLACK:
        return
    before = dict(stages.places())
    ends = [at for at in before if stages.place(at) == pipeline.stages]
    first = np.where(np.arange(problem.layers + 1)[None] == 0, 0.0, np.inf)

    def solve(most_pause: float, _: float) -> tuple[float, float]:
        search.deadline.check()
        line = FastestLine(_START, first, before, functools.partial(stages.leading, before, most_pause))
        pace, end = min((float(line.best[at][0, -1]), at) for at in ends)
        if math.isfinite(pace):
            path = line.path(end, 0, problem.layers)
            types = () if pipeline.line else tuple(kind for _, (_, kind), _, _ in path)
            search.offer(ChainDecision((0, *(stop for *_, stop in path)), pipeline, types))
        return pace, most_pause

    search_bottlenecks(stages.pauses(), 1.0, search.objective, solve)


class _Stages:
    """[n + 1, n + 1] pace and pause of all runs of layers (start, stop) in one pipeline, and the order of devices."""

    def __init__(self, problem: ChainStages, pipeline: ChainPipeline, weights: np.ndarray, saved: np.ndarray) -> None:
        self.problem, self.pipeline, self.weights, self.saved = problem, pipeline, weights, saved
        marks = np.arange(problem.layers + 1)
        self.real = marks[:, None] < marks
        self.crossing = problem.boundary_bytes.copy()
        self.crossing[0] = self.crossing[-1] = 0.0
        totals = np.cumsum(np.pad(problem.compute_s, ((0, 0), (1, 0))), axis=1)
        self.work = totals[:, None, :] - totals[:, :, None]
        self._priced: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def pauses(self) -> np.ndarray:
        """All values that the longest pause can take, ascending."""
        if not self.pipeline.stops:
            return np.zeros(1)
        _, pause = self._pace_and_pause(0, -1, self.pipeline.line[0] if self.pipeline.line else 0)
        return np.unique(np.broadcast_to(pause, self.real.shape)[self.real])

    def place(self, at: _Place) -> int:
        """Number of stages up to a place."""
        used, kind = at
        return 0 if kind < 0 else used[0] + 1 if self.pipeline.line else sum(used)

    def leading(
        self, places: Mapping[_Place, list[_Place]], most_pause: float, at: _Place
    ) -> Iterator[tuple[_Place, np.ndarray]]:
        """Places before a place, and the paces of stages whose pauses are up to a limit."""
        for last in places[at]:
            key = self.place(last), last[1], at[1]
            if key not in self._priced:
                self._priced[key] = self._within_memory(*key)
            pace, pause = self._priced[key]
            yield last, np.where(pause <= most_pause * _SLACK, pace, np.inf)

    def places(self) -> Iterator[tuple[_Place, list[_Place]]]:
        """Places in the order of devices used, each with those before it."""
        if self.pipeline.line:
            line = [_START, *(((place,), kind) for place, kind in enumerate(self.pipeline.line))]
            yield from ((after, [before]) for before, after in itertools.pairwise(line))
            return
        multisets: Iterator[tuple[int, ...]] = itertools.product(*(range(count + 1) for count in self.problem.counts))
        counted = sorted((sum(used), used) for used in multisets)
        for used in (used for count, used in counted if 1 <= count <= self.pipeline.stages):
            for kind in (k for k, count in enumerate(used) if count):
                before = tuple(count - (i == kind) for i, count in enumerate(used))
                yield (used, kind), [(before, last) for last, count in enumerate(before) if count] or [_START]

    def _pace_and_pause(self, place: int, last: int, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Of every run as the stage at a place; `last` is the device type before it, -1 for none."""
        line, rates = self.pipeline.line, self.problem.bandwidth_byte_per_s
        behind = line[place + 1] if place + 1 < len(line) else kind
        entering = self.crossing[:, None] / rates[last if last >= 0 else kind, kind]
        return self.pipeline.pace_and_pause(self.work[kind], entering, self.crossing[None, :] / rates[kind, behind])

    def _within_memory(self, place: int, last: int, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """`_pace_and_pause` with an infinite pace for runs that do not fit."""
        needed = self.pipeline.kept_bytes(place, self.weights, self.saved)
        within = self.real & fits(needed, float(self.problem.memory_bytes[kind]))
        pace, pause = self._pace_and_pause(place, last, kind)
        return np.where(within, pace, np.inf), pause

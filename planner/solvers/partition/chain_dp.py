"""`ChainStages` exactly: the best stages and devices of each pipeline, by a chain DP.

For each pipeline, `FastestLine` over (devices used, type of the last one) minimises the largest pace under the memory. If
transfers also pause the pipeline, the DP runs with a limit on the pause, and `BottleneckSearch` branches on
that limit to minimise the largest pace plus the largest pause.

Sums over runs of layers equal the judge's `fsum` to the last bit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

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


_SLACK = 1 + 1e-12

State = TypeVar("State", bound=Hashable)
Steps = Iterable[tuple[State, Sequence[tuple[State, np.ndarray]]]]
"""States in order, each with the states before it and the [n + 1, n + 1] times of the stages that lead from them."""


class FastestLine(Generic[State]):
    """The least largest time of stages in line, for each state (what was used so far) and number of layers placed.

    Args:
        start: state before the first stage.
        layers: n.
        steps: entry (i, j) of a table of times is that of the stage of layers i..j-1.

    Of equal plans the one whose last stage comes first in `steps`, then the one whose last stage is longest.
    O(n^2) a step.
    """

    def __init__(self, start: State, layers: int, steps: Steps[State]) -> None:
        self.best: dict[State, np.ndarray] = {start: np.full(layers + 1, np.inf)}
        self.best[start][0] = 0.0
        self._origin: dict[State, tuple[list[State], np.ndarray]] = {}
        for state, leading in steps:
            totals = [np.maximum(self.best[before][:, None], seconds) for before, seconds in leading]
            table = np.concatenate(totals)
            self.best[state] = table.min(axis=0)
            self._origin[state] = [before for before, _ in leading], table.argmin(axis=0)

    def path(self, state: State) -> list[tuple[State, int, int]]:
        """State after, first layer and layer behind the last one of each stage, all layers being placed at `state`."""
        stages, stop = [], len(self.best[state]) - 1
        while state in self._origin:
            before, origin = self._origin[state]
            which, start = divmod(int(origin[stop]), len(origin))
            stages.append((state, start, stop))
            state, stop = before[which], start
        return stages[::-1]


def _run_sums(figures: np.ndarray) -> np.ndarray:
    """[n + 1, n + 1] `math.fsum(figures[i:j])` for i < j, else 0: to the last bit what the judge computes; O(n^3)."""
    count = len(figures) + 1
    values = figures.tolist()
    return np.array([[math.fsum(values[i:j]) for j in range(count)] for i in range(count)])


_Place = tuple[tuple[int, ...], int]
"""Devices used of each type and type of the last one (-1: none); for a given line of devices, (place,) and its type."""
_START: _Place = ((), -1)


def solve_chain(search: Search) -> None:
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


def _offer_best(search: Search, stages: _Stages) -> None:
    """Offer plans of a pipeline, the best of them included, unless none is better than the best plan so far."""
    problem, pipeline = stages.problem, stages.pipeline
    if pipeline.rounds * float(problem.compute_s.min(axis=0).sum()) / pipeline.stages >= search.objective * _SLACK:
        return
    limits = BottleneckSearch(stages.pauses(), 1.0, search.objective)
    while (step := limits.next_cap()) is not None:
        line = FastestLine(_START, problem.layers, stages.steps(step[0], search.deadline))
        ends = [(float(times[-1]), at) for at, times in line.best.items() if stages.place(at) == pipeline.stages]
        pace, end = min(ends)
        if math.isfinite(pace):
            path = line.path(end)
            types = () if pipeline.line else tuple(kind for (_, kind), _, _ in path)
            search.offer(ChainDecision((0, *(stop for _, _, stop in path)), pipeline, types))
        limits.settle(pace, step[0])


class _Stages:
    """[n + 1, n + 1] pace and pause of all runs of layers (start, stop) in one pipeline, and the order of devices."""

    def __init__(self, problem: ChainStages, pipeline: Pipeline, weights: np.ndarray, saved: np.ndarray) -> None:
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

    def steps(self, most_pause: float, deadline: Deadline) -> Steps[_Place]:
        """Stages with pauses up to a limit, by place in the order of devices used."""
        for (used, kind), before in self._places():
            deadline.check()
            leading = []
            for last in before:
                key = self.place(last), last[1], kind
                if key not in self._priced:
                    self._priced[key] = self._within_memory(*key)
                pace, pause = self._priced[key]
                leading.append((last, np.where(pause <= most_pause * _SLACK, pace, np.inf)))
            yield (used, kind), leading

    def _places(self) -> Iterator[tuple[_Place, list[_Place]]]:
        """Places in the order of devices used, each with those before it."""
        if self.pipeline.line:
            line = [_START, *(((place,), kind) for place, kind in enumerate(self.pipeline.line))]
            yield from ((after, [before]) for before, after in itertools.pairwise(line))
            return
        multisets = itertools.product(*(range(count + 1) for count in self.problem.counts))
        for used in sorted((u for u in multisets if 1 <= sum(u) <= self.pipeline.stages), key=lambda u: (sum(u), u)):
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


PARTITION_SOLVERS.register("chain-dp", PartitionSolver(ChainStages, solve_chain))

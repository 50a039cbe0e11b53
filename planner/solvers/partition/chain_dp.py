"""Chains of layers cut for a published order of work, exactly: every pipeline, each with its best stages and devices.

For each pipeline a DP over (devices used, type of the last, layers placed) minimises the slowest stage under memory.
Where stages also stop the pipeline (transfers, an exchange after it is drained), those that stop it for longer than
some limit are forbidden, for every limit at which the best slowest stage changes; these are found by bisection.

Sums over all runs of layers of a chain are to the last bit what a judge's `fsum` gives.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Collective
from planner.memory import fits
from planner.solvers.partition import PARTITION_SOLVERS, Deadline, PartitionSolver, Search
from planner.space.partition import ChainDecision, ChainStages, Pipeline

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


def prefix_differences(figures: np.ndarray) -> np.ndarray:
    """float64 [n + 1, n + 1]: entry (i, j) is about the sum of figures i..j-1, rounded as prefix sums are; O(n^2)."""
    total = np.concatenate([[0.0], np.cumsum(figures)])
    return np.asarray(total[None, :] - total[:, None])


def real_runs(layers: int) -> np.ndarray:
    """bool [layers + 1, layers + 1] whether entry (i, j) is a run of layers i..j-1, one at least."""
    marks = np.arange(layers + 1)
    return marks[:, None] < marks[None, :]


_SLACK = 1 + 1e-12
State = tuple[tuple[int, ...], int]
"""Devices used of each type, type of the last; places used and the place's type where the line is given."""
Cut = tuple[float, tuple[int, ...], tuple[int, ...]]
"""The slowest stage's pace, boundaries, types of the devices."""


def solve_chain(search: Search) -> None:
    """The best plan over all pipelines; those that cannot beat the best plan are skipped."""
    problem: ChainStages = search.problem
    search.space = f"{'equal' if problem.equal else 'unequal'} stages in line"
    points = 0
    for pipeline in problem.pipelines:
        search.deadline.check()
        points += 1
        for marks, types in _cuts_worth_judging(problem, pipeline, search.objective, search.deadline):
            search.offer(ChainDecision(marks, pipeline, types))
    search.count(points=points)
    search.prove(search.objective)


def _cuts_worth_judging(
    problem: ChainStages, pipeline: Pipeline, best: float, deadline: Deadline
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boundaries and types that may beat `best`."""
    stages = pipeline.stages
    if stages > problem.layers:
        return
    if problem.equal and pipeline.line:
        yield tuple(range(0, problem.layers + 1, problem.layers // stages)), ()
        return
    forward_s, backward_s = problem.forward_s[pipeline.size], problem.backward_s[pipeline.size]
    works = (t.forward * forward_s + t.backward * backward_s for t, *_ in pipeline.slot)
    if pipeline.rounds * float(sum(works).min(axis=0).sum()) / stages >= best * _SLACK:
        return
    tables = _Tables(problem, pipeline, deadline)
    pauses = np.unique(tables.pause[tables.real]) if pipeline.stops or pipeline.drained else np.zeros(1)
    yield from ((marks, types) for _, marks, types in _least_sums(pauses, tables.split))


def _least_sums(limits: np.ndarray, split: Callable[[float], Cut | None]) -> Iterator[Cut]:
    """Best stages for each limit on the pause at which the pace changes, those that cannot be best left out.

    The pace falls as the limit rises: where it is the same at both ends of a range of limits, nothing within helps.
    """
    ends = (0, len(limits) - 1)
    known = {i: split(float(limits[i])) for i in ends}
    best = min((cut[0] + float(limits[i]) for i, cut in known.items() if cut), default=math.inf)
    ranges = [ends]
    while ranges:
        low, high = ranges.pop()
        near, far = known[low], known[high]
        if high - low < 2 or far is None or (near and near[0] <= far[0]):
            continue
        if far[0] + float(limits[low + 1]) >= best * _SLACK:
            continue
        middle = (low + high) // 2
        cut = known[middle] = split(float(limits[middle]))
        if cut:
            best = min(best, cut[0] + float(limits[middle]))
        ranges += [(low, middle), (middle, high)]
    for index in sorted(known):
        cut = known[index]
        if cut and cut[0] + float(limits[index]) <= best * _SLACK:
            yield cut


class _Tables:
    """Paces, pauses and memory of runs of layers [n + 1, n + 1] (start, stop) in one pipeline."""

    def __init__(self, problem: ChainStages, pipeline: Pipeline, deadline: Deadline) -> None:
        self.problem, self.pipeline, self.deadline = problem, pipeline, deadline
        self.real = real_runs(problem.layers)
        size = pipeline.size
        self.weights, self.saved = run_sums(problem.weight_bytes), run_sums(problem.saved_bytes[size])
        self.crossing = problem.boundary_bytes[size].copy()
        self.crossing[0] = self.crossing[-1] = 0.0
        self.work = [
            (prefix_differences(f), prefix_differences(b))
            for f, b in zip(problem.forward_s[size], problem.backward_s[size], strict=True)
        ]
        kind = pipeline.line[0][0] if pipeline.line else 0
        moved = moved_bytes(Collective.ALL_REDUCE, self.weights, pipeline.width)
        self.exchange_s = moved / problem.bandwidth_byte_per_s[kind, kind]
        self.pause = np.broadcast_to(self._priced(0, -1, kind)[1], self.real.shape)
        self._stages: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]] = {}

    def _priced(self, place: int, last: int, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Pace and pause of every run as the stage at a place; `last` is the type before it, -1 for none."""
        problem, line = self.problem, self.pipeline.line
        rates = problem.bandwidth_byte_per_s
        behind = line[place + 1][0] if place + 1 < len(line) else kind
        entering = self.crossing[:, None] / rates[last if last >= 0 else kind, kind]
        leaving = self.crossing[None, :] / rates[kind, behind]
        slots = [self.pipeline.slot_s(*self.work[k], entering, leaving) for k in (line[place] if line else (kind,))]
        return self.pipeline.pace_and_pause(np.maximum.reduce(slots), self.exchange_s, entering)

    def _stage(self, place: int, last: int, kind: int) -> tuple[np.ndarray, np.ndarray]:
        """Pace, infinite where it does not fit, and pause of every run as the stage at a place."""
        if (place, last, kind) not in self._stages:
            received = self.problem.boundary_bytes[self.pipeline.size][:, None]
            needed = self.pipeline.kept[place].bytes(self.weights, self.saved, received)
            kinds = self.pipeline.line[place] if self.pipeline.line else (kind,)
            within = self.real & fits(needed, float(self.problem.memory_bytes[list(kinds)].min()))
            pace, pause = self._priced(place, last, kind)
            self._stages[place, last, kind] = np.where(within, pace, np.inf), pause
        return self._stages[place, last, kind]

    def _states(self) -> Iterator[tuple[State, list[State]]]:
        """States in the order of their devices, each with the states before it; none before a first stage."""
        if self.pipeline.line:
            line: list[State] = [((place,), kinds[0]) for place, kinds in enumerate(self.pipeline.line)]
            yield from ((state, line[max(place - 1, 0) : place]) for place, state in enumerate(line))
            return
        counts = self.problem.counts
        multisets = itertools.product(*(range(count + 1) for count in counts))
        for used in sorted((u for u in multisets if 1 <= sum(u) <= self.pipeline.stages), key=lambda u: (sum(u), u)):
            for kind in (k for k, count in enumerate(used) if count):
                before = tuple(count - (i == kind) for i, count in enumerate(used))
                yield (used, kind), [(before, last) for last, count in enumerate(before) if count]

    def split(self, most_pause: float) -> Cut | None:
        """The cut whose slowest stage is fastest when no stage stops the pipeline for longer than a limit."""
        best: dict[State, np.ndarray] = {}
        came: dict[State, tuple[list[State], np.ndarray, np.ndarray]] = {}
        place_of: dict[State, int] = {}
        for state, before in self._states():
            self.deadline.check()
            place = place_of[state] = place_of[before[0]] + 1 if before else 0
            stages = [self._stage(place, last, state[1]) for _, last in before or [((), -1)]]
            ways = np.stack([np.where(pause <= most_pause * _SLACK, pace, np.inf) for pace, pause in stages])
            if before:
                ways = np.maximum(np.stack([best[b] for b in before])[:, :, None], ways)
            else:
                ways[:, 1:] = np.inf
            nearest = ways.argmin(axis=0)
            least = ways.min(axis=0)
            cut = least.argmin(axis=0)
            best[state] = least.min(axis=0)
            came[state] = before, cut, nearest[cut, np.arange(len(cut))]
        ends = [
            (float(best[state][-1]), state) for state, place in place_of.items() if place + 1 == self.pipeline.stages
        ]
        slowest, state = min(ends)
        if math.isinf(slowest):
            return None
        marks, types = [self.problem.layers], [state[1]]
        while came[state][0]:
            before, cut, nearest = came[state]
            state = before[int(nearest[marks[-1]])]
            marks.append(int(cut[marks[-1]]))
            types.append(state[1])
        return slowest, (0, *reversed(marks)), () if self.pipeline.line else tuple(reversed(types))


PARTITION_SOLVERS.register("chain-dp", PartitionSolver(ChainStages, solve_chain))

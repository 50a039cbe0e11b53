"""Exact dynamic programs for PipeDream's replicated stages (`PipeDreamProblem`).

On several levels: PipeDream's recurrence on tables over all pairs of cuts (`NestedTables`).

On one level: the label sweep of `pipedream_sweep`, first over few cuts for a good plan, then over all cuts below that
plan's time for the proof (`climb`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from planner.errors import UsageError
from planner.memory import fits
from planner.solvers.cluster_chains.chain_dp import FastestLine
from planner.solvers.cluster_chains.pipedream import PipeDreamProblem, ReplicatedStage
from planner.solvers.cluster_chains.pipedream_sweep import Cuts, Moves, Sweep, all_cuts, moves_on
from planner.solvers.cluster_chains.pipedream_terms import Released
from planner.solvers.cluster_chains.search import SearchState

Context = tuple[int, int]
"""What the memory of a unit depends on: how many units run the same stages, and how many devices run later stages."""
_ALONE: Context = (1, 0)


class NestedTables:
    """Times of runs of stages between any two cuts on each level, computed on demand.

    Complexity: O(S^3 m^2) vectorised operations on each level but the last, O(S^2 m^2) there.
    """

    def __init__(self, problem: PipeDreamProblem, cuts: Cuts, check: Callable[[], None]) -> None:
        self.problem = problem
        self.cuts = cuts
        self.check = check
        self.top = len(problem.machines) - 1
        inside = np.zeros((cuts.count, cuts.count), dtype=bool)
        for row in range(cuts.count):
            inside[row, row + 1 :] = ~(cuts.bits[row] & ~cuts.bits[row + 1 :]).any(axis=1)
        self.reach = inside
        self.compute = self._differences(cuts.compute_s, np.inf)
        self.weights = self._differences(cuts.weight_bytes, 0.0)
        self.saved = self._differences(cuts.saved_bytes, 0.0)
        self.runs: dict[tuple[int, Context], FastestLine[int]] = {}
        self.limited = math.isfinite(problem.memory.device_bytes)

    def solve(self) -> tuple[float, tuple[ReplicatedStage, ...] | None]:
        """The least time of all layers on all devices, and the plan; infinite and None if there is none."""
        best = float(self._runs(self.top, _ALONE).best[self.problem.machines[self.top]][0, -1])
        if math.isinf(best):
            return best, None
        return best, self._plan(self.top, _ALONE, 0, self.cuts.count - 1)

    def _differences(self, figures: np.ndarray, outside: float) -> np.ndarray:
        return np.where(self.reach, figures[None, :] - figures[:, None], outside)

    def _context(self, level: int, context: Context, behind: int, replicas: int) -> Context:
        """Context of the units inside a stage with `behind` units of its level on later stages."""
        if not self.limited:
            return _ALONE
        copies, after = context
        return copies * replicas, after + copies * behind * math.prod(self.problem.machines[:level])

    def _stage(self, level: int, context: Context, behind: int, replicas: int, *, first: bool) -> np.ndarray:
        """[S, S] time of a stage from each cut to each; includes the transfers at its ends unless it is the first."""
        problem = self.problem
        speed = problem.bandwidth_byte_per_s[level]
        unit = self.compute
        if level:
            inside = self._context(level, context, behind, replicas)
            unit = self._runs(level - 1, inside).best[problem.machines[level - 1]]
        if not problem.adds_up:
            time = np.maximum(unit, 2 * (replicas - 1) * self.weights / speed) / replicas
        else:
            shared = problem.machines[level - 1] if first and level else 1
            time = (unit + 4 * (replicas - 1) * self.weights / (speed * replicas) / shared) / replicas
        if problem.transfers and not first:
            sharing = replicas if problem.adds_up else 1
            cut_s = 2 * self.cuts.cut_bytes / (speed * sharing)
            leaving = cut_s.copy()
            leaving[-1] = 0.0
            time = np.maximum(time, np.maximum(cut_s[:, None], leaving[None, :]))
        if self.limited and level == 0:
            copies, after = context
            in_flight = problem.memory.in_flight(behind * copies + after, replicas * copies)
            needed = problem.memory.needed(self.weights, self.saved, self.cuts.cut_bytes[:, None], in_flight)
            time = np.where(fits(needed, problem.memory.device_bytes), time, np.inf)
        return np.asarray(time)

    def _runs(self, level: int, context: Context) -> FastestLine[int]:
        """Stages from any cut to any on each number of units of a level; on the last level only from the first cut."""
        key = (level, context)
        if key not in self.runs:
            machines = self.problem.machines[level]
            first = np.where(np.eye(1 if level == self.top else self.cuts.count, self.cuts.count) > 0, 0.0, np.inf)
            leading = functools.partial(self._leading, level, context)
            self.runs[key] = FastestLine(0, first, range(1, machines + 1), leading)
        return self.runs[key]

    def _leading(self, level: int, context: Context, used: int) -> Iterator[tuple[int, np.ndarray]]:
        """The last stage on `used` units of a level, by the units used before it; or the last unit is idle."""
        self.check()
        problem, behind = self.problem, self.problem.machines[level] - used
        if not problem.use_all and used > 1:
            yield used - 1, np.where(np.eye(self.cuts.count) > 0, 0.0, np.inf)
        if used == 1 or problem.replicate:
            yield 0, self._stage(level, context, behind, used, first=True)
        for replicas in range(1, used if problem.replicate else min(used, 2)):
            self.check()
            yield used - replicas, self._stage(level, context, behind, replicas, first=False)

    def _plan(self, level: int, context: Context, start: int, stop: int) -> tuple[ReplicatedStage, ...]:
        """The stages between two cuts on all units of a level."""
        machines, stages = self.problem.machines[level], []
        for before, used, first, last in self._runs(level, context).path(machines, start, stop):
            inner: tuple[ReplicatedStage, ...] = ()
            if level:
                below = self._context(level, context, machines - used, used - before)
                inner = self._plan(level - 1, below, first, last)
            stages.append(ReplicatedStage(self.cuts.layers_between(first, last), used - before, inner))
        return tuple(stages)


_COARSE = (150, 1000, 5000, 20_000, 60_000)
MOST_CUTS = 1_000_000
_MOST_PAIRED = 800


Place = tuple[int, int, int, int]
"""First device, width, copies, stride."""


def climb(search: SearchState, cuts: Cuts, stage: Callable[[tuple[int, ...], Place], Any]) -> None:
    """Sweep few cuts for a good plan, then all cuts for the proof.

    Without all cuts, the bound stays the compute time divided by the devices.

    Args:
        search: the problem, its best plan and bound.
        cuts: of its layers.
        stage: makes a stage of the plan from its layers and place.
    """
    problem, moves, pairs = search.problem, dict[int, Moves](), 0
    search.prove(float(cuts.compute_s[-1]) / problem.devices)
    some = [cuts.coarse(most) for most in _COARSE if cuts.count > 2 * most]
    counts = range(problem.devices, problem.devices - 1 if problem.use_all else 0, -1)
    for swept, count in itertools.product([*some, cuts], counts):
        if swept.compute_s[-1] / count >= search.objective:
            continue
        search.deadline.check()
        if count not in moves:
            moves[count] = moves_on(problem, count, search.deadline)
        sweep = Sweep(problem, swept, count, moves[count], search.objective, search.deadline.check)
        try:
            best = sweep.run()
        finally:
            pairs += sweep.pairs
            search.count(pairs=pairs)
        if best:
            steps = ((swept.layers_between(start, stop), place) for start, stop, place in best[1])
            search.offer(tuple(stage(*step) for step in steps), best[0])
    if cuts.complete:
        search.prove(search.objective)


def cuts_of(search: SearchState, released: Released) -> Cuts:
    """Offer the trivial plans and list all cuts of the problem's layers."""
    problem = search.problem
    search.offer_all((search.solver, plan) for _, plan in problem.trivial())
    cuts = all_cuts(problem.layers, released, MOST_CUTS, search.deadline)
    search.count(cuts=cuts.count, pairs=0)
    return cuts


def solve_nested(search: SearchState) -> None:
    """Find the fastest hierarchical plan.

    On one level, a sweep over all cuts proves it on graphs with hundreds of thousands of cuts. On several levels, the
    recurrence over all pairs of cuts proves it up to `_MOST_PAIRED` cuts. With more, a subset of the cuts is searched
    (spread over the compute time, and those with few bytes), and the bound is the compute time divided by the devices.

    Raises:
        UsageError: memory is to be counted device by device while units may stay idle on several levels.
    """
    problem: PipeDreamProblem = search.problem
    levels = len(problem.machines)
    if levels > 1 and math.isfinite(problem.memory.device_bytes) and not problem.use_all:
        raise UsageError(
            "memory cannot be counted device by device while units of several levels may stay idle",
            hint="use a PlacedPipelineProblem, or all units",
        )
    cuts = cuts_of(search, problem.released)
    complete = cuts.complete and (levels == 1 or cuts.count <= _MOST_PAIRED)
    search.space = f"replicated stages on {levels} level{'s' if levels > 1 else ''}"
    search.space += "" if complete else ", some of the cuts only"
    if levels == 1:
        climb(search, cuts, lambda layers, place: ReplicatedStage(layers, place[1]))
        return
    search.prove(float(cuts.compute_s[-1]) / problem.devices)
    searched_cuts = cuts if cuts.count <= _MOST_PAIRED else cuts.coarse(_MOST_PAIRED)
    search.count(pairs=searched_cuts.count**2)
    time, plan = NestedTables(problem, searched_cuts, search.deadline.check).solve()
    if plan is not None:
        search.offer(plan, time)
    if searched_cuts.complete:
        search.prove(min(time, search.objective))

"""Iteration time of a synchronous pipeline, exactly: branch and bound on the longest stage over a chain DP.

The ranges of the longest stage are those of `_longest_stage`: some ten to forty passes in place of one a candidate
value. A pass is a DP over (first layer, devices left), the last layer and all devices at once in numpy. Memory depends
on how many stages follow; a pass first leaves that aside, which bounds it from below, and only when its plan does not
fit is it repeated stage by stage from the end, keeping states that beat all with fewer stages and that can still win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.solvers.partition import PARTITION_SOLVERS, RELATIVE_TOLERANCE, PartitionSolver, Progress, Result
from planner.solvers.partition._deadline import Deadline, OutOfTime
from planner.solvers.partition._iteration_tables import (
    Tables,
    backward,
    extend,
    forward,
    last_within,
    next_states,
    pick_config,
    tables_of,
    under_cap,
)
from planner.solvers.partition._longest_stage import LongestStage
from planner.solvers.partition._verified import verified
from planner.space.partition.iteration import IterationDecision, IterationProblem, MeshStage

NAME = "iteration-dp"
_SPACE = "all cuts of the chain, meshes in line and their configurations"


@dataclass
class _Search:
    tables: Tables
    relaxed: np.ndarray
    """[G, L, L] stage times with one micro-batch in flight."""
    deadline: Deadline
    passes: int = 0
    staged_passes: int = 0


def solve_iteration(
    problem: IterationProblem, *, time_limit_s: float = 60.0, start: object = None, progress: Progress | None = None
) -> Result:
    """The least iteration time (see `planner.solvers.partition.Run`).

    A pass takes O(L^2 G D) for L layers, G mesh sizes and D devices, and as much again for every stage when memory
    binds.
    """
    deadline = Deadline(time_limit_s)
    best, objective = None, np.inf
    if isinstance(start, IterationDecision):
        verdict = problem.judge(start)
        if verdict.feasible:
            best, objective = start, verdict.objective
    tables = tables_of(problem)
    if not tables.sizes:
        return Result(None, np.inf, np.inf, NAME, _SPACE)
    values = tables.candidates()
    search = _Search(tables, tables.stage_seconds(1), deadline)
    ranges = LongestStage(values, problem.micro_batches - 1, objective)
    bound = ranges.bound
    while (step := ranges.next_cap()) is not None:
        try:
            least, stages = _least_sum(search, *step)
        except OutOfTime:
            break
        longest = np.inf
        if stages is not None:
            verdict = problem.judge(IterationDecision(tuple(stages)))
            longest = max(verdict.parts)
            if verdict.objective < objective:
                best, objective = IterationDecision(tuple(stages)), verdict.objective
        ranges.settle(least if stages is not None else np.inf, longest)
        bound = ranges.bound
        if progress:
            progress(NAME, objective, min(bound, objective))
    else:
        bound = ranges.bound
    counts = {"candidates": len(values), "passes": search.passes, "staged_passes": search.staged_passes}
    return verified(problem, best, objective, bound, NAME, _SPACE, counts)


def _least_sum(search: _Search, cap: float, enough: float) -> tuple[float, list[MeshStage] | None]:
    """The least sum of stage times under a cap, and its plan; None when nothing below `enough` exists."""
    search.passes += 1
    problem = search.tables.problem
    table = backward(search.tables, search.relaxed, cap, search.deadline)
    least = float(table[0, problem.devices])
    if not least < enough:
        return least, None
    stages = _trace(search, table, cap)
    verdict = problem.judge(IterationDecision(tuple(stages)))
    if verdict.feasible:
        _check(least, sum(verdict.parts))
        return least, stages
    return _least_staged_sum(search, cap, enough)


def _check(expected: float, judged: float) -> None:
    if abs(expected - judged) > RELATIVE_TOLERANCE * max(abs(judged), 1e-300):
        raise RuntimeError(f"the search and the judge disagree: {expected} against {judged}")


def _trace(search: _Search, table: np.ndarray, cap: float) -> list[MeshStage]:
    """The stages behind the least sum of a pass without memory, in their fastest configurations that fit if alone."""
    tables, first, left = search.tables, 0, search.tables.problem.devices
    path: list[tuple[int, int, int]] = []
    while first < tables.problem.layers:
        steps = []
        for g, after, times in next_states(tables, search.relaxed, cap, first, left):
            totals = times + table[first + 1 :, after]
            at = int(np.argmin(totals))
            steps.append((float(totals[at]), g, first + at, after))
        _, g, last, left = min(steps)
        path.append((g, first, last))
        first = last + 1
    return [_in_place(tables, *step, len(path) - i) for i, step in enumerate(path)]


def _in_place(tables: Tables, g: int, first: int, last: int, in_flight: int) -> MeshStage:
    """A stage in a configuration as fast as the fastest one, one that bears what is in flight where there is one."""
    fastest = pick_config(tables, g, first, last, 1)
    bearing = pick_config(tables, g, first, last, in_flight)
    times = tables.problem.time_s[first, last]
    return bearing if times[bearing.config] == times[fastest.config] else fastest


def _least_staged_sum(search: _Search, cap: float, enough: float) -> tuple[float, list[MeshStage] | None]:
    """As `_least_sum`, with memory: states by the number of stages they take, fewest first."""
    search.staged_passes += 1
    tables, problem = search.tables, search.tables.problem
    before = forward(tables, search.relaxed, cap, search.deadline)
    layers, devices = problem.layers, problem.devices
    current = np.full((layers + 1, devices + 1), np.inf)
    current[layers, 0 if problem.use_all else slice(None)] = 0.0
    best = np.full_like(current, np.inf)
    history = [current]
    found: tuple[float, int] | None = None
    while len(history) <= min(layers, devices):
        count = len(history)
        capped = under_cap(tables, tables.stage_seconds(count), cap)
        reach = [last_within(table) for table in capped]
        active = np.flatnonzero(np.isfinite(current).any(axis=1))
        if not len(active):
            break
        following = np.full_like(current, np.inf)
        for first in range(int(active[-1]) - 1, -1, -1):
            search.deadline.check()
            row = extend(tables, capped, reach, current, first, int(active[0]))
            row[(row >= best[first]) | (row + before[first] >= enough)] = np.inf
            following[first] = row
        np.minimum(best, following, out=best)
        history.append(following)
        if following[0, devices] < enough:
            found = enough, _ = float(following[0, devices]), count
        current = following
    if found is None:
        return np.inf, None
    return found[0], _trace_staged(search, history[: found[1] + 1], cap)


def _trace_staged(search: _Search, history: list[np.ndarray], cap: float) -> list[MeshStage]:
    tables, first, left = search.tables, 0, search.tables.problem.devices
    stages = []
    for count in range(len(history) - 1, 0, -1):
        steps = []
        for g, after, times in next_states(tables, tables.stage_seconds(count), cap, first, left):
            totals = times + history[count - 1][first + 1 :, after]
            at = int(np.argmin(totals))
            steps.append((float(totals[at]), g, first + at, after))
        _, g, last, left = min(steps)
        stages.append(pick_config(tables, g, first, last, count))
        first = last + 1
    return stages


PARTITION_SOLVERS.register(NAME, PartitionSolver((IterationProblem,), exact=True, run=solve_iteration))

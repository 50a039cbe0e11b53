"""Iteration time of a synchronous pipeline, exactly: branch and bound on the longest stage over a chain DP.

Let g(T) be the least sum of stage times when no stage takes more than T. A plan with longest stage m has a sum of at
least g(m), so g(T) + (M - 1) a bounds all plans with their longest stage in [a, T]; and the plan behind g(T), whose
longest stage is m, settles all of [m, T] at once. Ranges of T are split, best bound first, until none can beat the plan
found: some ten to forty passes in place of one a candidate value.

A pass is a DP over (first layer, devices left), the last layer and all devices at once in numpy. Memory depends on how
many stages follow; a pass first leaves that aside, which bounds it from below, and only when its plan does not fit is
it repeated stage by stage from the end, keeping states that beat all with fewer stages and that can still win.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field

import numpy as np

from planner.solvers.partition import PARTITION_SOLVERS, RELATIVE_TOLERANCE, PartitionSolver, Progress, Result
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
from planner.space.partition.iteration import IterationDecision, IterationProblem, MeshStage

_SPACE = "all cuts of the chain, meshes in line and their configurations"
_STEP = 1e-12


@dataclass
class _Search:
    tables: Tables
    values: np.ndarray
    """Candidates for the longest stage, ascending."""
    relaxed: np.ndarray
    """[G, L, L] stage times with one micro-batch in flight."""
    incumbent: float = float("inf")
    decision: IterationDecision | None = None
    passes: int = 0
    staged_passes: int = 0
    open_ranges: list[tuple[float, int, int, float]] = field(default_factory=list)
    """(bound, first value, last value, least sum) of ranges of the longest stage still to be settled."""


def solve_iteration(
    problem: IterationProblem, *, time_limit_s: float = 60.0, start: object = None, progress: Progress | None = None
) -> Result:
    """The least iteration time (see `planner.solvers.partition.Run`).

    A pass takes O(L^2 G D) for L layers, G mesh sizes and D devices, and as much again for every stage when memory
    binds.
    """
    deadline = time.monotonic() + time_limit_s
    tables = tables_of(problem)
    if not tables.sizes:
        return _result(_Search(tables, np.zeros(0), np.zeros((0, 0, 0))), True)
    search = _Search(tables, tables.candidates(), tables.stage_seconds(1))
    if isinstance(start, IterationDecision):
        _offer(search, start)
    if len(search.values):
        _push(search, 0, len(search.values) - 1, 0.0)
    finished = True
    while search.open_ranges:
        if time.monotonic() > deadline:
            finished = False
            break
        if progress:
            progress("iteration-dp", search.incumbent, min(search.open_ranges[0][0], search.incumbent))
        _settle(search, *heapq.heappop(search.open_ranges)[1:])
    return _result(search, finished)


def _result(search: _Search, finished: bool) -> Result:
    bound = search.incumbent * (1 - _STEP) if np.isfinite(search.incumbent) else np.inf
    if not finished:
        bound = min([bound, *(entry[0] for entry in search.open_ranges)])
    statistics = {
        "candidates": len(search.values),
        "passes": search.passes,
        "staged_passes": search.staged_passes,
    }
    return Result(search.decision, search.incumbent, bound, "iteration-dp", _SPACE, statistics)


def _push(search: _Search, first: int, last: int, least_sum: float) -> None:
    """Keep a range of the longest stage unless it is empty or cannot hold anything better."""
    more = search.tables.problem.micro_batches - 1
    if first > last:
        return
    bound = least_sum + more * float(search.values[first])
    if bound < search.incumbent * (1 - _STEP):
        heapq.heappush(search.open_ranges, (bound, first, last, least_sum))


def _settle(search: _Search, first: int, last: int, least_sum: float) -> None:
    """Try one cap inside a range and split the rest."""
    more = search.tables.problem.micro_batches - 1
    if least_sum + more * float(search.values[first]) >= search.incumbent * (1 - _STEP):
        return
    if np.isfinite(search.incumbent) and more:
        last = min(last, int(np.searchsorted(search.values, (search.incumbent - least_sum) / more, side="right")) - 1)
    if last < first:
        return
    if search.passes == 0:
        cap_at = last  # the unbounded plan: whether anything fits, and the largest longest stage worth having
    else:
        middle = (float(search.values[first]) + float(search.values[last])) / 2
        cap_at = min(max(int(np.searchsorted(search.values, middle, side="right")) - 1, first), last)
    cap = float(search.values[cap_at])
    enough = search.incumbent - more * float(search.values[first])
    least, stages = _least_sum(search, cap, enough)
    if stages is not None:
        longest = _offer(search, IterationDecision(tuple(stages)))
        _push(search, first, int(np.searchsorted(search.values, longest)) - 1, least)
    _push(search, cap_at + 1, last, least_sum)


def _offer(search: _Search, decision: IterationDecision) -> float:
    """Judge a plan, keep it if it is the best, and give its longest stage."""
    verdict = search.tables.problem.judge(decision)
    if verdict.feasible and verdict.objective < search.incumbent:
        search.incumbent, search.decision = verdict.objective, decision
    return max(verdict.parts, default=np.inf)


def _least_sum(search: _Search, cap: float, enough: float) -> tuple[float, list[MeshStage] | None]:
    """The least sum of stage times under a cap, and its plan; None when nothing below `enough` exists."""
    search.passes += 1
    problem = search.tables.problem
    table = backward(search.tables, search.relaxed, cap)
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
    before = forward(tables, search.relaxed, cap)
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


PARTITION_SOLVERS.register("iteration-dp", PartitionSolver((IterationProblem,), exact=True, run=solve_iteration))

"""Iteration time of a synchronous pipeline, exactly: branch and bound on the longest stage over a chain DP.

`BottleneckSearch` splits the range of the longest stage time: ten to forty passes, not one per candidate value. A
pass is a DP over (first layer, devices left), vectorised over the last layer and all devices. Memory depends on the
number of later stages. A pass first ignores that, which gives a lower bound. Only if its plan does not fit, the pass is
repeated stage by stage from the end; a state with more stages is kept if it is better than all with fewer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.memory import most_that_fit
from planner.solvers.partition import PARTITION_SOLVERS, Deadline, PartitionSolver, Search
from planner.solvers.partition.chain_dp import BottleneckSearch
from planner.space.partition import IterationProblem, MeshStage

_UNLIMITED = np.iinfo(np.int32).max


@dataclass
class Tables:
    """An instance as the passes use it. L layers, C configurations, G mesh sizes, V levels, D devices.

    In state (i, r), layers i..L-1 are to be placed on the last r devices; the next mesh starts at device D - r.

    Attributes:
        problem: the instance.
        sizes: [G] distinct mesh sizes, ascending.
        configs: [G] configurations of each size.
        most_in_flight: [L, L, C] most micro-batches that fit; `_UNLIMITED` without a memory limit.
        boundary_s: [V, L] with 0 for the first layer; V = 1 and zero if boundaries are free.
        columns: [V] the r of the states whose next boundary crosses links of that level.
        limited: true if some stage cannot hold all micro-batches.
        deadline: of the search; passes raise `OutOfTime` after it.
        passes: so far.
        staged_passes: so far, stage by stage.
    """

    problem: IterationProblem
    sizes: tuple[int, ...]
    configs: tuple[np.ndarray, ...]
    most_in_flight: np.ndarray
    boundary_s: np.ndarray
    columns: tuple[np.ndarray, ...]
    limited: bool
    deadline: Deadline
    passes: int = 0
    staged_passes: int = 0

    @functools.cached_property
    def relaxed(self) -> np.ndarray:
        """[G, L, L] stage times with one micro-batch in flight."""
        return self.stage_seconds(1)

    def stage_seconds(self, in_flight: int) -> np.ndarray:
        """[G, L, L] time of the fastest configuration of each size that fits with so many micro-batches in flight."""
        needed = min(in_flight, self.problem.micro_batches)
        times = np.where(self.most_in_flight >= needed, self.problem.time_s, np.inf) if self.limited else None
        source = self.problem.time_s if times is None else times
        return np.stack([source[:, :, configs].min(axis=2) for configs in self.configs])

    def candidates(self) -> np.ndarray:
        """All values that the longest stage can take, in ascending order."""
        usable = np.where(self.most_in_flight >= 1, self.problem.time_s, np.inf)
        usable = usable[:, :, self.problem.config_devices <= self.problem.devices]
        values = [(usable + boundary[:, None, None]).ravel() for boundary in self.boundary_s]
        joined = np.concatenate(values)
        unique: np.ndarray = np.unique(joined[np.isfinite(joined)])
        return unique


def tables_of(problem: IterationProblem, deadline: Deadline) -> Tables:
    """Group configurations by mesh size and compute how many micro-batches fit."""
    sizes = sorted({int(n) for n in problem.config_devices if n <= problem.devices})
    configs = tuple(np.flatnonzero(problem.config_devices == n) for n in sizes)
    most_in_flight = _most_in_flight(problem)
    boundary = np.zeros((1, problem.layers))
    columns: list[np.ndarray] = [np.arange(problem.devices + 1)]
    if problem.boundary_s is not None and problem.boundary_level is not None:
        boundary = np.array(problem.boundary_s, dtype=np.float64)
        boundary[:, 0] = 0.0
        level = problem.boundary_level[
            np.minimum(problem.devices - np.arange(problem.devices + 1), problem.devices - 1)
        ]
        columns = [np.flatnonzero(level == v) for v in range(len(boundary))]
    limited = bool((most_in_flight < problem.micro_batches)[np.isfinite(problem.time_s)].any())
    return Tables(problem, tuple(sizes), configs, most_in_flight, boundary, tuple(columns), limited, deadline)


def _most_in_flight(problem: IterationProblem) -> np.ndarray:
    if problem.fixed_bytes is None or problem.activation_bytes is None:
        return np.full(problem.time_s.shape, _UNLIMITED, dtype=np.int32)
    in_flight = most_that_fit(problem.fixed_bytes, problem.activation_bytes, problem.memory_bytes)
    return np.asarray(np.clip(in_flight, 0, _UNLIMITED), dtype=np.int32)


def last_within(seconds: np.ndarray) -> np.ndarray:
    """[G, L] by first layer, one past the last layer of the longest stage with finite time; 0 if there is none."""
    finite = np.isfinite(seconds)
    reach = seconds.shape[2] - np.argmax(finite[:, :, ::-1], axis=2)
    return np.where(finite.any(axis=2), reach, 0)


def under_cap(tables: Tables, seconds: np.ndarray, cap: float) -> list[np.ndarray]:
    """[V] of [G, L, L]: stage times plus the boundary before the stage, infinite above the cap."""
    capped = []
    for boundary in tables.boundary_s:
        total = seconds + boundary[None, :, None] if boundary.any() else seconds
        capped.append(np.where(total <= cap, total, np.inf))
    return capped


def extend(
    tables: Tables, capped: list[np.ndarray], reach: list[np.ndarray], after: np.ndarray, first: int, low: int = 0
) -> np.ndarray:
    """[D + 1] least sums of the states (first, r), from those of the later layers.

    Args:
        tables: the instance.
        capped: stage times by level (see `under_cap`).
        reach: their `last_within`.
        after: [L + 1, D + 1] least sums of the next states.
        first: layer of the states to compute.
        low: first layer of `after` with finite sums.
    """
    devices = tables.problem.devices
    best = np.full(devices + 1, np.inf)
    for level, columns in enumerate(tables.columns):
        if first == 0:
            columns = columns[columns == devices]
        for g, size in enumerate(tables.sizes):
            stop = int(reach[level][g, first])
            begin = max(first + 1, low)
            if stop < begin:
                continue
            seconds = capped[level][g, first, begin - 1 : stop, None]
            if len(columns) == devices + 1:
                block = after[begin : stop + 1, : devices + 1 - size] + seconds
                np.minimum(best[size:], block.min(axis=0), out=best[size:])
            else:
                wide = columns[columns >= size]
                block = after[begin : stop + 1, wide - size] + seconds
                best[wide] = np.minimum(best[wide], block.min(axis=0))
    return best


def backward(tables: Tables, cap: float) -> np.ndarray:
    """[L + 1, D + 1] least sum of stage times of every state under the cap, with memory of one micro-batch in flight.

    Raises:
        OutOfTime: the deadline passed.
    """
    layers, devices = tables.problem.layers, tables.problem.devices
    capped = under_cap(tables, tables.relaxed, cap)
    reach = [last_within(table) for table in capped]
    table = np.full((layers + 1, devices + 1), np.inf)
    table[layers, 0 if tables.problem.use_all else slice(None)] = 0.0
    for first in range(layers - 1, -1, -1):
        tables.deadline.check()
        table[first] = extend(tables, capped, reach, table, first)
    return table


def path_of(
    tables: Tables, cap: float, following: Callable[[int], tuple[np.ndarray, np.ndarray]]
) -> list[tuple[int, int, int]]:
    """(mesh size, first layer, last layer) of each stage behind the least sum of all layers on all devices.

    Args:
        tables: the instance.
        cap: on every stage.
        following: by number of stages so far, [G, L, L] stage times and [L + 1, D + 1] least sums of the states after.
    """
    path: list[tuple[int, int, int]] = []
    first, devices_left = 0, tables.problem.devices
    while first < tables.problem.layers:
        seconds, after = following(len(path))
        level = next(v for v, columns in enumerate(tables.columns) if devices_left in columns)
        steps = []
        for g, size in enumerate(tables.sizes):
            if size <= devices_left:
                total = seconds[g, first, first:] + tables.boundary_s[level, first]
                totals = np.where(total <= cap, total, np.inf) + after[first + 1 :, devices_left - size]
                at = int(np.argmin(totals))
                steps.append((float(totals[at]), g, first + at, devices_left - size))
        _, g, last, devices_left = min(steps)
        path.append((g, first, last))
        first = last + 1
    return path


def pick_config(tables: Tables, g: int, first: int, last: int, in_flight: int) -> MeshStage:
    """The stage in the fastest configuration of a size that fits with the micro-batches in flight."""
    needed = min(in_flight, tables.problem.micro_batches)
    configs = tables.configs[g]
    bears = tables.most_in_flight[first, last, configs] >= needed
    times = np.where(bears, tables.problem.time_s[first, last, configs], np.inf)
    return MeshStage(first, last, int(configs[np.argmin(times)]))


def solve_iteration(search: Search) -> None:
    """Find the least iteration time and prove it.

    A pass takes O(L^2 G D) for L layers, G mesh sizes and D devices, and as much again for every stage when memory
    binds.
    """
    problem: IterationProblem = search.problem
    search.space = "all cuts of the chain, meshes in line and their configurations"
    tables = tables_of(problem, search.deadline)
    if not tables.sizes:
        search.prove(np.inf)
        return
    values = tables.candidates()
    ranges = BottleneckSearch(values, problem.micro_batches - 1, search.objective)
    while (step := ranges.next_cap()) is not None:
        least_sum, stages = _least_sum(tables, *step)
        search.count(candidates=len(values), passes=tables.passes, staged_passes=tables.staged_passes)
        longest = np.inf
        if stages is not None:
            decision = tuple(stages)
            longest = max(problem.judge(decision).parts)
            search.offer(decision, least_sum + (problem.micro_batches - 1) * longest)
        ranges.settle(least_sum if stages is not None else np.inf, longest)
        search.prove(min(ranges.bound, search.objective))
    search.prove(min(ranges.bound, search.objective))


def _least_sum(tables: Tables, cap: float, enough: float) -> tuple[float, list[MeshStage] | None]:
    """The least sum of stage times under a cap, and its plan; None if no sum is below `enough`."""
    tables.passes += 1
    problem = tables.problem
    table = backward(tables, cap)
    least_sum = float(table[0, problem.devices])
    if not least_sum < enough:
        return least_sum, None
    path = path_of(tables, cap, lambda _: (tables.relaxed, table))
    stages = [_in_place(tables, *step, len(path) - i) for i, step in enumerate(path)]
    if problem.judge(tuple(stages)).feasible:
        return least_sum, stages
    return _least_staged_sum(tables, cap, enough)


def _in_place(tables: Tables, g: int, first: int, last: int, in_flight: int) -> MeshStage:
    """The stage in a fastest configuration; of equally fast ones in one that fits with the micro-batches in flight."""
    fastest = pick_config(tables, g, first, last, 1)
    fitting = pick_config(tables, g, first, last, in_flight)
    times = tables.problem.time_s[first, last]
    return fitting if times[fitting.config] == times[fastest.config] else fastest


def _least_staged_sum(tables: Tables, cap: float, enough: float) -> tuple[float, list[MeshStage] | None]:
    """Like `_least_sum`, but with exact memory: states by their number of stages, fewest first."""
    tables.staged_passes += 1
    problem = tables.problem
    layers, devices = problem.layers, problem.devices
    current = np.full((layers + 1, devices + 1), np.inf)
    current[layers, 0 if problem.use_all else slice(None)] = 0.0
    best = np.full_like(current, np.inf)
    history = [current]
    stage_count = 0
    while len(history) <= min(layers, devices):
        count = len(history)
        capped = under_cap(tables, tables.stage_seconds(count), cap)
        reach = [last_within(table) for table in capped]
        active = np.flatnonzero(np.isfinite(current).any(axis=1))
        if not len(active):
            break
        next_table = np.full_like(current, np.inf)
        for first in range(int(active[-1]) - 1, -1, -1):
            tables.deadline.check()
            row = extend(tables, capped, reach, current, first, int(active[0]))
            row[(row >= best[first]) | (row >= enough)] = np.inf
            next_table[first] = row
        np.minimum(best, next_table, out=best)
        history.append(next_table)
        if next_table[0, devices] < enough:
            enough, stage_count = float(next_table[0, devices]), count
        current = next_table
    if not stage_count:
        return np.inf, None
    path = path_of(tables, cap, lambda i: (tables.stage_seconds(stage_count - i), history[stage_count - i - 1]))
    return enough, [pick_config(tables, *step, stage_count - i) for i, step in enumerate(path)]


PARTITION_SOLVERS.register("iteration-dp", PartitionSolver(IterationProblem, solve_iteration))

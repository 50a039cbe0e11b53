"""One pass over a chain on device meshes: the least sum of stage times under a cap on every stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.memory import most_that_fit
from planner.solvers.partition._deadline import Deadline
from planner.space.partition.iteration import IterationProblem, MeshStage

_UNLIMITED = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Tables:
    """An instance as the passes use it. L layers, C configurations, G mesh sizes, V levels, D devices.

    A state (i, r) has layers i.. still to place on the last r devices in line; its mesh starts at device D - r.

    Attributes:
        problem: the instance.
        sizes: [G] distinct mesh sizes, ascending.
        configs: [G] configurations of each size.
        most_in_flight: [L, L, C] how many micro-batches fit; `_UNLIMITED` where memory does not matter.
        boundary_s: [V, L] with 0 for the first layer; V = 1 and zero when boundaries are free.
        columns: [V] the r of the states whose boundary is of that level.
        limited: whether memory tells stages apart at all.
    """

    problem: IterationProblem
    sizes: tuple[int, ...]
    configs: tuple[np.ndarray, ...]
    most_in_flight: np.ndarray
    boundary_s: np.ndarray
    columns: tuple[np.ndarray, ...]
    limited: bool

    def stage_seconds(self, in_flight: int) -> np.ndarray:
        """[G, L, L] time of the fastest configuration of each size that bears that many micro-batches."""
        needed = min(in_flight, self.problem.micro_batches)
        times = np.where(self.most_in_flight >= needed, self.problem.time_s, np.inf) if self.limited else None
        source = self.problem.time_s if times is None else times
        return np.stack([source[:, :, configs].min(axis=2) for configs in self.configs])

    def candidates(self) -> np.ndarray:
        """All values that the longest stage can take, ascending."""
        usable = np.where(self.most_in_flight >= 1, self.problem.time_s, np.inf)
        usable = usable[:, :, self.problem.config_devices <= self.problem.devices]
        values = [(usable + boundary[:, None, None]).ravel() for boundary in self.boundary_s]
        joined = np.concatenate(values)
        unique: np.ndarray = np.unique(joined[np.isfinite(joined)])
        return unique


def tables_of(problem: IterationProblem) -> Tables:
    """Group configurations by mesh size and find what memory bears."""
    sizes = sorted({int(n) for n in problem.config_devices if n <= problem.devices})
    configs = tuple(np.flatnonzero(problem.config_devices == n) for n in sizes)
    most = _most_in_flight(problem)
    boundary = np.zeros((1, problem.layers))
    columns: list[np.ndarray] = [np.arange(problem.devices + 1)]
    if problem.boundary_s is not None and problem.boundary_level is not None:
        boundary = np.array(problem.boundary_s, dtype=np.float64)
        boundary[:, 0] = 0.0
        level = problem.boundary_level[
            np.minimum(problem.devices - np.arange(problem.devices + 1), problem.devices - 1)
        ]
        columns = [np.flatnonzero(level == v) for v in range(len(boundary))]
    limited = bool((most < problem.micro_batches)[np.isfinite(problem.time_s)].any())
    return Tables(problem, tuple(sizes), configs, most, boundary, tuple(columns), limited)


def _most_in_flight(problem: IterationProblem) -> np.ndarray:
    if problem.fixed_bytes is None or problem.activation_bytes is None:
        return np.full(problem.time_s.shape, _UNLIMITED, dtype=np.int32)
    most = most_that_fit(problem.fixed_bytes, problem.activation_bytes, problem.memory_bytes)
    return np.asarray(np.clip(most, 0, _UNLIMITED), dtype=np.int32)


def last_within(seconds: np.ndarray) -> np.ndarray:
    """[G, L] for each first layer, one past the last layer of any stage with finite time (0 when there is none)."""
    finite = np.isfinite(seconds)
    reach = seconds.shape[2] - np.argmax(finite[:, :, ::-1], axis=2)
    return np.where(finite.any(axis=2), reach, 0)


def under_cap(tables: Tables, seconds: np.ndarray, cap: float) -> list[np.ndarray]:
    """[V] of [G, L, L]: stage times with the boundary before them, infinite above the cap."""
    found = []
    for boundary in tables.boundary_s:
        total = seconds + boundary[None, :, None] if boundary.any() else seconds
        found.append(np.where(total <= cap, total, np.inf))
    return found


def extend(
    tables: Tables, capped: list[np.ndarray], reach: list[np.ndarray], after: np.ndarray, first: int, low: int = 0
) -> np.ndarray:
    """[D + 1] least sums of the states (first, r), from those of the later layers.

    Args:
        tables: the instance.
        capped: stage times by level (see `under_cap`).
        reach: their `last_within`.
        after: [L + 1, D + 1] least sums of the states that follow.
        first: the layer whose states are wanted.
        low: states before this layer in `after` are known to be unreachable.
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


def backward(tables: Tables, seconds: np.ndarray, cap: float, deadline: Deadline) -> np.ndarray:
    """[L + 1, D + 1] least sum of stage times of every state under the cap, memory left aside; may run out of time."""
    layers, devices = tables.problem.layers, tables.problem.devices
    capped = under_cap(tables, seconds, cap)
    reach = [last_within(table) for table in capped]
    table = np.full((layers + 1, devices + 1), np.inf)
    table[layers, 0 if tables.problem.use_all else slice(None)] = 0.0
    for first in range(layers - 1, -1, -1):
        deadline.check()
        table[first] = extend(tables, capped, reach, table, first)
    return table


def forward(tables: Tables, seconds: np.ndarray, cap: float, deadline: Deadline) -> np.ndarray:
    """[L + 1, D + 1] least sum of the stages before every state under the cap, memory left aside; may run out of
    time."""
    layers, devices = tables.problem.layers, tables.problem.devices
    table = np.full((layers + 1, devices + 1), np.inf)
    table[0, devices] = 0.0
    capped = under_cap(tables, seconds, cap)
    for last in range(layers):
        deadline.check()
        row = table[last + 1]
        for level, columns in enumerate(tables.columns):
            for g, size in enumerate(tables.sizes):
                times = capped[level][g, : last + 1, last]
                begin = np.flatnonzero(np.isfinite(times))
                wide = columns[columns >= size]
                if len(begin) and len(wide):
                    block = table[begin[0] : last + 1, wide] + times[begin[0] :, None]
                    row[wide - size] = np.minimum(row[wide - size], block.min(axis=0))
    return table


def next_states(
    tables: Tables, seconds: np.ndarray, cap: float, first: int, left: int
) -> Iterator[tuple[int, int, np.ndarray]]:
    """By mesh size g: (g, devices left after it, [L - first] times of the stages that start in state (first, left))."""
    level = next(v for v, columns in enumerate(tables.columns) if left in columns)
    for g, size in enumerate(tables.sizes):
        if size <= left:
            total = seconds[g, first, first:] + tables.boundary_s[level, first]
            yield g, left - size, np.where(total <= cap, total, np.inf)


def pick_config(tables: Tables, g: int, first: int, last: int, in_flight: int) -> MeshStage:
    """The fastest configuration of a size that bears the micro-batches in flight."""
    needed = min(in_flight, tables.problem.micro_batches)
    configs = tables.configs[g]
    bears = tables.most_in_flight[first, last, configs] >= needed
    times = np.where(bears, tables.problem.time_s[first, last, configs], np.inf)
    return MeshStage(first, last, int(configs[np.argmin(times)]))

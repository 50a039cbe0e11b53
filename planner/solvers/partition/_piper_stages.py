"""Most samples in flight of each stage under a cap on its time, for all stages at once.

For a cap T, a stage with tensor degree t and data degree d gets an upper bound on the in-flight count y for which some
choices of its nodes take at most T and fit the memory, from the linear relaxation of the choices; 0 if none does.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from planner.memory import room_bytes
from planner.solvers.partition import Deadline
from planner.solvers.partition._piper_ideals import Pairs, useful_choices
from planner.space.partition import PiperProblem

UNLIMITED = 1 << 40
CAP_SLACK = 1e-11
_ROUNDING = 1e-12
_MOST_KEPT = 6_000_000
"""Up to this many cumulated savings over all stages are kept from pass to pass; more are computed in chunks."""


@dataclass(frozen=True)
class Savings:
    """Steps to slower choices that save memory, least seconds per byte first. i ideals, s steps, r stages.

    Attributes:
        members: [i, s] 1 if the step's node is in the ideal, else 0.
        lower: [r] ideal before each stage.
        upper: [r] ideal after it.
        step_s: [s] seconds a step costs.
        step_bytes: [s] activation bytes it saves.
    """

    members: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    step_s: np.ndarray
    step_bytes: np.ndarray

    def cumulated(self, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """[rows, s + 1] cumulated seconds and bytes of the first steps of the nodes of each stage."""
        held = self.members[self.upper[rows]] - self.members[self.lower[rows]]
        sums_of = []
        for step in (self.step_s, self.step_bytes):
            sums = np.zeros((len(held), len(step) + 1))
            np.cumsum(held * step, axis=1, out=sums[:, 1:])
            sums_of.append(sums)
        return sums_of[0], sums_of[1]


@dataclass(frozen=True)
class Table:
    """The stages of one tensor degree: times with the base choice (the fastest) of each node, and steps to slower ones.

    Steps are taken best first, the last one in part. r stages, k degrees d.

    Attributes:
        rows: [r] positions among all pairs.
        data: [k] data degrees.
        fixed_s: [r, k] seconds of a sample that no step changes, times d: work, cut edges, exchange of weights.
        activation_bytes: [r] bytes of a sample in flight.
        room_bytes: [r] memory left by the least bytes of the nodes.
        savings: the steps.
        cumulated: their sums for all stages; None if there are too many to keep.
    """

    rows: np.ndarray
    data: np.ndarray
    fixed_s: np.ndarray
    activation_bytes: np.ndarray
    room_bytes: np.ndarray
    savings: Savings
    cumulated: tuple[np.ndarray, np.ndarray] | None

    def limits(self, cap_s: float) -> np.ndarray:
        """[r, k] upper bounds on the samples in flight under the cap."""
        budget = cap_s * (1 + CAP_SLACK) * self.data - self.fixed_s
        if self.cumulated is not None:
            return self._limits(slice(0, len(budget)), budget, *self.cumulated)
        limits = np.zeros(budget.shape, dtype=np.int64)
        step = max(_MOST_KEPT // (len(self.savings.step_s) + 1), 1)
        for begin in range(0, len(budget), step):
            rows = slice(begin, begin + step)
            limits[rows] = self._limits(rows, budget[rows], *self.savings.cumulated(rows))
        return limits

    def _limits(self, rows: slice, budget: np.ndarray, added_s: np.ndarray, saved_bytes: np.ndarray) -> np.ndarray:
        at = _search(added_s, budget)
        last, following = np.maximum(at - 1, 0), np.minimum(at, added_s.shape[1] - 1)
        spent = np.take_along_axis(added_s, last, axis=1)
        saved = np.take_along_axis(saved_bytes, last, axis=1)
        step_s = np.take_along_axis(added_s, following, axis=1) - spent
        step = np.take_along_axis(saved_bytes, following, axis=1) - saved
        with np.errstate(invalid="ignore", divide="ignore"):
            part = np.clip((budget - spent) / step_s, 0.0, 1.0)
        saved = saved + np.where(step_s > 0, part, 0.0) * step
        grows = self.activation_bytes[rows, None] - saved
        room = np.broadcast_to(self.room_bytes[rows, None], grows.shape)
        limit = 1 + _quotient(room, grows)
        return np.where((at > 0) & (room >= 0), limit, 0)


def tables(
    problem: PiperProblem, pairs: Pairs, tensor: int, data: np.ndarray, deadline: Deadline
) -> tuple[list[Table], list[np.ndarray]]:
    """The tables of one tensor degree, which cover all data degrees together, and the useful choices of every node.

    Raises:
        OutOfTime: the deadline passed.
    """
    deadline.check()
    useful = useful_choices(problem, tensor)
    absent = np.array([float(len(c) == 0) for c in useful])
    total = problem.activation_bytes + problem.fixed_bytes
    least_bytes = np.array([total[c].min() if len(c) else 0.0 for c in useful])
    room = _room(problem)
    rows = np.flatnonzero((_sums(pairs, absent) == 0) & (_sums(pairs, least_bytes) <= room))
    if not len(rows):
        return [], useful
    same_weights = all(len(c) < 2 or np.ptp(problem.weight_bytes[c]) == 0 for c in useful)
    groups = [data] if same_weights else [data[i : i + 1] for i in range(len(data))]
    left_bytes = room - _sums(pairs, least_bytes)[rows]
    tables_by_group: list[Table] = []
    for group in groups:
        deadline.check()
        tables_by_group.append(_table(problem, pairs, rows, useful, group, left_bytes))
    return tables_by_group, useful


def _room(problem: PiperProblem) -> float:
    """Memory of a device in bytes, plus the rounding of differences of sums, so that limits are upper bounds.

    A stage whose limit is too high because of that is ruled out when its choices are computed exactly.
    """
    return room_bytes(problem.memory_bytes) + _ROUNDING * float(
        problem.activation_bytes.sum() + problem.fixed_bytes.sum()
    )


def _sums(pairs: Pairs, values: np.ndarray) -> np.ndarray:
    """[r] sum of the nodes' values over each stage."""
    of_ideal = pairs.members.astype(np.float64) @ values
    sums: np.ndarray = of_ideal[pairs.upper] - of_ideal[pairs.lower]
    return sums


def _base(problem: PiperProblem, useful: list[np.ndarray], seconds: np.ndarray) -> np.ndarray:
    """[n] every node's fastest choice, of equally fast ones the smallest; -1 without choices."""
    return np.array(
        [c[np.lexsort((problem.activation_bytes[c], seconds[c]))[0]] if len(c) else -1 for c in useful], dtype=np.int64
    )


def _transfer_bytes(problem: PiperProblem, pairs: Pairs, useful: list[np.ndarray]) -> np.ndarray:
    """[i, i] least bytes on the cut edges of the stage between ideal (row) and ideal (column)."""
    source, target = problem.edges[:, 0], problem.edges[:, 1]
    edge = np.arange(len(source))
    entering = problem.edge_bytes.copy()
    leaving = problem.edge_bytes.copy()
    for e, u, v in zip(edge.tolist(), source.tolist(), target.tolist(), strict=True):
        entering[e] += problem.input_sync_bytes[useful[v], e].min() if len(useful[v]) else 0.0
        leaving[e] += problem.output_sync_bytes[useful[u], e].min() if len(useful[u]) else 0.0
    members = pairs.members.astype(np.float64)
    has_source, has_target = members[:, source], members[:, target]
    into = (has_source * entering) @ has_target.T - (has_target @ entering)[:, None]
    open_after = (has_source * leaving) * (1 - has_target)
    out = open_after.sum(axis=1)[None, :] - (has_source * leaving) @ (1 - has_target).T
    crossing: np.ndarray = np.maximum(2 * (into + out), 0.0)
    return crossing


def _table(
    problem: PiperProblem,
    pairs: Pairs,
    rows: np.ndarray,
    useful: list[np.ndarray],
    data: np.ndarray,
    left_bytes: np.ndarray,
) -> Table:
    """The table of some data degrees; of a single one, slower choices pay for the exchange of their own weights."""
    per_weight = 4 * (data - 1) / problem.batch / problem.bandwidth_bytes_per_s
    alone = len(data) == 1
    seconds = problem.time_s + (per_weight if alone else 0.0) * problem.weight_bytes
    base = _base(problem, useful, seconds)
    node, step_s, step_bytes = _savings(problem, useful, base, seconds)
    savings = Savings(pairs.members[:, node], pairs.lower[rows], pairs.upper[rows], step_s, step_bytes)
    cumulated = savings.cumulated(slice(0, len(rows))) if len(rows) * (len(node) + 1) <= _MOST_KEPT else None
    work, weights, activation = (
        _sums(pairs, np.where(base >= 0, values[np.maximum(base, 0)], 0.0))[rows]
        for values in (seconds, problem.weight_bytes, problem.activation_bytes)
    )
    transfer = _transfer_bytes(problem, pairs, useful)[pairs.lower[rows], pairs.upper[rows]]
    fixed = (work + transfer / problem.bandwidth_bytes_per_s)[:, None]
    fixed = fixed + (0.0 if alone else weights[:, None] * per_weight)
    return Table(rows, data, np.broadcast_to(fixed, (len(rows), len(data))), activation, left_bytes, savings, cumulated)


def _savings(
    problem: PiperProblem, useful: list[np.ndarray], base: np.ndarray, seconds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps along each node's convex front of (seconds, activation bytes saved): node, seconds, bytes; best first."""
    steps: list[tuple[float, int, float, float]] = []
    for node, choices in enumerate(useful):
        if len(choices) < 2:
            continue
        slower = seconds[choices] - seconds[base[node]]
        gained = problem.activation_bytes[base[node]] - problem.activation_bytes[choices]
        points = sorted(zip(slower.tolist(), gained.tolist(), strict=True))
        hull = [(0.0, 0.0)]
        for cost, gain in points:
            while gain > hull[-1][1]:
                slope = (cost - hull[-1][0]) / (gain - hull[-1][1])
                if len(hull) > 1 and slope <= (hull[-1][0] - hull[-2][0]) / (hull[-1][1] - hull[-2][1]):
                    hull.pop()
                    continue
                hull.append((cost, gain))
        for (cost, gain), (next_cost, next_gain) in itertools.pairwise(hull):
            step = (next_cost - cost, next_gain - gain)
            steps.append((step[0] / step[1], node, *step))
    steps.sort()
    table = np.array(steps, dtype=np.float64).reshape(-1, 4)
    return table[:, 1].astype(np.int64), table[:, 2], table[:, 3]


def _quotient(room: np.ndarray, size: np.ndarray) -> np.ndarray:
    """How many times `size` fits into `room`; `UNLIMITED` for size 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        count = np.where(size > 0, np.floor(room / size), UNLIMITED)
    return np.minimum(count, UNLIMITED).astype(np.int64)


def _search(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """[r, k] how many of row r's ascending table entries are at most `wanted[r, k]`; binary search."""
    low = np.zeros(wanted.shape, dtype=np.int64)
    high = np.full(wanted.shape, table.shape[1], dtype=np.int64)
    for _ in range(int(table.shape[1]).bit_length()):
        middle = (low + high) >> 1
        inside = low < high
        below = np.take_along_axis(table, np.minimum(middle, table.shape[1] - 1), axis=1) <= wanted
        low = np.where(inside & below, middle + 1, low)
        high = np.where(inside & ~below, middle, high)
    return low

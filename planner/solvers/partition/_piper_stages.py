"""Most samples in flight of each stage under a cap on its time, for all stages at once.

For a cap T, a stage with tensor degree t and data degree d gets the largest in-flight count y for which some choices of
its nodes take at most T and fit the memory; 0 if none does. Where the nodes fall into few groups of equal memory change
(repeated layers), the counts are exact. Otherwise they are upper bounds from the linear relaxation of the choices.
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
_MOST_POINTS = 12_000_000
"""Up to this many Pareto points over all stages, exact tables are built."""
_MOST_KEPT = 6_000_000
"""Up to this many cumulated savings over all stages are kept from pass to pass; more are computed in chunks."""


@dataclass(frozen=True)
class Border:
    """Times of the stages of one tensor degree without the added seconds of slower choices. r stages, k degrees d.

    Attributes:
        rows: [r] positions among all pairs.
        time_s: [r] work of one sample with the base choice (the fastest) of each node.
        transfer_s: [r] transfers on cut edges, not divided by the replicas.
        exchange_s: [r, k] weight exchange times d.
    """

    rows: np.ndarray
    time_s: np.ndarray
    transfer_s: np.ndarray
    exchange_s: np.ndarray

    def budget(self, cap_s: float, data: np.ndarray) -> np.ndarray:
        """[r, k] seconds that slower choices may add to one sample on one replica under the cap."""
        fixed = (self.time_s + self.transfer_s)[:, None] + self.exchange_s
        budget: np.ndarray = cap_s * (1 + CAP_SLACK) * data - fixed
        return budget


@dataclass(frozen=True)
class ExactTable:
    """All Pareto points of every stage, by ascending `added_s`; `limit` is the most in flight up to that point."""

    border: Border
    data: np.ndarray
    added_s: np.ndarray
    limit: np.ndarray

    def limits(self, cap_s: float) -> np.ndarray:
        """[r, k] most samples in flight under the cap."""
        at = _search(self.added_s, self.border.budget(cap_s, self.data))
        limits = np.take_along_axis(self.limit, np.maximum(at - 1, 0), axis=1)
        return np.where(at > 0, limits, 0)


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
class RelaxedTable:
    """Linear relaxation: best steps first, the last one in part; `cumulated` are the savings unless too many."""

    border: Border
    data: np.ndarray
    activation_bytes: np.ndarray
    room_bytes: np.ndarray
    savings: Savings
    cumulated: tuple[np.ndarray, np.ndarray] | None

    def limits(self, cap_s: float) -> np.ndarray:
        """[r, k] upper bounds on the samples in flight under the cap."""
        budget = self.border.budget(cap_s, self.data)
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


Table = ExactTable | RelaxedTable


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
    if _is_regular(problem, useful) and _points(problem, useful) * len(rows) <= _MOST_POINTS:
        return [_exact(problem, pairs, rows, useful, data)], useful
    same_weights = all(len(c) < 2 or np.ptp(problem.weight_bytes[c]) == 0 for c in useful)
    groups = [data] if same_weights else [data[i : i + 1] for i in range(len(data))]
    left_bytes = room - _sums(pairs, least_bytes)[rows]
    relaxed_tables: list[Table] = []
    for group in groups:
        deadline.check()
        relaxed_tables.append(_relaxed(problem, pairs, rows, useful, group, left_bytes))
    return relaxed_tables, useful


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


def _of_base_choices(base: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[n] value of every node's base choice, 0 for a node without choices."""
    return np.where(base >= 0, values[np.maximum(base, 0)], 0.0)


def _is_regular(problem: PiperProblem, useful: list[np.ndarray]) -> bool:
    """True if every node has at most two useful choices, equal in weights and syncs."""
    for c in useful:
        if len(c) > 2:
            return False
        if len(c) == 2 and not (
            problem.weight_bytes[c[0]] == problem.weight_bytes[c[1]]
            and np.array_equal(problem.input_sync_bytes[c[0]], problem.input_sync_bytes[c[1]])
            and np.array_equal(problem.output_sync_bytes[c[0]], problem.output_sync_bytes[c[1]])
        ):
            return False
    return True


def _base(problem: PiperProblem, useful: list[np.ndarray], seconds: np.ndarray) -> np.ndarray:
    """[n] every node's fastest choice, of equally fast ones the smallest; -1 without choices."""
    return np.array(
        [c[np.lexsort((problem.activation_bytes[c], seconds[c]))[0]] if len(c) else -1 for c in useful], dtype=np.int64
    )


def _groups_by_change(
    problem: PiperProblem, useful: list[np.ndarray], base: np.ndarray
) -> dict[tuple[float, float], list[int]]:
    """Nodes with two choices, grouped by the change of (a, b) that the slower choice brings."""
    groups: dict[tuple[float, float], list[int]] = {}
    for node, c in enumerate(useful):
        if len(c) == 2:
            other = int(c[0] + c[1] - base[node])
            memory_change = (
                float(problem.activation_bytes[other] - problem.activation_bytes[base[node]]),
                float(problem.fixed_bytes[other] - problem.fixed_bytes[base[node]]),
            )
            groups.setdefault(memory_change, []).append(node)
    return dict(sorted(groups.items()))


def _points(problem: PiperProblem, useful: list[np.ndarray]) -> int:
    """Number of combinations of one count per group: how many of its nodes take the slower choice."""
    groups = _groups_by_change(problem, useful, _base(problem, useful, problem.time_s))
    points = 1
    for members in groups.values():
        points *= len(members) + 1
    return points


def _border(
    problem: PiperProblem,
    pairs: Pairs,
    rows: np.ndarray,
    useful: list[np.ndarray],
    base: np.ndarray,
    seconds: np.ndarray,
    data: np.ndarray,
    *,
    exchange: bool,
) -> Border:
    work = _sums(pairs, _of_base_choices(base, seconds))[rows]
    transfer = _transfer_bytes(problem, pairs, useful)[pairs.lower[rows], pairs.upper[rows]]
    weights = _sums(pairs, _of_base_choices(base, problem.weight_bytes))[rows] if exchange else np.zeros(len(rows))
    per_weight = 4 * (data - 1) / problem.batch / problem.bandwidth_bytes_per_s
    return Border(rows, work, transfer / problem.bandwidth_bytes_per_s, weights[:, None] * per_weight)


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


def _exact(
    problem: PiperProblem,
    pairs: Pairs,
    rows: np.ndarray,
    useful: list[np.ndarray],
    data: np.ndarray,
) -> ExactTable:
    base = _base(problem, useful, problem.time_s)
    border = _border(problem, pairs, rows, useful, base, problem.time_s, data, exchange=True)
    added = np.zeros((len(rows), 1))
    grow, fixed = np.zeros(1), np.zeros(1)
    for (change_a, change_b), members in _groups_by_change(problem, useful, base).items():
        cost = np.array([float(problem.time_s[useful[v]].max() - problem.time_s[base[v]]) for v in members])
        order = np.argsort(cost, kind="stable")
        columns = pairs.members[:, np.array(members)[order]]
        held = (columns[pairs.upper[rows]] - columns[pairs.lower[rows]]).astype(bool)
        sums, ranks = np.cumsum(held * cost[order], axis=1), np.cumsum(held, axis=1)
        least_added_s = np.full((len(rows), len(members) + 1), np.inf)
        least_added_s[:, 0] = 0.0
        at_row, at_member = np.nonzero(held)
        least_added_s[at_row, ranks[at_row, at_member]] = sums[at_row, at_member]
        counts = np.arange(len(members) + 1)
        added = (added[:, :, None] + least_added_s[:, None, :]).reshape(len(rows), -1)
        grow = (grow[:, None] + counts * change_a).ravel()
        fixed = (fixed[:, None] + counts * change_b).ravel()
    limit = _limits_at(problem, pairs, rows, base, added, grow, fixed)
    order = np.argsort(added, axis=1, kind="stable")
    added = np.take_along_axis(added, order, axis=1)
    limit = np.maximum.accumulate(np.take_along_axis(limit, order, axis=1), axis=1)
    useful_columns = np.flatnonzero(np.isfinite(added).any(axis=0))
    return ExactTable(border, data, added[:, useful_columns], limit[:, useful_columns])


def _limits_at(
    problem: PiperProblem,
    pairs: Pairs,
    rows: np.ndarray,
    base: np.ndarray,
    added: np.ndarray,
    grow: np.ndarray,
    fixed: np.ndarray,
) -> np.ndarray:
    activation = _sums(pairs, _of_base_choices(base, problem.activation_bytes))[rows]
    constant = _sums(pairs, _of_base_choices(base, problem.fixed_bytes))[rows]
    room = _room(problem) - constant[:, None] - fixed
    limit = np.where(room >= 0, _quotient(room, activation[:, None] + grow), 0)
    return np.where(np.isfinite(added), limit, 0)


def _relaxed(
    problem: PiperProblem,
    pairs: Pairs,
    rows: np.ndarray,
    useful: list[np.ndarray],
    data: np.ndarray,
    left_bytes: np.ndarray,
) -> RelaxedTable:
    alone = len(data) == 1
    per_weight = 4 * (float(data[0]) - 1) / problem.batch / problem.bandwidth_bytes_per_s if alone else 0.0
    seconds = problem.time_s + per_weight * problem.weight_bytes
    base = _base(problem, useful, seconds)
    border = _border(problem, pairs, rows, useful, base, seconds, data, exchange=not alone)
    node, step_s, step_bytes = _savings(problem, useful, base, seconds)
    savings = Savings(pairs.members[:, node], pairs.lower[rows], pairs.upper[rows], step_s, step_bytes)
    cumulated = savings.cumulated(slice(0, len(rows))) if len(rows) * (len(node) + 1) <= _MOST_KEPT else None
    activation = _sums(pairs, _of_base_choices(base, problem.activation_bytes))[rows]
    return RelaxedTable(border, data, activation, left_bytes, savings, cumulated)


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

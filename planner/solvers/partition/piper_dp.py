"""Piper's problem exactly: bisection on the time per sample, each step a dynamic program over ideals.

Under a cap T on the stage times, a state is an ideal and the replicas (sum of d) of the stages after it; its value is
the fewest devices of those stages. Dominated states (no fewer replicas, no fewer devices) are dropped. A stage enters
with each d that bears more samples in flight than all smaller ones. A plan under T exists if the empty ideal is reached
within the devices. About ten passes close the bisection; the last one proves that no plan is better than the best one.
The in-flight limits of stages are upper bounds. So the stages of a pass's plan are solved exactly; a stage that exceeds
T is ruled out and the pass repeated.

The in-flight limits of all stages under a cap are worked out together: for a stage with tensor degree t and data degree
d, an upper bound on the in-flight count y for which some choices of its nodes take at most T and fit the memory, from
the linear relaxation of the choices; 0 if none does.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from planner.memory import room_bytes
from planner.solvers.partition import (
    PARTITION_SOLVERS,
    RELATIVE_TOLERANCE,
    Deadline,
    OutOfTime,
    PartitionSolver,
    Search,
)
from planner.solvers.partition._piper_ideals import Options, Pairs, cheapest_choices, pairs_of, run_pass, useful_choices
from planner.space.cuts import divisors
from planner.space.partition import PiperDecision, PiperProblem, PiperStage

UNLIMITED = 1 << 40
CAP_SLACK = 1e-11
_ROUNDING = 1e-12
_MOST_SUMS = 6_000_000
"""Most cumulated savings of stages that are in memory at a time."""


@dataclass(frozen=True)
class Table:
    """The stages of one tensor degree: times with the base choice (the fastest) of each node, and steps to slower ones.

    Steps save memory; they are taken least seconds per byte first, the last one in part. r stages, k degrees d, i
    ideals, s steps.

    Attributes:
        rows: [r] positions among all pairs.
        data: [k] data degrees.
        fixed_s: [r, k] seconds of a sample that no step changes, times d: work, cut edges, exchange of weights.
        activation_bytes: [r] bytes of a sample in flight.
        room_bytes: [r] memory left by the least bytes of the nodes.
        members: [i, s] 1 if the step's node is in the ideal, else 0.
        lower: [r] ideal before each stage.
        upper: [r] ideal after it.
        step_s: [s] seconds a step costs.
        step_bytes: [s] activation bytes it saves.
    """

    rows: np.ndarray
    data: np.ndarray
    fixed_s: np.ndarray
    activation_bytes: np.ndarray
    room_bytes: np.ndarray
    members: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    step_s: np.ndarray
    step_bytes: np.ndarray

    def limits(self, cap_s: float) -> np.ndarray:
        """[r, k] upper bounds on the samples in flight under the cap."""
        budget = cap_s * (1 + CAP_SLACK) * self.data - self.fixed_s
        step = max(_MOST_SUMS // (len(self.step_s) + 1), 1)
        parts = (slice(begin, begin + step) for begin in range(0, len(budget), step))
        return np.concatenate([self._limits(rows, budget[rows]) for rows in parts])

    def _limits(self, rows: slice, budget: np.ndarray) -> np.ndarray:
        held = self.members[self.upper[rows]] - self.members[self.lower[rows]]
        added_s, saved_bytes = (
            np.cumsum(np.pad(held * step, ((0, 0), (1, 0))), axis=1) for step in (self.step_s, self.step_bytes)
        )
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
    work, weights, activation = (
        _sums(pairs, np.where(base >= 0, values[np.maximum(base, 0)], 0.0))[rows]
        for values in (seconds, problem.weight_bytes, problem.activation_bytes)
    )
    ends = pairs.lower[rows], pairs.upper[rows]
    transfer = _transfer_bytes(problem, pairs, useful)[ends]
    fixed = (work + transfer / problem.bandwidth_bytes_per_s)[:, None]
    fixed = fixed + (0.0 if alone else weights[:, None] * per_weight)
    return Table(rows, data, fixed, activation, left_bytes, pairs.members[:, node], *ends, step_s, step_bytes)


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


_STEP = 1e-10
"""Relative difference below the best plan at which the last pass looks for a better one."""


@dataclass
class _Passes:
    """Tables of an instance, and what the passes so far have found out."""

    search: Search
    pairs: Pairs
    tables: dict[int, list[Table]]
    useful: dict[int, list[np.ndarray]]
    alone_s: np.ndarray
    """[c, k] seconds of a stage of one node with choice c at the k-th data degree, without transfers."""
    share_s: np.ndarray
    """[c, k] the same times the stage's devices: device-seconds that the node adds to any stage."""
    solved: dict[tuple[int, int, int, int], tuple[float, np.ndarray]] = field(default_factory=dict)
    """By (row, tensor, data, in flight): `cheapest_choices` of the stage."""
    passes: int = 0
    states: int = 0

    @property
    def problem(self) -> PiperProblem:
        """The instance."""
        return cast(PiperProblem, self.search.problem)

    def count(self) -> None:
        """Report the counts so far."""
        pairs = self.pairs
        self.search.count(
            ideals=len(pairs.members), pairs=len(pairs.lower), passes=self.passes, states=self.states,
            stages_solved=len(self.solved),
        )  # fmt: skip


def solve_piper(search: Search) -> None:
    """Find the least time per sample and prove it.

    With r pairs of ideals, t tensor and d data degrees, a pass takes O(r t d log n) for the limits and as much again as
    there are undominated states.
    """
    search.space = "all stages between ideals, tensor and data degrees, and choices of the nodes"
    passes = _prepare(search)
    passes.count()
    if not np.isfinite(
        _least_device_seconds(passes, np.inf)
    ).all():  # a node has no choice at any degree that the devices allow
        search.prove(np.inf)
        return
    floor = _floor(passes)
    search.prove(min(floor, search.objective))
    bound = _bisect(passes, floor)
    if passes.pairs.complete:
        search.prove(min(bound, search.objective))


def _prepare(search: Search) -> _Passes:
    problem, deadline = search.problem, search.deadline
    pairs = pairs_of(problem.node_count, problem.edges, problem.edge_bytes, deadline)
    counts = np.array(divisors(problem.batch, problem.devices), dtype=np.int64)
    tables_by_degree: dict[int, list[Table]] = {}
    useful: dict[int, list[np.ndarray]] = {}
    for tensor in problem.tensor_degrees:
        data = counts[counts * tensor <= problem.devices]
        if len(data):
            tables_by_degree[tensor], useful[tensor] = tables(problem, pairs, tensor, data, deadline)
    exchange = 4 * (counts - 1) / problem.batch / problem.bandwidth_bytes_per_s * problem.weight_bytes[:, None]
    alone = (problem.time_s[:, None] + exchange) / counts
    devices = problem.choice_tensor[:, None] * counts
    alone[devices > problem.devices] = np.inf
    return _Passes(search, pairs, tables_by_degree, useful, alone, alone * devices)


def _least_device_seconds(passes: _Passes, cap: float) -> np.ndarray:
    """[n] least device-seconds of each node in a stage under the cap; infinite if no choice keeps the cap."""
    allowed = passes.alone_s <= cap * (1 + CAP_SLACK)
    share = np.where(allowed & np.isfinite(passes.alone_s), passes.share_s, np.inf).min(axis=1)
    of_node = np.full(passes.problem.node_count, np.inf)
    np.minimum.at(of_node, passes.problem.choice_node, share)
    return of_node


def _floor(passes: _Passes) -> float:
    """Lower bound on the time per sample: below it the nodes need more device-seconds than there are."""
    devices = passes.problem.devices
    low_s, high_s = (
        0.0,
        max(float(_least_device_seconds(passes, np.inf).sum()), float(passes.alone_s.min(axis=1).max())),
    )
    high_s = max(high_s, 1e-300)
    for _ in range(100):
        middle_s = (low_s + high_s) / 2
        if _least_device_seconds(passes, middle_s).sum() <= devices * middle_s * (1 + CAP_SLACK):
            high_s = middle_s
        else:
            low_s = middle_s
        if high_s - low_s <= 1e-12 * high_s:
            break
    return low_s


def _bisect(passes: _Passes, floor: float) -> float:
    """Bisect the cap and offer the plans found; returns a lower bound, valid if the pairs are complete."""
    search, bound = passes.search, floor
    factor, unchecked = 1.02, True
    while bound < search.objective * (1 - RELATIVE_TOLERANCE / 2) and not search.deadline.passed:
        best = search.objective
        if search.decision is None:
            cap = max(floor, 1e-300) * factor if factor < 10 else np.inf
            factor = 1 + (factor - 1) * 3
        elif unchecked and bound > best * 0.98:
            cap, unchecked = best * (1 - _STEP), False
        else:
            cap = (bound + best) / 2
        try:
            stages = _attempt(passes, cap)
        except OutOfTime:
            break
        if stages is None:
            bound = max(bound, cap)
            if cap == np.inf:
                break
        else:
            _offer(search, tuple(stages), cap)
            unchecked = True
    return bound


def _offer(search: Search, decision: PiperDecision, cap: float) -> None:
    if not search.offer(decision) or search.objective > cap * (1 + RELATIVE_TOLERANCE):
        verdict = search.problem.judge(decision)
        raise RuntimeError(
            f"the search and the judge disagree: {verdict.objective} against {cap}, {verdict.violations}"
        )


def _attempt(passes: _Passes, cap: float) -> list[PiperStage] | None:
    """A plan under the cap; None if there is none."""
    device_seconds = _least_device_seconds(passes, cap)
    if not np.isfinite(device_seconds).all():
        return None
    members = passes.pairs.members
    reserve = np.ceil(members @ device_seconds / cap * (1 - 1e-6)) if cap > 0 else np.zeros(len(members))
    options = _options(passes, cap)
    while True:
        passes.passes += 1
        path, states = run_pass(passes.problem, passes.pairs, options, reserve, passes.search.deadline)
        passes.states += states
        passes.count()
        if path is None:
            return None
        stages = [_exact_stage(passes, cap, *step) for step in path]
        if all(stage is not None for stage in stages):
            return [stage for stage in stages if stage is not None]
        options = _options(passes, cap)


def _exact_stage(passes: _Passes, cap: float, row: int, tensor: int, data: int, after: int) -> PiperStage | None:
    """A stage with its best choices; None if these exceed the cap or the memory."""
    key = row, tensor, data, 1 + -(-after // data)
    pairs = passes.pairs
    inside = (pairs.members[pairs.upper[row]] - pairs.members[pairs.lower[row]]).astype(bool)
    if key not in passes.solved:
        useful, deadline = passes.useful[tensor], passes.search.deadline
        passes.solved[key] = cheapest_choices(passes.problem, useful, inside, *key[2:], deadline)
    seconds, choices = passes.solved[key]
    if _exceeds(seconds, cap):
        return None
    nodes = tuple(np.flatnonzero(inside).tolist())
    firsts = [passes.problem.options(v, tensor)[0] for v in nodes]
    return PiperStage(nodes, tensor, data, tuple((choices - firsts).tolist()))


def _exceeds(seconds: float, cap: float) -> bool:
    """True if a stage is too slow for a cap, or fits no device."""
    return bool(np.isinf(seconds)) or seconds > cap * (1 + 2 * CAP_SLACK)


def _options(passes: _Passes, cap: float) -> Options:
    """The stages under the cap, at each degree t with every d that bears more in flight than all smaller ones."""
    parts: list[tuple[np.ndarray, ...]] = [tuple(np.zeros((4, 0), dtype=np.int64))]
    for tensor, degree_tables in passes.tables.items():
        if not degree_tables:
            continue
        data = np.concatenate([table.data for table in degree_tables])
        limit = np.concatenate([table.limits(cap) for table in degree_tables], axis=1)
        rows = degree_tables[0].rows
        _apply_ruled_out(passes, cap, tensor, rows, data, limit)
        most_after = np.where(limit > 0, np.minimum((limit - 1) * data, passes.problem.batch), -1)
        best_before = np.maximum.accumulate(most_after, axis=1)
        used = most_after >= 0
        used[:, 1:] &= most_after[:, 1:] > best_before[:, :-1]
        at_row, at_data = np.nonzero(used)
        parts.append((rows[at_row], np.full(len(at_row), tensor), data[at_data], most_after[at_row, at_data]))
    row, tensor_of, data_of, most_after_of = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(row, kind="stable")  # pairs are sorted by their lower ideal
    row = row[order]
    ends = passes.pairs.lower[row], passes.pairs.upper[row]
    return Options(*ends, tensor_of[order], data_of[order], most_after_of[order], row)


def _apply_ruled_out(
    passes: _Passes, cap: float, tensor: int, rows: np.ndarray, data: np.ndarray, limit: np.ndarray
) -> None:
    """Lower the in-flight limits of stages that are known to exceed the cap or the memory."""
    for (row, t, d, in_flight), (seconds, _) in passes.solved.items():
        if t == tensor and _exceeds(seconds, cap):
            at = int(np.searchsorted(rows, row)), int(np.searchsorted(data, d))
            limit[at] = min(limit[at], in_flight - 1)


PARTITION_SOLVERS.register("piper-dp", PartitionSolver(PiperProblem, solve_piper))

"""Piper's problem exactly: bisection on the time per sample, each step a dynamic program over ideals.

Under a cap T on the stage times, a state is an ideal and the replicas (sum of d) of the stages after it; its value is
the fewest devices of those stages. Dominated states (no fewer replicas, no fewer devices) are dropped. A stage enters
with each d that bears more samples in flight than all smaller ones. A plan under T exists if the empty ideal is reached
within the devices. About ten passes close the bisection; the last one proves that no plan is better than the best one.
The in-flight limits of stages are upper bounds. So the stages of a pass's plan are solved exactly; a stage that exceeds
T is ruled out and the pass repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np

from planner.solvers.partition import PARTITION_SOLVERS, RELATIVE_TOLERANCE, OutOfTime, PartitionSolver, Search
from planner.solvers.partition._piper_ideals import Options, Pairs, cheapest_choices, pairs_of, run_pass
from planner.solvers.partition._piper_stages import CAP_SLACK, Table, tables
from planner.space.cuts import divisors
from planner.space.partition import PiperDecision, PiperProblem, PiperStage

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
    ruled_out: dict[tuple[int, int, int], list[tuple[int, float]]] = field(default_factory=dict)
    """By (row, tensor, data): pairs of an in-flight count and the stage's exact seconds; infinite if it never fits."""
    passes: int = 0
    states: int = 0

    @property
    def problem(self) -> PiperProblem:
        """The instance."""
        return cast(PiperProblem, self.search.problem)

    def count(self) -> None:
        """Report the counts so far."""
        pairs, ruled_out = self.pairs, sum(len(v) for v in self.ruled_out.values())
        self.search.count(
            ideals=len(pairs.members), pairs=len(pairs.lower), passes=self.passes, states=self.states,
            ruled_out=ruled_out,
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
    """A stage with its best choices; None if these exceed the cap, and then the stage is ruled out."""
    in_flight = 1 + -(-after // data)
    pairs, useful = passes.pairs, passes.useful[tensor]
    inside = (pairs.members[pairs.upper[row]] - pairs.members[pairs.lower[row]]).astype(bool)
    cheapest = cheapest_choices(passes.problem, useful, inside, data, in_flight, passes.search.deadline)
    seconds = np.inf if cheapest is None else cheapest[0]
    if cheapest is None or seconds > cap * (1 + 2 * CAP_SLACK):
        passes.ruled_out.setdefault((row, tensor, data), []).append((in_flight, seconds))
        return None
    nodes = np.flatnonzero(inside)
    choices = tuple(
        int(c - passes.problem.options(v, tensor)[0]) for v, c in zip(nodes.tolist(), cheapest[1].tolist(), strict=True)
    )
    return PiperStage(tuple(nodes.tolist()), tensor, data, choices)


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
    for (row, t, d), entries in passes.ruled_out.items():
        slowest_s = cap * (1 + 2 * CAP_SLACK)
        counts = [y for y, seconds in entries if t == tensor and (seconds > slowest_s or np.isinf(seconds))]
        if counts:
            at = int(np.searchsorted(rows, row)), int(np.searchsorted(data, d))
            limit[at] = min(limit[at], min(counts) - 1)


PARTITION_SOLVERS.register("piper-dp", PartitionSolver(PiperProblem, solve_piper))

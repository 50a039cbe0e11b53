"""Piper's problem exactly: bisection on the time per sample over a DP on ideals.

Under a cap T on the stage times, let a state be an ideal and the replicas (sum of d) of the stages after it; its value
is the fewest devices those stages take. States that another one beats in both replicas and devices are dropped, and a
stage enters only with the smallest d that bears its samples in flight. The whole graph fits T when the empty ideal can
be reached within the devices. About ten such passes close the bisection; the last one shows that nothing below the plan
found exists. Where a stage's limits are only bounds (unlike nodes), the stages of the plan found are solved exactly,
and a stage that fails is ruled out for that cap and the pass repeated.
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
"""A plan is proven optimal by showing that nothing is better by this much."""


@dataclass
class _Passes:
    """What all passes share."""

    search: Search
    pairs: Pairs
    tables: dict[int, list[Table]]
    useful: dict[int, list[np.ndarray]]
    alone_s: np.ndarray
    """[c, k] time of a stage of one node with choice c at the k-th data degree, transfers left out."""
    share_s: np.ndarray
    """[c, k] the same in device-seconds: what the node adds to any stage's time, times the stage's devices."""
    ruled_out: dict[tuple[int, int, int], list[tuple[int, float]]] = field(default_factory=dict)
    """By (row, tensor, data): in-flight counts from which on a stage needs that much time (infinite: never fits)."""
    passes: int = 0
    states: int = 0

    @property
    def problem(self) -> PiperProblem:
        """What is solved."""
        return cast(PiperProblem, self.search.problem)

    def count(self) -> None:
        """Say what was done so far."""
        pairs, ruled_out = self.pairs, sum(len(v) for v in self.ruled_out.values())
        self.search.count(
            ideals=len(pairs.members), pairs=len(pairs.lower), passes=self.passes, states=self.states,
            ruled_out=ruled_out,
        )  # fmt: skip


def solve_piper(search: Search) -> None:
    """The least time per sample.

    With r pairs of ideals, t tensor and d data degrees, a pass takes O(r t d log n) for the limits and as much again as
    there are undominated states.
    """
    search.space = "all stages between ideals, tensor and data degrees, and choices of the nodes"
    passes = _prepare(search)
    passes.count()
    if not np.isfinite(_least_shares(passes, np.inf)).all():  # no choice at any degree that the devices allow
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
    found: dict[int, list[Table]] = {}
    useful: dict[int, list[np.ndarray]] = {}
    for tensor in problem.tensor_degrees:
        data = counts[counts * tensor <= problem.devices]
        if len(data):
            found[tensor], useful[tensor] = tables(problem, pairs, tensor, data, deadline)
    exchange = 4 * (counts - 1) / problem.batch / problem.bandwidth_bytes_per_s * problem.weight_bytes[:, None]
    alone = (problem.time_s[:, None] + exchange) / counts
    devices = problem.choice_tensor[:, None] * counts
    alone[devices > problem.devices] = np.inf
    return _Passes(search, pairs, found, useful, alone, alone * devices)


def _least_shares(passes: _Passes, cap: float) -> np.ndarray:
    """[n] device-seconds that every node takes at the least in a stage within the cap; infinite when none is."""
    within = passes.alone_s <= cap * (1 + CAP_SLACK)
    share = np.where(within & np.isfinite(passes.alone_s), passes.share_s, np.inf).min(axis=1)
    least = np.full(passes.problem.node_count, np.inf)
    np.minimum.at(least, passes.problem.choice_node, share)
    return least


def _floor(passes: _Passes) -> float:
    """A time per sample that no plan is below: under it, the nodes alone take more than all devices give."""
    devices = passes.problem.devices
    low, high = 0.0, max(float(_least_shares(passes, np.inf).sum()), float(passes.alone_s.min(axis=1).max()))
    high = max(high, 1e-300)
    for _ in range(100):
        middle = (low + high) / 2
        if _least_shares(passes, middle).sum() <= devices * middle * (1 + CAP_SLACK):
            high = middle
        else:
            low = middle
        if high - low <= 1e-12 * high:
            break
    return low


def _bisect(passes: _Passes, floor: float) -> float:
    """Close in on the least cap, offering plans; what is proven as far as all ideals are known."""
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
    """A plan within the cap; None when there is none."""
    least = _least_shares(passes, cap)
    if not np.isfinite(least).all():
        return None
    members = passes.pairs.members
    reserve = np.ceil(members @ least / cap * (1 - 1e-6)) if cap > 0 else np.zeros(len(members))
    options = _options(passes, cap)
    while True:
        passes.passes += 1
        path, states = run_pass(passes.problem, passes.pairs, options, reserve, passes.search.deadline)
        passes.states += states
        passes.count()
        if path is None:
            return None
        stages = [_settle(passes, cap, *step) for step in path]
        if all(stage is not None for stage in stages):
            return [stage for stage in stages if stage is not None]
        passes.search.deadline.check()
        options = _options(passes, cap)


def _settle(passes: _Passes, cap: float, row: int, tensor: int, data: int, after: int) -> PiperStage | None:
    """A stage with its best choices; None (and remembered) when they do not keep the cap after all."""
    in_flight = 1 + -(-after // data)
    pairs, useful = passes.pairs, passes.useful[tensor]
    inside = (pairs.members[pairs.upper[row]] - pairs.members[pairs.lower[row]]).astype(bool)
    answer = cheapest_choices(passes.problem, useful, inside, data, in_flight)
    seconds = np.inf if answer is None else answer[0]
    if answer is None or seconds > cap * (1 + 2 * CAP_SLACK):
        passes.ruled_out.setdefault((row, tensor, data), []).append((in_flight, seconds))
        return None
    nodes = np.flatnonzero(inside)
    picked = tuple(
        int(c - passes.problem.options(v, tensor)[0]) for v, c in zip(nodes.tolist(), answer[1].tolist(), strict=True)
    )
    return PiperStage(tuple(nodes.tolist()), tensor, data, picked)


def _options(passes: _Passes, cap: float) -> Options:
    """The stages that keep the cap, each degree t with every d that bears more in flight than the smaller ones."""
    parts: list[tuple[np.ndarray, ...]] = [tuple(np.zeros((4, 0), dtype=np.int64))]
    for tensor, found in passes.tables.items():
        if not found:
            continue
        data = np.concatenate([table.data for table in found])
        limit = np.concatenate([table.limits(cap) for table in found], axis=1)
        rows = found[0].border.rows
        _apply_ruled_out(passes, cap, tensor, rows, data, limit)
        most_after = np.where(limit > 0, np.minimum((limit - 1) * data, passes.problem.batch), -1)
        best_before = np.maximum.accumulate(most_after, axis=1)
        kept = most_after >= 0
        kept[:, 1:] &= most_after[:, 1:] > best_before[:, :-1]
        at_row, at_data = np.nonzero(kept)
        parts.append((rows[at_row], np.full(len(at_row), tensor), data[at_data], most_after[at_row, at_data]))
    row, tensor_of, data_of, most = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(row, kind="stable")  # pairs are sorted by their lower ideal
    row = row[order]
    ends = passes.pairs.lower[row], passes.pairs.upper[row]
    return Options(*ends, tensor_of[order], data_of[order], most[order], row)


def _apply_ruled_out(
    passes: _Passes, cap: float, tensor: int, rows: np.ndarray, data: np.ndarray, limit: np.ndarray
) -> None:
    """Lower the limits of stages that turned out to take more than the cap, or not to fit whatever it is."""
    for (row, t, d), entries in passes.ruled_out.items():
        most_s = cap * (1 + 2 * CAP_SLACK)
        counts = [y for y, seconds in entries if t == tensor and (seconds > most_s or np.isinf(seconds))]
        if counts:
            at = int(np.searchsorted(rows, row)), int(np.searchsorted(data, d))
            limit[at] = min(limit[at], min(counts) - 1)


PARTITION_SOLVERS.register("piper-dp", PartitionSolver(PiperProblem, solve_piper))

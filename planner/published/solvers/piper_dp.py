"""Piper's problem exactly: bisection on the time per sample, each step a dynamic program over ideals.

Under a cap T on the stage times, a state is an ideal and the replicas (sum of d) of the stages after it; its value is
the fewest devices of those stages. Dominated states (no fewer replicas, no fewer devices) are dropped. A stage enters
with each d that bears more samples in flight than all smaller ones. A plan under T exists if the empty ideal is reached
within the devices. About ten passes close the bisection; the last one proves that no plan is better than the best one.
The in-flight limits of stages are upper bounds. So the stages of a pass's plan are solved exactly; a stage that exceeds
T is ruled out and the pass repeated.

The in-flight limits of all stages under a cap are worked out together: for a stage with tensor degree t and data degree
d, an upper bound on the in-flight count y for which some choices of its nodes take at most T and fit the memory, from a
relaxation of the choices; 0 if none does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from planner.memory import room_bytes
from planner.published.problems import PiperProblem, PiperStage
from planner.published.solvers import (
    PARTITION_SOLVERS,
    RELATIVE_TOLERANCE,
    OutOfTime,
    PartitionSolver,
    SearchState,
)
from planner.published.solvers._piper_ideals import Pairs, cheapest_stage, pairs_of, run_pass
from planner.space.cuts import divisors

UNLIMITED = 1 << 40
CAP_SLACK = 1e-11
_ROUNDING = 1e-12
_STEP = 1e-10
"""Relative difference below the best plan at which the last pass looks for a better one."""
_RISE = 1.3
"""Factor between the caps that are tried before there is a plan."""


@dataclass(frozen=True)
class DegreeTable:
    """The stages of one tensor degree: times and bytes with the fastest choice of each node, and what slower ones save.

    Slower choices save at most the bytes that the smallest ones save, and no node's cost less time a byte than the
    cheapest. r stages, k degrees d.

    Attributes:
        tensor: tensor degree.
        rows: [r] positions among all pairs.
        data: [k] data degrees.
        fixed_s: [r, k] seconds of a sample that no choice changes, times d: work, cut edges, exchange of weights.
        activation_bytes: [r] bytes of a sample in flight.
        room_bytes: [r] memory left by the least bytes of the nodes.
        saved_bytes: [r] most activation bytes that slower choices save.
        s_per_byte: [r] least seconds for a byte saved.
    """

    tensor: int
    rows: np.ndarray
    data: np.ndarray
    fixed_s: np.ndarray
    activation_bytes: np.ndarray
    room_bytes: np.ndarray
    saved_bytes: np.ndarray
    s_per_byte: np.ndarray

    def limits(self, cap_s: float) -> np.ndarray:
        """[r, k] upper bounds on the samples in flight under the cap."""
        spare_s = cap_s * (1 + CAP_SLACK) * self.data - self.fixed_s
        with np.errstate(invalid="ignore", divide="ignore"):
            saved = np.fmin(spare_s / self.s_per_byte[:, None], self.saved_bytes[:, None])
            grows = self.activation_bytes[:, None] - saved
            more = np.where(grows > 0, np.floor(self.room_bytes[:, None] / grows), UNLIMITED)
        return np.where(spare_s >= 0, 1 + np.minimum(more, UNLIMITED).astype(np.int64), 0)


def _table(problem: PiperProblem, pairs: Pairs, tensor: int, data: np.ndarray) -> DegreeTable:
    """The table of one tensor degree, without stages that exceed the memory or hold a node that has no choice there."""
    total_bytes = problem.activation_bytes + problem.fixed_bytes
    figures = np.zeros((problem.node_count, 6))
    s_per_byte = np.full(len(pairs.lower), np.inf)
    for node in range(problem.node_count):
        choices = problem.options(node, tensor)
        if not len(choices):
            figures[node, 0] = 1.0
            continue
        seconds, kept = problem.time_s[choices], problem.activation_bytes[choices]
        base = int(np.lexsort((kept, seconds))[0])
        least = total_bytes[choices].min(), seconds[base], problem.weight_bytes[choices].min()
        figures[node, 1:] = *least, kept[base], kept[base] - kept.min()
        smaller = kept < kept[base]
        if smaller.any():
            ratio = float(((seconds - seconds[base])[smaller] / (kept[base] - kept)[smaller]).min())
            inside = pairs.members[pairs.upper, node] > pairs.members[pairs.lower, node]
            s_per_byte[inside] = np.minimum(s_per_byte[inside], ratio)
    of_ideal = pairs.members.astype(np.float64) @ figures
    absent, least_bytes, work, weights, activation, saved = (of_ideal[pairs.upper] - of_ideal[pairs.lower]).T
    room = room_bytes(problem.memory_bytes) + _ROUNDING * float(total_bytes.sum())
    rows = np.flatnonzero((absent == 0) & (least_bytes <= room))
    ends = pairs.lower[rows], pairs.upper[rows]
    per_weight = 4 * (data - 1) / problem.batch / problem.bandwidth_bytes_per_s
    fixed = work[rows] + _transfer_bytes(problem, pairs, tensor)[ends] / problem.bandwidth_bytes_per_s
    return DegreeTable(
        tensor, rows, data, fixed[:, None] + weights[rows, None] * per_weight, activation[rows],
        room - least_bytes[rows], saved[rows] * (1 + _ROUNDING), s_per_byte[rows],
    )  # fmt: skip


def _transfer_bytes(problem: PiperProblem, pairs: Pairs, tensor: int) -> np.ndarray:
    """[i, i] least bytes on the cut edges of the stage between ideal (row) and ideal (column)."""
    source, target = problem.edges[:, 0], problem.edges[:, 1]
    entering, leaving = problem.edge_bytes.copy(), problem.edge_bytes.copy()
    for e, (u, v) in enumerate(problem.edges.tolist()):
        readers, writers = problem.options(v, tensor), problem.options(u, tensor)
        entering[e] += problem.input_sync_bytes[readers, e].min() if len(readers) else 0.0
        leaving[e] += problem.output_sync_bytes[writers, e].min() if len(writers) else 0.0
    members = pairs.members.astype(np.float64)
    has_source, has_target = members[:, source], members[:, target]
    into = (has_source * entering) @ has_target.T - (has_target @ entering)[:, None]
    open_after = (has_source * leaving) * (1 - has_target)
    out = open_after.sum(axis=1)[None, :] - (has_source * leaving) @ (1 - has_target).T
    crossing: np.ndarray = np.maximum(2 * (into + out), 0.0)
    return crossing


@dataclass
class _Passes:
    """Tables of an instance, and what the passes so far have found out."""

    search: SearchState
    problem: PiperProblem
    pairs: Pairs
    tables: list[DegreeTable]
    solved: dict[tuple[int, int, int, int], tuple[float, PiperStage | None]] = field(default_factory=dict)
    """By (row, tensor, data, in flight): `cheapest_stage`."""
    passes: int = 0
    states: int = 0

    def count(self) -> None:
        """Report the counts so far."""
        pairs = self.pairs
        self.search.count(
            ideals=len(pairs.members), pairs=len(pairs.lower), passes=self.passes, states=self.states,
            stages_solved=len(self.solved),
        )  # fmt: skip


def solve_piper(search: SearchState) -> None:
    """Find the least time per sample and prove it.

    With r pairs of ideals, t tensor and d data degrees, a pass takes O(r t d log n) for the limits and as much again as
    there are undominated states.
    """
    search.space = "all stages between ideals, tensor and data degrees, and choices of the nodes"
    problem, deadline = search.problem, search.deadline
    pairs = pairs_of(problem.node_count, problem.edges, problem.edge_bytes, deadline)
    counts = np.array(divisors(problem.batch, problem.devices), dtype=np.int64)
    tables: list[DegreeTable] = []
    for tensor in problem.tensor_degrees:
        deadline.check()
        data = counts[counts * tensor <= problem.devices]
        if len(data):
            tables.append(_table(problem, pairs, tensor, data))
    passes = _Passes(search, problem, pairs, tables)
    passes.count()
    floor = _floor(problem, counts)
    search.prove(min(floor, search.objective))
    bound = _bisect(passes, floor)
    if pairs.complete:
        search.prove(min(bound, search.objective))


def _floor(problem: PiperProblem, counts: np.ndarray) -> float:
    """Lower bound on the time per sample: the slowest node's, and all nodes' device-seconds over the devices.

    Infinite if a node has no choice at any degree that the devices allow.

    Args:
        problem: the instance.
        counts: [k] data degrees.
    """
    exchange = 4 * (counts - 1) / problem.batch / problem.bandwidth_bytes_per_s * problem.weight_bytes[:, None]
    devices = problem.choice_tensor[:, None] * counts
    alone_s = np.where(devices <= problem.devices, (problem.time_s[:, None] + exchange) / counts, np.inf)
    least = np.full((2, problem.node_count), np.inf)  # seconds of a stage with this node only; device-seconds
    np.minimum.at(least[0], problem.choice_node, alone_s.min(axis=1))
    np.minimum.at(least[1], problem.choice_node, (alone_s * devices).min(axis=1))
    return max(float(least[0].max()), float(least[1].sum()) / problem.devices) * (1 - _ROUNDING)


def _bisect(passes: _Passes, floor: float) -> float:
    """Bisect the cap and offer the plans found; returns a lower bound, valid if the pairs are complete."""
    search, bound, unchecked = passes.search, max(floor, 1e-300), True
    highest = 10 * bound
    while bound < search.objective * (1 - RELATIVE_TOLERANCE / 2) and not search.deadline.passed:
        best = search.objective
        if search.decision is None:
            cap = bound * _RISE if bound < highest else np.inf
        elif unchecked and bound > best * 0.98:
            cap, unchecked = best * (1 - _STEP), False
        else:
            cap = (bound + best) / 2
        try:
            stages = _attempt(passes, cap)
        except OutOfTime:
            break
        if stages is None:
            bound = cap
        elif not search.offer(stages) or search.objective > cap * (1 + RELATIVE_TOLERANCE):
            verdict = search.problem.judge(stages)
            raise RuntimeError(f"search and judge disagree: {verdict.objective} against {cap}, {verdict.violations}")
        else:
            unchecked = True
    return bound


def _attempt(passes: _Passes, cap: float) -> tuple[PiperStage, ...] | None:
    """A plan under the cap; None if there is none."""
    while True:
        options = _options(passes, cap)
        path, states = run_pass(passes.problem, passes.pairs, options, passes.search.deadline)
        passes.passes += 1
        passes.states += states
        passes.count()
        if path is None:
            return None
        stages = [_exact_stage(passes, cap, *step) for step in path]
        plan = tuple(stage for stage in stages if stage is not None)
        if len(plan) == len(stages):
            return plan


def _exact_stage(passes: _Passes, cap: float, row: int, tensor: int, data: int, after: int) -> PiperStage | None:
    """A stage with its best choices; None if these exceed the cap or the memory."""
    key = row, tensor, data, 1 + -(-after // data)
    if key not in passes.solved:
        members, lower, upper = passes.pairs.members, passes.pairs.lower[row], passes.pairs.upper[row]
        inside = members[upper] > members[lower]
        passes.solved[key] = cheapest_stage(passes.problem, inside, *key[1:], passes.search.deadline)
    seconds, stage = passes.solved[key]
    return None if _exceeds(seconds, cap) else stage


def _exceeds(seconds: float, cap: float) -> bool:
    """True if a stage is too slow for a cap, or fits no device."""
    return bool(np.isinf(seconds)) or seconds > cap * (1 + 2 * CAP_SLACK)


def _options(passes: _Passes, cap: float) -> np.ndarray:
    """[4, o] stages under the cap for `run_pass`: at each degree t every d that bears more in flight than all smaller.

    Stages that are known to exceed the cap or the memory are left out.
    """
    parts = [np.zeros((4, 0), dtype=np.int64)]
    for table in passes.tables:
        limit = table.limits(cap)
        for (row, tensor, data, in_flight), (seconds, _) in passes.solved.items():
            if tensor == table.tensor and _exceeds(seconds, cap):
                at = int(np.searchsorted(table.rows, row)), int(np.searchsorted(table.data, data))
                limit[at] = min(limit[at], in_flight - 1)
        most_after = np.where(limit > 0, np.minimum((limit - 1) * table.data, passes.problem.batch), -1)
        used = most_after >= 0
        used[:, 1:] &= most_after[:, 1:] > np.maximum.accumulate(most_after, axis=1)[:, :-1]
        rows, degrees = np.nonzero(used)
        tensors = np.full(len(rows), table.tensor)
        parts.append(np.stack([table.rows[rows], tensors, table.data[degrees], most_after[used]]))
    options = np.concatenate(parts, axis=1)
    return options[:, np.argsort(options[0], kind="stable")]  # pairs are sorted by their lower ideal


PARTITION_SOLVERS.register("piper-dp", PartitionSolver(PiperProblem, solve_piper))

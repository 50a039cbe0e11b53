"""Exact DP for PipeDream's hierarchical replicated stages (`PipeDreamProblem`).

PipeDream's recurrence over several levels, on tables of all pairs of cuts.

Drives the sweep: first over few cuts for a good plan, then over all of them below rising limits for the proof.

Exact DP for stages placed on a tree of devices (`PlacedPipelineProblem`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from planner.errors import UsageError
from planner.memory import fits
from planner.solvers.partition import (
    PARTITION_SOLVERS,
    Deadline,
    Incumbent,
    OutOfTime,
    PartitionSolver,
    Progress,
    Result,
    verified,
)
from planner.solvers.partition._pipedream_cuts import Cuts, all_cuts
from planner.solvers.partition._pipedream_sweep import Layout, Pricing, Step, Sweep, flat_layout, placed_layout
from planner.space.partition.pipedream import PipeDreamProblem, ReplicatedStage
from planner.space.partition.pipedream_placed import Ends, PlacedPipelineProblem, PlacedStage
from planner.space.partition.pipedream_terms import StageCost, StashRule

_SAME = 1 + 1e-12
Place = tuple[int, int, int, int]
"""First device, width, copies, stride."""
Stage = TypeVar("Stage", ReplicatedStage, PlacedStage)


@dataclass(frozen=True, slots=True)
class Context:
    """Where a unit stands, for its memory: units that run the same, devices on later stages."""

    copies: int
    behind: int


class Nested:
    """Tables of all levels, made when asked for.

    Complexity: O(S^3 m^2) vectorised operations on each level but the last, O(S^2 m^2) there.
    """

    def __init__(self, problem: PipeDreamProblem, cuts: Cuts, check: Callable[[], None]) -> None:
        self.problem = problem
        self.cuts = cuts
        self.check = check
        self.top = len(problem.machines) - 1
        inside = np.zeros((cuts.count, cuts.count), dtype=bool)
        for row in range(cuts.count):
            inside[row, row + 1 :] = ~(cuts.bits[row] & ~cuts.bits[row + 1 :]).any(axis=1)
        self.reach = inside
        self.compute = self._differences(cuts.compute_s, np.inf)
        self.weights = self._differences(cuts.weight_bytes, 0.0)
        self.saved = self._differences(cuts.saved_bytes, 0.0)
        self.tables: dict[tuple[int, Context], tuple[np.ndarray, ...]] = {}
        self.by_device = math.isfinite(problem.memory.device_bytes) and problem.memory.rule is StashRule.STASHED

    def solve(self) -> tuple[float, tuple[ReplicatedStage, ...] | None]:
        """The best time of the whole network on the whole cluster, and the plan."""
        context = Context(1, 0)
        machines = self.problem.machines[self.top]
        best = float(self._table(self.top, context)[machines][0, -1])
        if math.isinf(best):
            return best, None
        return best, self._trace(self.top, context, 0, self.cuts.count - 1, machines)

    def _differences(self, figures: np.ndarray, outside: float) -> np.ndarray:
        return np.where(self.reach, figures[None, :] - figures[:, None], outside)

    def _context(self, level: int, context: Context, behind: int, replicas: int) -> Context:
        """Context of the units of a stage with `behind` units of its level on later stages."""
        if not self.by_device:
            return Context(1, 0)
        size = math.prod(self.problem.machines[:level])
        return Context(context.copies * replicas, context.behind + context.copies * behind * size)

    def _unit(self, level: int, context: Context) -> np.ndarray:
        """Time that one unit of the level below takes from each cut to each."""
        if level == 0:
            return self.compute
        return self._table(level - 1, context)[self.problem.machines[level - 1]]

    def _stage(self, level: int, context: Context, behind: int, replicas: int, *, first: bool) -> np.ndarray:
        """Time of a stage from each cut to each, transfers at its ends included unless it is the first of its run."""
        problem = self.problem
        speed = problem.bandwidth_byte_per_s[level]
        unit = self._unit(level, self._context(level, context, behind, replicas))
        if problem.cost is StageCost.PAPER:
            time = np.maximum(unit, 2 * (replicas - 1) * self.weights / speed) / replicas
        else:
            shared = problem.machines[level - 1] if first and level else 1
            time = (unit + 4 * (replicas - 1) * self.weights / (speed * replicas) / shared) / replicas
        if problem.transfers and not first:
            sharing = 1 if problem.cost is StageCost.PAPER else replicas
            cut_s = 2 * self.cuts.cut_bytes / (speed * sharing)
            leaving = cut_s.copy()
            leaving[-1] = 0.0
            time = np.maximum(time, np.maximum(cut_s[:, None], leaving[None, :]))
        return self._within_memory(level, context, behind, replicas, time)

    def _within_memory(self, level: int, context: Context, behind: int, replicas: int, time: np.ndarray) -> np.ndarray:
        memory = self.problem.memory
        if math.isinf(memory.device_bytes) or (self.by_device and level):
            return time
        own, later = replicas * context.copies, behind * context.copies + context.behind
        in_flight = memory.in_flight(later, own)
        needed = memory.needed(self.weights, self.saved, self.cuts.cut_bytes[:, None], in_flight)
        return np.where(fits(needed, memory.device_bytes), time, np.inf)

    def _table(self, level: int, context: Context) -> tuple[np.ndarray, ...]:
        """Best times of runs on one level: [m][i, j] for cuts i to j on m units; on the last level i is 0 only."""
        key = (level, context)
        if key not in self.tables:
            self.tables[key] = self._fill(level, context)
        return self.tables[key]

    def _fill(self, level: int, context: Context) -> tuple[np.ndarray, ...]:
        machines = self.problem.machines[level]
        rows = 1 if level == self.top else self.cuts.count
        runs = [np.full((rows, self.cuts.count), np.inf)]
        for used in range(1, machines + 1):
            best = np.full((rows, self.cuts.count), np.inf)
            if used == 1 or self.problem.replicate:
                best = self._stage(level, context, machines - used, used, first=True)[:rows].copy()
            if self.problem.use_fewer:
                best = np.minimum(best, runs[used - 1])
            for replicas in range(1, used if self.problem.replicate else min(used, 2)):
                stage = self._stage(level, context, machines - used, replicas, first=False)
                self._join(runs[used - replicas], stage, best)
            runs.append(best)
        return tuple(runs)

    def _join(self, runs: np.ndarray, stage: np.ndarray, best: np.ndarray) -> None:
        """best[i, j] = min(best, min over k of max(runs[i, k], stage[k, j]))."""
        for row in range(len(runs)):
            self.check()
            at = row + 1
            if at < runs.shape[1]:
                through = np.maximum(runs[row, at:, None], stage[at:, at:]).min(axis=0)
                np.minimum(best[row, at:], through, out=best[row, at:])

    def _trace(self, level: int, context: Context, start: int, stop: int, units: int) -> tuple[ReplicatedStage, ...]:
        """The stages behind a figure of a table."""
        runs = self._table(level, context)
        machines, time = self.problem.machines[level], runs[units][start, stop] * _SAME
        if self.problem.use_fewer and units > 1 and runs[units - 1][start, stop] <= time:
            return self._trace(level, context, start, stop, units - 1)
        behind = machines - units
        if units == 1 or self.problem.replicate:
            alone = self._stage(level, context, behind, units, first=True)[start, stop]
            if alone <= time:
                return (self._made(level, context, behind, units, start, stop),)
        for replicas in range(1, units if self.problem.replicate else min(units, 2)):
            stage = self._stage(level, context, behind, replicas, first=False)
            through = np.maximum(runs[units - replicas][start], stage[:, stop])
            cut = int(np.argmin(through))
            if through[cut] <= time:
                before = self._trace(level, context, start, cut, units - replicas)
                return (*before, self._made(level, context, behind, replicas, cut, stop))
        raise RuntimeError("a figure of the table has no stage behind it")

    def _made(self, level: int, context: Context, behind: int, replicas: int, start: int, stop: int) -> ReplicatedStage:
        inner: tuple[ReplicatedStage, ...] = ()
        if level:
            below = self._context(level, context, behind, replicas)
            inner = self._trace(level - 1, below, start, stop, self.problem.machines[level - 1])
        return ReplicatedStage(self.cuts.layers_between(start, stop), replicas, inner)


_FEW = 4000
_COARSE = (150, 1000, 5000, 20_000, 60_000)
_RUNGS = (1 / 8, 1 / 4, 1 / 2, 1.0)


@dataclass(slots=True)
class Outcome:
    """What a search knows.

    Attributes:
        time: seconds a minibatch of the best plan, infinite when there is none.
        steps: its stages, None when it is the plan that the search was given.
        bound: no plan is faster.
        cuts: those the steps refer to.
        pairs: pairs of cuts that were priced.
    """

    time: float
    bound: float
    steps: tuple[Step, ...] | None = None
    cuts: Cuts | None = None
    pairs: int = 0
    improved: Callable[[float, float], None] | None = field(default=None, repr=False)

    def report(self) -> None:
        """Tell what is known by now."""
        if self.improved:
            self.improved(self.time, self.bound)

    def stages(self, made: Callable[[tuple[int, ...], Place], Stage]) -> tuple[Stage, ...] | None:
        """The plan's stages from their layers and places; None when it is the plan that the search was given."""
        if self.steps is None or self.cuts is None:
            return None
        return tuple(made(self.cuts.layers_between(step.start, step.stop), step.place) for step in self.steps)


def search(
    cuts: Cuts,
    layout_of: Callable[[int], Layout],
    devices: Sequence[int],
    pricing: Callable[[int], Pricing],
    outcome: Outcome,
    deadline: Deadline,
) -> Outcome:
    """The fastest plan on one of several numbers of devices.

    Args:
        cuts: where the graph may be cut; when they are not complete, `outcome.bound` stays what the compute time says.
        layout_of: where stages may go on so many devices.
        devices: numbers of devices to try, most promising first.
        pricing: what they cost then.
        outcome: what is known before; updated and returned.
        deadline: when to stop.
    """
    layouts: dict[int, Layout] = {}

    def below(limit: float, some: Cuts) -> bool:
        """Look for a plan below a limit; true when one was found. Updates the outcome."""
        goal = limit
        for count in devices:
            if some.compute_s[-1] / count >= goal:
                continue
            deadline.check()
            if count not in layouts:
                layouts[count] = layout_of(count)
            sweep = Sweep(some, layouts[count], pricing(count), goal, deadline.check)
            try:
                found = sweep.run()
            finally:
                outcome.pairs += sweep.pairs
            if found:
                goal, outcome.steps = found
                outcome.time, outcome.cuts = goal, some
                outcome.report()
        return goal < limit

    outcome.bound = max(outcome.bound, float(cuts.compute_s[-1]) / max(devices))
    with contextlib.suppress(OutOfTime):
        _climb(cuts, below, outcome)
    return outcome


def _climb(cuts: Cuts, below: Callable[[float, Cuts], bool], outcome: Outcome) -> None:
    for most in _COARSE:
        if cuts.count > 2 * most:
            below(outcome.time, cuts.coarse(most))
    base = outcome.bound
    rungs = _RUNGS if cuts.count > _FEW and math.isfinite(outcome.time) else (1.0,)
    for rung in rungs:
        limit = outcome.time if rung == 1.0 else base + rung * (outcome.time - base)
        if limit <= outcome.bound:
            continue
        found = below(limit, cuts)
        if cuts.complete:
            outcome.bound = outcome.time if found or rung == 1.0 else limit
            outcome.report()
        if found:
            return


NAME = "hierarchical-dp"
MOST_CUTS = 1_000_000
MOST_PAIRED = 800
Plan = tuple[ReplicatedStage, ...]


def solve_pipedream(
    problem: PipeDreamProblem,
    *,
    time_limit_s: float = 60.0,
    start: Plan | None = None,
    progress: Progress | None = None,
    most_cuts: int = MOST_CUTS,
) -> Result:
    """The fastest hierarchical plan.

    On one level a sweep over all cuts below rising limits, which proves its answer on graphs with hundreds of thousands
    of cuts; on several levels the recurrence over all pairs of cuts, which proves it up to `MOST_PAIRED` cuts. With
    more, some are chosen (along the topological order, and where little crosses), and the bound is the compute time
    shared by all devices.

    Raises:
        UsageError: memory is to be counted device by device while units may stay idle on several levels.
    """
    deadline = Deadline(time_limit_s)
    levels = len(problem.machines)
    stashed = problem.memory.rule is StashRule.STASHED and math.isfinite(problem.memory.device_bytes)
    if levels > 1 and stashed and problem.use_fewer:
        raise UsageError(
            "memory cannot be counted device by device while units of several levels may stay idle",
            hint="use a PlacedPipelineProblem, or use_fewer=False",
        )
    decision, outcome = _opening(problem, NAME, start, progress)
    cuts = all_cuts(problem.layers, problem.boundary, problem.frontiers, most_cuts, deadline)
    found = (_flat if levels == 1 else _nested)(problem, cuts, outcome, deadline)
    space = f"replicated stages on {levels} level{'s' if levels > 1 else ''}"
    complete = cuts.complete and (levels == 1 or cuts.count <= MOST_PAIRED)
    space += "" if complete else ", some of the cuts only"
    statistics = {"cuts": cuts.count, "pairs": outcome.pairs}
    return verified(problem, found or decision, outcome.time, outcome.bound, NAME, space, statistics)


def _opening(
    problem: PipeDreamProblem | PlacedPipelineProblem,
    solver: str,
    start: Any,  # noqa: ANN401
    progress: Progress | None,
) -> tuple[Any, Outcome]:
    """The best of the start and the trivial plans, None without one, and what is known with it."""
    best = Incumbent(problem, solver, plans=[*(plan for _, plan in problem.trivial()), start])
    improved = (lambda time, bound: progress(solver, time, bound)) if progress else None
    return best.decision, Outcome(best.objective, 0.0, improved=improved)


def _flat(problem: PipeDreamProblem, cuts: Cuts, outcome: Outcome, deadline: Deadline) -> Plan | None:
    machines = problem.machines[0]

    def pricing(devices: int) -> Pricing:
        return Pricing(
            paper=problem.cost is StageCost.PAPER,
            transfers=problem.transfers,
            receiver=True,
            bandwidth_byte_per_s=problem.bandwidth_byte_per_s,
            memory=problem.memory,
            idle_behind_first=machines - devices if problem.memory.rule is StashRule.RELEASED else 0,
        )

    counts = list(range(machines, 0, -1)) if problem.use_fewer else [machines]
    search(cuts, lambda devices: flat_layout(problem, devices, deadline), counts, pricing, outcome, deadline)
    return outcome.stages(lambda layers, place: ReplicatedStage(layers, place[1]))


def _nested(problem: PipeDreamProblem, cuts: Cuts, outcome: Outcome, deadline: Deadline) -> Plan | None:
    outcome.bound = float(cuts.compute_s[-1]) / problem.devices
    some = cuts if cuts.count <= MOST_PAIRED else cuts.coarse(MOST_PAIRED)
    outcome.pairs = some.count**2
    try:
        found, plan = Nested(problem, some, deadline.check).solve()
    except OutOfTime:
        return None
    if some.complete:
        outcome.bound = min(found, outcome.time)
    if plan is None or found >= outcome.time:
        return None
    outcome.time, outcome.steps = found, None
    outcome.report()
    return plan


PARTITION_SOLVERS.register(NAME, PartitionSolver((PipeDreamProblem,), exact=True, run=solve_pipedream))


PLACED = "hierarchical-dp-placed"


def solve_placed(
    problem: PlacedPipelineProblem,
    *,
    time_limit_s: float = 60.0,
    start: tuple[PlacedStage, ...] | None = None,
    progress: Progress | None = None,
    most_cuts: int = MOST_CUTS,
) -> Result:
    """The fastest pipeline on a tree of devices, with proof when the graph has at most `most_cuts` cuts.

    A label sweep over (place, last stage, cut) below rising limits; see `_pipedream_sweep`. With more cuts only those
    along the topological order are tried, and the bound is the compute time shared by all devices.
    """
    deadline = Deadline(time_limit_s)
    decision, outcome = _opening(problem, PLACED, start, progress)
    cuts = all_cuts(problem.layers, problem.boundary, problem.frontiers, most_cuts, deadline)
    prices = Pricing(
        problem.cost is StageCost.PAPER,
        problem.transfers,
        problem.ends is Ends.RECEIVER,
        problem.bandwidth_byte_per_s,
        problem.memory,
    )
    counts = [problem.devices] if problem.use_all else list(range(problem.devices, 0, -1))
    search(cuts, lambda count: placed_layout(problem, count, deadline), counts, lambda _: prices, outcome, deadline)
    decision = outcome.stages(lambda layers, place: PlacedStage(layers, *place)) or decision
    statistics = {"cuts": cuts.count, "pairs": outcome.pairs}
    space = "stages in line on a tree of devices" + ("" if cuts.complete else ", cut along the topological order")
    return verified(problem, decision, outcome.time, outcome.bound, PLACED, space, statistics)


PARTITION_SOLVERS.register(PLACED, PartitionSolver((PlacedPipelineProblem,), exact=True, run=solve_placed))

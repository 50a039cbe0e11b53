"""Exact DP for PipeDream's hierarchical replicated stages (`PipeDreamProblem`)."""

from __future__ import annotations

import math

from planner.errors import UsageError
from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Progress, Result
from planner.solvers.partition._deadline import Deadline, OutOfTime
from planner.solvers.partition._pipedream_cuts import Cuts, all_cuts
from planner.solvers.partition._pipedream_layouts import flat_layout
from planner.solvers.partition._pipedream_nested import Nested
from planner.solvers.partition._pipedream_search import Outcome, search
from planner.solvers.partition._pipedream_sweep import Pricing, Step
from planner.solvers.partition._verified import verified
from planner.space.partition.pipedream import PipeDreamProblem, ReplicatedStage
from planner.space.partition.pipedream_terms import StageCost, StashRule

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
    plans = [plan for _, plan in problem.trivial()] + ([start] if start else [])
    known = [(v.objective, plan) for plan in plans if (v := problem.judge(plan)).feasible]
    best, decision = min(known, key=lambda pair: pair[0], default=(math.inf, None))
    cuts = all_cuts(problem.layers, problem.boundary, problem.frontiers, most_cuts, deadline)
    outcome = Outcome(best, 0.0, improved=(lambda a, b: progress(NAME, a, b)) if progress else None)
    found = (_flat if levels == 1 else _nested)(problem, cuts, outcome, deadline)
    space = f"replicated stages on {levels} level{'s' if levels > 1 else ''}"
    complete = cuts.complete and (levels == 1 or cuts.count <= MOST_PAIRED)
    space += "" if complete else ", some of the cuts only"
    statistics = {"cuts": cuts.count, "pairs": outcome.pairs}
    return verified(problem, found or decision, outcome.time, outcome.bound, NAME, space, statistics)


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
    if outcome.steps is None or outcome.cuts is None:
        return None
    return tuple(_stage(outcome.cuts, step) for step in outcome.steps)


def _stage(cuts: Cuts, step: Step) -> ReplicatedStage:
    return ReplicatedStage(cuts.layers_between(step.start, step.stop), step.place[1])


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

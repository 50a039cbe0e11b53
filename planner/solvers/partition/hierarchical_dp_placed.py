"""Exact DP for stages placed on a tree of devices (`PlacedPipelineProblem`)."""

from __future__ import annotations

import math

from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Progress, Result
from planner.solvers.partition._deadline import Deadline
from planner.solvers.partition._pipedream_cuts import Cuts, all_cuts
from planner.solvers.partition._pipedream_layouts import placed_layout
from planner.solvers.partition._pipedream_search import Outcome, search
from planner.solvers.partition._pipedream_sweep import Pricing, Step
from planner.solvers.partition._verified import verified
from planner.space.partition.pipedream_placed import Ends, PlacedPipelineProblem, PlacedStage
from planner.space.partition.pipedream_terms import StageCost

NAME = "hierarchical-dp-placed"
MOST_CUTS = 1_000_000


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
    plans = [plan for _, plan in problem.trivial()] + ([start] if start else [])
    known = [(v.objective, plan) for plan in plans if (v := problem.judge(plan)).feasible]
    best, decision = min(known, key=lambda pair: pair[0], default=(math.inf, None))
    cuts = all_cuts(problem.layers, problem.boundary, problem.frontiers, most_cuts, deadline)

    def pricing(devices: int) -> Pricing:
        del devices
        return Pricing(
            problem.cost is StageCost.PAPER,
            problem.transfers,
            problem.ends is Ends.RECEIVER,
            problem.bandwidth_byte_per_s,
            problem.memory,
        )

    counts = [problem.devices] if problem.use_all else list(range(problem.devices, 0, -1))
    outcome = Outcome(best, 0.0, improved=(lambda a, b: progress(NAME, a, b)) if progress else None)
    search(cuts, lambda count: placed_layout(problem, count, deadline), counts, pricing, outcome, deadline)
    if outcome.steps is not None and outcome.cuts is not None:
        decision = _stages(outcome.cuts, outcome.steps)
    statistics = {"cuts": cuts.count, "pairs": outcome.pairs}
    space = "stages in line on a tree of devices" + ("" if cuts.complete else ", cut along the topological order")
    return verified(problem, decision, outcome.time, outcome.bound, NAME, space, statistics)


def _stages(cuts: Cuts, steps: tuple[Step, ...]) -> tuple[PlacedStage, ...]:
    return tuple(PlacedStage(cuts.layers_between(step.start, step.stop), *step.place) for step in steps)


PARTITION_SOLVERS.register(NAME, PartitionSolver((PlacedPipelineProblem,), exact=True, run=solve_placed))

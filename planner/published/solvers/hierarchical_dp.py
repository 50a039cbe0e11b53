"""Exact dynamic programs for PipeDream's replicated stages: nested (`PipeDreamProblem`), or placed on a tree.

Placed stages are found by the label sweep of `planner.solvers.cluster_chains.pipedream_sweep`, as nested ones of a
single level are.
"""

from __future__ import annotations

from planner.published.problems import PipeDreamProblem, PlacedPipelineProblem, PlacedStage, Released
from planner.published.solvers import PARTITION_SOLVERS, PartitionSolver, SearchState
from planner.solvers.cluster_chains.hierarchical_dp import climb, cuts_of, solve_nested


def solve_placed(search: SearchState) -> None:
    """Find the fastest pipeline on a tree of devices; proven if the graph has at most `MOST_CUTS` cuts.

    With more cuts only those along the topological order are searched, and the bound is the compute time divided by the
    devices.
    """
    problem: PlacedPipelineProblem = search.problem
    cuts = cuts_of(search, problem.released & ~Released.CUTS)
    search.space = "stages in line on a tree of devices"
    search.space += "" if cuts.complete else ", cut along the topological order"
    climb(search, cuts, lambda layers, place: PlacedStage(layers, *place))


PARTITION_SOLVERS.register("hierarchical-dp", PartitionSolver(PipeDreamProblem, solve_nested))
PARTITION_SOLVERS.register("hierarchical-dp-placed", PartitionSolver(PlacedPipelineProblem, solve_placed))

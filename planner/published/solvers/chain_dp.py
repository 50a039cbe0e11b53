"""Chains under the schedules of BaPipe and of HetPipe's virtual workers: the exact chain DP of those systems."""

from __future__ import annotations

from planner.published.problems import ChainStages
from planner.published.solvers import PARTITION_SOLVERS, PartitionSolver
from planner.solvers.cluster_chains.chain_dp import solve_chain

PARTITION_SOLVERS.register("chain-dp", PartitionSolver(ChainStages, solve_chain))

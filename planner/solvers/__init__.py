"""Solvers find the best decision of a problem with a lower bound on all others; one file per solver.

search(costs_for, cluster, job) -> Answer          all micro-batch sizes, copies, schedules and ZeRO stages
chain_dp.solve(problem, judge, ...) -> Solution    one StageProblem, by the closed form of its time
critical_path.solve_bounded(...) -> Solution       one StageProblem, by its longest chain of waits
micro_batch_sizes(job) -> tuple[int, ...]          sizes that a job allows
"""

from __future__ import annotations

from planner.solvers._candidates import comparable as comparable
from planner.solvers.outer import search as search
from planner.solvers.sizes import micro_batch_sizes as micro_batch_sizes
from planner.solvers.types import Answer as Answer
from planner.solvers.types import Judge as Judge
from planner.solvers.types import KnownPlan as KnownPlan
from planner.solvers.types import Solution as Solution

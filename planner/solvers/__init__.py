"""A problem to its best decision and a bound; one file a solver.

search(costs_for, cluster, job) -> Answer       all micro-batch sizes, copies, schedules and ZeRO stages
get("chain_dp")(problem, judge, ...) -> Solution    one StageProblem
micro_batch_sizes(job) -> tuple[int, ...]       sizes that a job allows
"""

from __future__ import annotations

from planner.solvers._candidates import comparable
from planner.solvers.outer import search
from planner.solvers.sizes import micro_batch_sizes
from planner.solvers.types import SOLVERS, Answer, Explored, Judge, Outcome, Solution, Solver


def get(name: str) -> Solver:
    """The solver of that name.

    Raises:
        UsageError: no solver has that name; the hint names the closest ones.
    """
    return SOLVERS.get(name)


__all__ = [
    "SOLVERS",
    "Answer",
    "Explored",
    "Judge",
    "Outcome",
    "Solution",
    "Solver",
    "comparable",
    "get",
    "micro_batch_sizes",
    "search",
]

"""Layer-wise strategies by trying every combination: the oracle of the other solvers."""

from __future__ import annotations

import itertools
import time

from planner.errors import UsageError
from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Progress, Result
from planner.space.partition.layerwise import LayerwiseDecision, LayerwiseProblem

_MOST_PLANS = 1_000_000


def solve_layerwise_by_force(
    problem: LayerwiseProblem, *, time_limit_s: float = 60.0, start: object = None, progress: Progress | None = None
) -> Result:
    """Judge every combination: S^L of them.

    Raises:
        UsageError: more combinations than can be tried.
    """
    del start, progress
    if problem.strategies**problem.layers > _MOST_PLANS:
        message = f"brute force cannot try {problem.strategies} strategies for {problem.layers} layers"
        raise UsageError(message, hint="use the solver 'layerwise-labels'")
    deadline = time.monotonic() + time_limit_s
    best, found, tried = float("inf"), None, 0
    for chosen in itertools.product(range(problem.strategies), repeat=problem.layers):
        tried += 1
        decision = LayerwiseDecision(chosen)
        verdict = problem.judge(decision)
        if verdict.feasible and verdict.objective < best:
            best, found = verdict.objective, decision
        if tried % 1000 == 0 and time.monotonic() > deadline:
            return Result(found, best, 0.0, "layerwise-brute-force", "everything", {"tried": tried})
    return Result(found, best, best, "layerwise-brute-force", "everything", {"tried": tried})


PARTITION_SOLVERS.register(
    "layerwise-brute-force", PartitionSolver((LayerwiseProblem,), exact=True, run=solve_layerwise_by_force)
)

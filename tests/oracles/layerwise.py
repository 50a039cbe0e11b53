"""Layer-wise strategies by trying every combination: the oracle of the other solvers."""

from __future__ import annotations

import itertools

from planner.errors import UsageError
from planner.solvers.partition import Progress, Result
from planner.space.partition.layerwise import LayerwiseDecision, LayerwiseProblem
from tests.oracles.every_plan import best_of

_MOST_PLANS = 1_000_000


def solve_layerwise_by_force(
    problem: LayerwiseProblem, *, time_limit_s: float = 60.0, start: object = None, progress: Progress | None = None
) -> Result:
    """Judge every combination: S^L of them.

    Raises:
        UsageError: more combinations than can be tried.
    """
    del start
    if problem.strategies**problem.layers > _MOST_PLANS:
        message = f"brute force cannot try {problem.strategies} strategies for {problem.layers} layers"
        raise UsageError(message, hint="use the solver 'layerwise-labels'")
    plans = map(LayerwiseDecision, itertools.product(range(problem.strategies), repeat=problem.layers))
    return best_of(problem, plans, solver="layerwise-brute-force", time_limit_s=time_limit_s, progress=progress)

"""Layer-wise strategies and pipeline cuts by trying every combination: the oracle of the solvers."""

from __future__ import annotations

import itertools

from planner.errors import UsageError
from planner.solvers.partition import Result
from planner.space.partition import LayerChoice, LayerDecision
from tests.oracles.every_plan import best_of

_MOST_PLANS = 1_000_000


def solve_layerwise_by_force(problem: LayerChoice, *, time_limit_s: float = 60.0) -> Result:
    """Judge every cut with every combination of strategies.

    Raises:
        UsageError: more combinations than can be tried.
    """
    if problem.strategies**problem.layers > _MOST_PLANS:
        message = f"brute force cannot try {problem.strategies} strategies for {problem.layers} layers"
        raise UsageError(message, hint="use the solver 'layerwise'")
    plans = (
        LayerDecision(chosen, (0, *inner))
        for inner in itertools.combinations(range(1, problem.layers), problem.stages - 1)
        for chosen in itertools.product(range(problem.strategies), repeat=problem.layers)
    )
    return best_of(problem, plans, solver="layerwise-brute-force", time_limit_s=time_limit_s)

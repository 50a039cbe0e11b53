"""Layer-wise strategies and pipeline cuts by trying every combination: the oracle of the other solvers."""

from __future__ import annotations

import itertools

from planner.errors import UsageError
from planner.solvers.partition import Progress, Result
from planner.space.partition.layerwise import LayerwisePipelineDecision, LayerwisePipelineProblem
from tests.oracles.every_plan import best_of

NAME = "layerwise-pipeline-brute-force"
_MOST_PLANS = 200_000


def solve_layerwise_pipeline_by_force(
    problem: LayerwisePipelineProblem,
    *,
    time_limit_s: float = 60.0,
    start: object = None,
    progress: Progress | None = None,
) -> Result:
    """Judge every cut with every combination of strategies.

    Raises:
        UsageError: more combinations than can be tried.
    """
    del start
    count = problem.time_s.shape[1]
    if count**problem.layers > _MOST_PLANS:
        message = f"brute force cannot try {count} strategies for {problem.layers} layers"
        raise UsageError(message, hint="use the solver 'layerwise-pipeline'")
    plans = (
        LayerwisePipelineDecision((0, *inner), chosen)
        for inner in itertools.combinations(range(1, problem.layers), problem.stages - 1)
        for chosen in itertools.product(range(count), repeat=problem.layers)
    )
    return best_of(problem, plans, solver=NAME, time_limit_s=time_limit_s, progress=progress)

"""Tries every plan of a small `ChainStages`: the oracle of the exact solver."""

from __future__ import annotations

import itertools

from planner.solvers.partition import Result
from planner.space.partition import ChainDecision, ChainStages
from tests.oracles.every_plan import best_of


def try_everything(problem: ChainStages) -> Result:
    """The best of all pipelines, cuts and orders of devices; exponential in devices and layers."""
    devices = [kind for kind, count in enumerate(problem.counts) for _ in range(count)]
    plans = (
        ChainDecision((0, *cut, problem.layers), pipeline, types)
        for pipeline in problem.pipelines
        for types in ([()] if pipeline.line else sorted(set(itertools.permutations(devices, pipeline.stages))))
        for cut in itertools.combinations(range(1, problem.layers), pipeline.stages - 1)
    )
    return best_of(problem, plans, solver="every chain", time_limit_s=60.0)

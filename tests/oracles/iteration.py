"""Iteration time by trying every cut and every configuration: the oracle of the other solvers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from planner.errors import UsageError
from planner.solvers.partition import Progress, Result
from planner.space.partition import IterationDecision, IterationProblem, MeshStage
from tests.oracles.every_plan import best_of

_MOST_PLANS = 2_000_000


def solve_iteration_by_force(
    problem: IterationProblem, *, time_limit_s: float = 60.0, start: object = None, progress: Progress | None = None
) -> Result:
    """Judge every plan; exponential in the layers.

    Raises:
        UsageError: more plans than can be tried.
    """
    del start
    configs = len(problem.config_devices)
    if (configs + 1) ** problem.layers > _MOST_PLANS:
        message = f"brute force cannot try {problem.layers} layers in {configs} configurations"
        raise UsageError(message, hint="use the solver 'iteration-dp'")
    return best_of(
        problem, _plans(problem), solver="iteration-brute-force", time_limit_s=time_limit_s, progress=progress
    )


def _plans(problem: IterationProblem) -> Iterator[IterationDecision]:
    """Every cut with every configuration of its stages, as far as the devices go."""
    for cuts in itertools.product((False, True), repeat=problem.layers - 1):
        starts = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), problem.layers]
        for chosen in itertools.product(range(len(problem.config_devices)), repeat=len(starts) - 1):
            if int(np.sum(problem.config_devices[list(chosen)])) <= problem.devices:
                pairs = zip(starts, starts[1:], chosen, strict=False)
                yield IterationDecision(tuple(MeshStage(a, b - 1, c) for a, b, c in pairs))

"""Iteration time by trying every cut and every configuration: the oracle of the other solvers."""

from __future__ import annotations

import itertools
import time

import numpy as np

from planner.errors import UsageError
from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Progress, Result
from planner.space.partition.iteration import IterationDecision, IterationProblem, MeshStage

_MOST_PLANS = 2_000_000


def solve_iteration_by_force(
    problem: IterationProblem, *, time_limit_s: float = 60.0, start: object = None, progress: Progress | None = None
) -> Result:
    """Judge every plan; exponential in the layers.

    Raises:
        UsageError: more plans than can be tried.
    """
    del start, progress
    configs = len(problem.config_devices)
    if (configs + 1) ** problem.layers > _MOST_PLANS:
        message = f"brute force cannot try {problem.layers} layers in {configs} configurations"
        raise UsageError(message, hint="use the solver 'iteration-dp'")
    deadline = time.monotonic() + time_limit_s
    best, found, tried = float("inf"), None, 0
    for cuts in itertools.product((False, True), repeat=problem.layers - 1):
        if time.monotonic() > deadline:
            return Result(found, best, 0.0, "iteration-brute-force", "everything", {"tried": tried})
        starts = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), problem.layers]
        for chosen in itertools.product(range(configs), repeat=len(starts) - 1):
            tried += 1
            if int(np.sum(problem.config_devices[list(chosen)])) <= problem.devices:
                pairs = zip(starts, starts[1:], chosen, strict=False)
                decision = IterationDecision(tuple(MeshStage(a, b - 1, c) for a, b, c in pairs))
                verdict = problem.judge(decision)
                if verdict.feasible and verdict.objective < best:
                    best, found = verdict.objective, decision
    return Result(found, best, best, "iteration-brute-force", "everything", {"tried": tried})


PARTITION_SOLVERS.register(
    "iteration-brute-force", PartitionSolver((IterationProblem,), exact=True, run=solve_iteration_by_force)
)

"""Tries every plan of a small `BaPipeProblem`: the oracle of the exact solver."""

from __future__ import annotations

import itertools
import math

from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Progress, Result
from planner.space.partition.bapipe import BaPipeDecision, BaPipeProblem

NAME = "bapipe-brute"


def try_everything(
    problem: BaPipeProblem,
    *,
    time_limit_s: float = 60.0,
    start: BaPipeDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best of all plans; exponential in the layers."""
    del time_limit_s, start, progress
    inner = range(1, problem.layers)
    cuts = [c for depth in range(problem.devices) for c in itertools.combinations(inner, depth)]
    best, decision, tried = math.inf, None, 0
    for cut, schedule, size in itertools.product(cuts, problem.schedules, problem.micro_batches):
        tried += 1
        plan = BaPipeDecision((0, *cut, problem.layers), schedule, size)
        verdict = problem.judge(plan)
        if verdict.feasible and verdict.objective < best:
            best, decision = verdict.objective, plan
    return Result(decision, best, best, NAME, "every plan", {"plans": tried})


PARTITION_SOLVERS.register(NAME, PartitionSolver((BaPipeProblem,), exact=True, run=try_everything))

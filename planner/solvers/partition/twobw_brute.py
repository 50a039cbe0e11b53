"""Tries every plan of a small `TwoBWProblem`: the oracle of the exact solver."""

from __future__ import annotations

import itertools
import math

from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Progress, Result
from planner.space.partition.twobw import TwoBWDecision, TwoBWProblem

NAME = "twobw-brute"


def try_everything(
    problem: TwoBWProblem,
    *,
    time_limit_s: float = 60.0,
    start: TwoBWDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best of all plans; exponential in the layers."""
    del time_limit_s, start, progress
    inner = range(1, problem.layers)
    cuts = [c for depth in range(problem.layers) for c in itertools.combinations(inner, depth)]
    widths = range(1, problem.devices + 1)
    best, decision, tried = math.inf, None, 0
    for cut, width, size, recompute, schedule in itertools.product(
        cuts, widths, problem.micro_batches, problem.recompute, problem.schedules
    ):
        tried += 1
        plan = TwoBWDecision((0, *cut, problem.layers), width, size, recompute, schedule)
        verdict = problem.judge(plan)
        if verdict.feasible and verdict.objective < best:
            best, decision = verdict.objective, plan
    return Result(decision, best, best, NAME, "every plan", {"plans": tried})


PARTITION_SOLVERS.register(NAME, PartitionSolver((TwoBWProblem,), exact=True, run=try_everything))

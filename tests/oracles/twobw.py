"""Tries every plan of a small `TwoBWProblem`: the oracle of the exact solver."""

from __future__ import annotations

import itertools

from planner.solvers.partition import Progress, Result
from planner.space.partition.twobw import TwoBWDecision, TwoBWProblem
from tests.oracles.every_plan import best_of

NAME = "twobw-brute"


def try_everything(
    problem: TwoBWProblem,
    *,
    time_limit_s: float = 60.0,
    start: TwoBWDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best of all plans; exponential in the layers."""
    del start
    inner = range(1, problem.layers)
    cuts = [c for depth in range(problem.layers) for c in itertools.combinations(inner, depth)]
    widths = range(1, problem.devices + 1)
    plans = (
        TwoBWDecision((0, *cut, problem.layers), width, size, recompute, schedule)
        for cut, width, size in itertools.product(cuts, widths, problem.micro_batches)
        for recompute, schedule in itertools.product(problem.recompute, problem.schedules)
    )
    return best_of(problem, plans, solver=NAME, time_limit_s=time_limit_s, progress=progress)

"""Tries every plan of a small `BaPipeProblem`: the oracle of the exact solver."""

from __future__ import annotations

import itertools

from planner.solvers.partition import Progress, Result
from planner.space.partition.bapipe import BaPipeDecision, BaPipeProblem
from tests.oracles.every_plan import best_of

NAME = "bapipe-brute"


def try_everything(
    problem: BaPipeProblem,
    *,
    time_limit_s: float = 60.0,
    start: BaPipeDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best of all plans; exponential in the layers."""
    del start
    inner = range(1, problem.layers)
    cuts = [c for depth in range(problem.devices) for c in itertools.combinations(inner, depth)]
    points = itertools.product(cuts, problem.schedules, problem.micro_batches)
    plans = (BaPipeDecision((0, *cut, problem.layers), schedule, size) for cut, schedule, size in points)
    return best_of(problem, plans, solver=NAME, time_limit_s=time_limit_s, progress=progress)

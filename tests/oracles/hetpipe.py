"""Tries every plan of a small `HetPipeProblem`: the oracle of the exact solver."""

from __future__ import annotations

import itertools

from planner.solvers.partition import Progress, Result
from planner.space.partition.hetpipe import HetPipeDecision, HetPipeProblem
from tests.oracles.every_plan import best_of

NAME = "hetpipe-brute"


def try_everything(
    problem: HetPipeProblem,
    *,
    time_limit_s: float = 60.0,
    start: HetPipeDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best of all orders and cuts; exponential in devices and layers."""
    del start
    devices = [kind for kind, count in enumerate(problem.counts) for _ in range(count)]
    plans = (
        HetPipeDecision((0, *cut, problem.layers), order)
        for stages in range(1, len(devices) + 1)
        for order in sorted(set(itertools.permutations(devices, stages)))
        for cut in itertools.combinations(range(1, problem.layers), stages - 1)
    )
    return best_of(problem, plans, solver=NAME, time_limit_s=time_limit_s, progress=progress)

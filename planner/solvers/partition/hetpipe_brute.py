"""Tries every plan of a small `HetPipeProblem`: the oracle of the exact solver."""

from __future__ import annotations

import itertools
import math

from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Progress, Result
from planner.space.partition.hetpipe import HetPipeDecision, HetPipeProblem

NAME = "hetpipe-brute"


def try_everything(
    problem: HetPipeProblem,
    *,
    time_limit_s: float = 60.0,
    start: HetPipeDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best of all orders and cuts; exponential in devices and layers."""
    del time_limit_s, start, progress
    devices = [kind for kind, count in enumerate(problem.counts) for _ in range(count)]
    best, decision, tried = math.inf, None, 0
    for stages in range(1, len(devices) + 1):
        orders = sorted(set(itertools.permutations(devices, stages)))
        for cut in itertools.combinations(range(1, problem.layers), stages - 1):
            for order in orders:
                tried += 1
                plan = HetPipeDecision((0, *cut, problem.layers), order)
                verdict = problem.judge(plan)
                if verdict.feasible and verdict.objective < best:
                    best, decision = verdict.objective, plan
    return Result(decision, best, best, NAME, "every plan", {"plans": tried})


PARTITION_SOLVERS.register(NAME, PartitionSolver((HetPipeProblem,), exact=True, run=try_everything))

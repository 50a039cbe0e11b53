"""Judge plans one by one: the loop of every solver that tries everything."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from planner.solvers.partition import Deadline, Progress, Result
from planner.space.partition import PartitionProblem


def best_of(
    problem: PartitionProblem,
    plans: Iterable[Any],
    *,
    solver: str,
    time_limit_s: float,
    space: str = "every plan",
    progress: Progress | None = None,
) -> Result:
    """The best feasible plan by the judge, proven unless the time ran out before the plans did.

    Args:
        problem: what is solved.
        plans: all its plans; malformed ones may be among them.
        solver: who asks.
        time_limit_s: stop after about this long.
        space: what the bound speaks of.
        progress: called when a better plan is found.
    """
    deadline = Deadline(time_limit_s)
    best, decision, tried, complete = math.inf, None, 0, True
    for plan in plans:
        tried += 1
        verdict = problem.judge(plan)
        if verdict.feasible and verdict.objective < best:
            best, decision = verdict.objective, plan
            if progress:
                progress(solver, best, 0.0)
        if deadline.passed:
            complete = False
            break
    return Result(decision, best, best if complete else 0.0, solver, space, {"tried": tried})

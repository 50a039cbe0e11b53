"""The last step of a solver: its answer through the problem's own judge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from planner.solvers.partition import RELATIVE_TOLERANCE, Result
from planner.space.partition.types import PartitionProblem


def verified(
    problem: PartitionProblem,
    decision: Any,  # noqa: ANN401
    objective: float,
    bound: float,
    solver: str,
    space: str = "",
    statistics: Mapping[str, int] | None = None,
) -> Result:
    """A result whose objective is the judge's.

    Args:
        problem: what was solved.
        decision: the answer, None when none was found.
        objective: what the solver says of it.
        bound: what it proved.
        solver: its name.
        space: what the bound speaks of.
        statistics: counts.

    Raises:
        RuntimeError: solver and judge disagree, which is a bug in one of them.
    """
    if decision is None:
        return Result(None, math.inf, bound, solver, space, dict(statistics or {}))
    verdict = problem.judge(decision)
    apart = abs(verdict.objective - objective) > RELATIVE_TOLERANCE * max(abs(objective), 1e-300)
    if apart or not verdict.feasible:
        faults = "; ".join(v.message for v in verdict.violations)
        raise RuntimeError(f"{solver}: says {objective!r}, its judge {verdict.objective!r} {faults}")
    return Result(decision, verdict.objective, min(bound, verdict.objective), solver, space, dict(statistics or {}))

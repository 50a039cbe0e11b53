"""A problem to its best decision and a bound; one file a solver."""

from __future__ import annotations

from planner.registry import Registry
from planner.solvers.types import Judge, Solution, Solver

SOLVERS: Registry[Solver] = Registry(__name__, "solver")
"""All solvers by name; a module of this package registers its own."""


def get(name: str) -> Solver:
    """The solver of that name.

    Raises:
        UsageError: no solver has that name; the hint names the closest ones.
    """
    return SOLVERS.get(name)


__all__ = ["SOLVERS", "Judge", "Solution", "Solver", "get"]

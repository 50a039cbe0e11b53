"""What a solver takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from planner.space.problem import StageProblem
from planner.space.types import Decision, Evaluation

Judge = Callable[[Decision], Evaluation]
"""Prices a decision with code that no solver shares: `planner.space.evaluate` with its inputs filled in."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver found out about one problem.

    Attributes:
        found: feasible decisions faster than the cutoff with the judge's verdicts, fastest first, no two alike.
        bound_s: no decision of the problem is faster; infinite when none is feasible.
        states: partial decisions that were looked at.
    """

    found: tuple[tuple[Decision, Evaluation], ...]
    bound_s: float
    states: int = 0


class Solver(Protocol):
    """A way to solve a `StageProblem`."""

    def __call__(self, problem: StageProblem, judge: Judge, *, cutoff_s: float, keep: int) -> Solution:
        """Find the fastest feasible decision.

        Args:
            problem: what can be decided.
            judge: prices complete decisions.
            cutoff_s: only decisions faster than this matter; where there is none, the bound is at least this.
            keep: most decisions to return.
        """
        ...

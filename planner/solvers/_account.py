"""The account of a search: which problems it settled, and what none of their decisions is faster than."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.solvers._candidates import SAME
from planner.solvers._frontier import Looked, Task
from planner.solvers.types import Explored, Outcome, Solution
from planner.space.types import Certificate


class Account:
    """What is known of all that was looked at.

    Attributes:
        explored: problems that were settled, in order.
        open: problems that were looked at and bound others; they are solved when the bound of all depends on them.
        bound_s: no decision of the problems that were settled is faster.
    """

    def __init__(self) -> None:
        self.explored: list[Explored] = []
        self.open: list[Looked] = []
        self.bound_s = self._tried_s = self._line_s = math.inf

    @property
    def lowest_s(self) -> float:
        """No decision of the problems that were settled, or are open, is faster."""
        return min([self.bound_s, *(entry.bound_s for entry in self.open)])

    def lower(self, bound_s: float, *, only_bounds: bool = False) -> None:
        """Some decisions may be as fast as this; `only_bounds`: some that are never made."""
        self.lower_beside(bound_s, only_bounds=only_bounds)
        self._line_s = min(self._line_s, bound_s)

    def lower_beside(self, bound_s: float, *, only_bounds: bool = False) -> None:
        """The same of decisions with other schedules than pipelines with one stage on each worker."""
        self.bound_s = min(self.bound_s, bound_s)
        self._tried_s = self._tried_s if only_bounds else min(self._tried_s, bound_s)

    def note(
        self,
        tasks: Sequence[Task],
        outcome: Outcome,
        bound_s: float,
        solution: Solution | None = None,
        *,
        only_bounds: bool = False,
    ) -> None:
        """Keep account of problems; those of which not even an infinite time can be reached are infeasible."""
        if outcome is not Outcome.DOMINATED:
            outcome = Outcome.INFEASIBLE if math.isinf(bound_s) else outcome
            self.lower(bound_s, only_bounds=only_bounds)
        self.explore(tasks, outcome, bound_s, solution)

    def explore(
        self, tasks: Sequence[Task], outcome: Outcome, bound_s: float, solution: Solution | None = None
    ) -> None:
        """List problems without a bound of their own."""
        best_s = solution.found[0][1].iteration_s if solution and solution.found else math.inf
        self.explored += [
            Explored(
                task.micro_batch,
                task.copies,
                task.schedule,
                task.zero,
                outcome,
                bound_s,
                best_s,
                solution.states if solution else 0,
                task.ranks,
                task.sharding,
            )
            for task in tasks
        ]

    def certificate(self, best_s: float, space: str) -> Certificate:
        """What is proven of an answer.

        Closer prices of memory, which are tried for the best alone, may go below what the others are bounded by.

        Args:
            best_s: its time.
            space: what was searched, in words.
        """
        bound_s = min(best_s, self.bound_s)
        gap = (best_s - bound_s) / best_s if best_s else 0.0
        tried_s = min(self._tried_s, best_s) if self._tried_s <= best_s * (1 + SAME) else None
        known_s = tried_s if tried_s is not None and tried_s > bound_s * (1 + SAME) else None
        line_s = min(self._line_s, best_s) if bound_s * (1 + SAME) < self._line_s < math.inf else None
        return Certificate(bound_s, gap, space, gap <= SAME, known_s, line_s)

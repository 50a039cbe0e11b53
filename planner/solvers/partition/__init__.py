"""Solvers of the partition problems, one file each, and the front that picks and races them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from planner.registry import Registry

Progress = Callable[[str, float, float], None]
"""Called with (solver, incumbent, bound) whenever one of the two improves."""

RELATIVE_TOLERANCE = 1e-9
"""Objectives closer than this count as equal."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a solver found out about one problem.

    Attributes:
        decision: the best decision found; None when none was found.
        objective: its objective as judged; infinite when there is none.
        bound: no feasible decision is better; infinite when the problem is proven infeasible, 0 when nothing is proven.
        solver: who found it.
        space: what the bound speaks of, in words.
        statistics: counts worth showing (states, ideals, nodes); never seconds, so that equal runs give equal results.
    """

    decision: Any
    objective: float
    bound: float
    solver: str
    space: str = ""
    statistics: dict[str, int] = field(default_factory=dict)

    @property
    def proven(self) -> bool:
        """Whether nothing better exists, up to rounding."""
        return self.bound >= self.objective * (1 - RELATIVE_TOLERANCE)

    @property
    def gap(self) -> float:
        """(objective - bound) / objective; 1 when nothing was found."""
        if self.decision is None or self.objective <= 0:
            return 0.0 if self.proven else 1.0
        return max(0.0, 1 - self.bound / self.objective)


class Run(Protocol):
    """The function of a solver."""

    def __call__(
        self,
        problem: Any,  # noqa: ANN401
        *,
        time_limit_s: float,
        start: Any = None,  # noqa: ANN401
        progress: Progress | None = None,
    ) -> Result:
        """Solve a problem of a kind that the solver takes.

        Args:
            problem: the problem.
            time_limit_s: stop after about this long and give what was found, with its bound.
            start: a feasible decision to start from.
            progress: called when incumbent or bound improve.
        """
        ...


@dataclass(frozen=True, slots=True)
class PartitionSolver:
    """A registered solver.

    Attributes:
        takes: problem types it can solve.
        exact: whether, given time, it proves its answer optimal.
        run: the function.
        counts_work: whether `run` also takes `work_s`: seconds for which its work is sized, whatever the clock says. A
            turn's time depends on how long the turns before it took, its work does not.
    """

    takes: tuple[type, ...]
    exact: bool
    run: Run
    counts_work: bool = False


PARTITION_SOLVERS: Registry[PartitionSolver] = Registry(__name__, "partition solver")
"""All solvers by name; a module of this package registers its own."""

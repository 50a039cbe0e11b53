"""Solvers of the partition problems, one file each, and the front that picks and races them.

A solver has one clock, a deadline that all of its phases watch, and its answer passes the problem's own judge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from planner.registry import Registry
from planner.space.partition import PartitionProblem

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


class OutOfTime(Exception):  # noqa: N818 - a signal between the phases of a solver, never seen by users
    """The deadline has passed. A solver that raised it returns the best plan and bound it has by then."""


class Deadline:
    """A moment on the wall clock.

    Phases that hold nothing worth keeping call `check`; those that do look at `passed` and end by themselves. Either
    is called often enough that a phase overruns by some hundredths of a second on graphs of thousands of nodes.
    """

    __slots__ = ("_at",)

    def __init__(self, limit_s: float) -> None:
        self._at = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds that remain; negative when it has passed."""
        return self._at - time.monotonic()

    @property
    def passed(self) -> bool:
        """Whether no time remains."""
        return self.left_s <= 0

    def check(self) -> None:
        """Go on only while time remains.

        Raises:
            OutOfTime: the deadline has passed.
        """
        if self.passed:
            raise OutOfTime

    def within(self, limit_s: float) -> Deadline:
        """The earlier of this deadline and `limit_s` seconds from now."""
        return Deadline(min(limit_s, self.left_s))


NEVER = Deadline(math.inf)
"""A deadline that does not pass."""


class Incumbent:
    """The best plan that a solver has, its objective always the judge's, and the best bound it has proved.

    Attributes:
        decision: the plan; None before there is one.
        objective: its objective; infinite without a plan.
        bound: no plan is below it.

    Args:
        problem: what is solved.
        solver: its name.
        progress: called whenever a plan is taken.
        plans: plans to begin with, of which nothing is told; None among them stands for no plan.
    """

    def __init__(
        self, problem: PartitionProblem, solver: str, progress: Progress | None = None, plans: Iterable[Any] = ()
    ) -> None:
        self.problem, self.solver = problem, solver
        self.progress: Progress | None = None
        self.decision: Any = None
        self.objective, self.bound = math.inf, 0.0
        for plan in plans:
            self.offer(plan)
        self.progress = progress

    def offer(self, plan: Any) -> bool:  # noqa: ANN401
        """Take a plan if the judge finds it feasible and better; whether it does. None is no plan."""
        verdict = None if plan is None else self.problem.judge(plan)
        if verdict is None or not verdict.feasible or verdict.objective >= self.objective:
            return False
        self.decision, self.objective = plan, verdict.objective
        self.report()
        return True

    def report(self) -> None:
        """Tell of plan and bound."""
        if self.progress:
            self.progress(self.solver, self.objective, min(self.bound, self.objective))

    def result(self, space: str, statistics: Mapping[str, int] | None = None) -> Result:
        """Plan and bound as the solver's result; `bound` is infinite where it is proven that there is no plan."""
        bound = self.bound if self.decision is None else min(self.bound, self.objective)
        return Result(self.decision, self.objective, bound, self.solver, space, dict(statistics or {}))


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

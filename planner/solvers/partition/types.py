"""What a partition solver works on: a problem, its clock, and the best plan and bound known so far."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from planner.space.partition import PartitionProblem

Progress = Callable[[str, float, float], None]
"""Called with (solver, incumbent, bound) whenever one of the two improves."""

RELATIVE_TOLERANCE = 1e-9
"""Objectives closer than this count as equal."""


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of one problem after a search.

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


class OutOfTime(Exception):  # noqa: N818 - a signal between the phases of a solver, never seen by users
    """The deadline has passed. What a solver that raises it has offered and proved by then counts."""


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


class Search:
    """One problem and what is known of it: every plan has passed the judge, and no known plan contradicts the bound.

    Attributes:
        problem: what is solved.
        deadline: when the solver at work has to end.
        work_s: seconds for which work is sized, whatever the clock says: those of the whole search, since what the
            solvers before took depends on the machine.
        engine_work: work that CP-SAT has done so far, as it counts it.
        decision: the best plan; None before there is one.
        objective: its objective as judged; infinite without a plan.
        bound: no plan is below it; infinite when it is proven that there is none.
        solver: name of the solver at work.
        alone: whether no other solver has a turn.
        space: what the bound speaks of, in words.

    Args:
        problem: what is solved.
        time_limit_s: about how long.
        progress: called whenever plan or bound improve.
    """

    def __init__(self, problem: PartitionProblem, time_limit_s: float, progress: Progress | None = None) -> None:
        self.problem: Any = problem
        self.work_s, self.engine_work = time_limit_s, 0.0
        self.deadline = Deadline(time_limit_s)
        self.progress = progress
        self.decision: Any = None
        self.objective, self.bound = math.inf, 0.0
        self.solver, self.space, self.alone = "", "", False
        self._found_by = ""
        self._counts: dict[str, dict[str, int]] = {}

    @property
    def settled(self) -> bool:
        """Whether nothing better exists, or nothing at all."""
        return self.bound >= self.objective * (1 - RELATIVE_TOLERANCE)

    def offer(self, plan: Any, claimed: float | None = None) -> bool:  # noqa: ANN401
        """Take a plan if the judge finds it feasible and better; whether it does. None is no plan.

        Args:
            plan: a decision of the problem.
            claimed: the objective that the solver gives it; by default the judge alone says.

        Raises:
            RuntimeError: the judge contradicts the claim, a bug of the solver.
        """
        if plan is None:
            return False
        verdict = self.problem.judge(plan)
        if claimed is not None and not verdict.feasible:
            raise RuntimeError(f"{self.solver}: its plan breaks a limit: {verdict.violations[0].message}")
        if claimed is not None and not math.isclose(
            verdict.objective, claimed, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-300
        ):
            raise RuntimeError(f"{self.solver}: says {claimed!r}, the judge says {verdict.objective!r}")
        if not verdict.feasible or verdict.objective >= self.objective:
            return False
        self.decision, self.objective, self._found_by = plan, float(verdict.objective), self.solver
        self.report()
        return True

    def prove(self, bound: float) -> None:
        """Take a bound: no plan is below it; infinite says that there is no plan.

        Raises:
            RuntimeError: the best plan contradicts it, a bug of the solver.
        """
        if math.isnan(bound):
            raise RuntimeError(f"{self.solver}: its bound is not a number")
        if bound > self.objective * (1 + RELATIVE_TOLERANCE):
            raise RuntimeError(f"{self.solver}: proves a bound of {bound!r}, yet a plan has {self.objective!r}")
        if bound > self.bound:
            self.bound = float(bound)
            self.report()

    def offer_all(self, plans: Iterable[tuple[str, Any]]) -> None:
        """Take the best of some named plans."""
        for name, plan in plans:
            self.solver = name
            self.offer(plan)

    def count(self, **counts: int) -> None:
        """Counts of the solver at work, for people."""
        self._counts.setdefault(self.solver, {}).update(counts)

    def report(self) -> None:
        """Tell of plan and bound."""
        if self.progress:
            self.progress(self.solver, self.objective, min(self.bound, self.objective))

    def result(self) -> Result:
        """Plan and bound; counts with the solver's name before them where several had a turn."""
        alone = len(self._counts) == 1
        counts = {
            key if alone else f"{name}: {key}": int(value)
            for name, of_solver in self._counts.items()
            for key, value in of_solver.items()
        }
        bound = self.bound if self.decision is None else min(self.bound, self.objective)
        return Result(self.decision, self.objective, bound, self._found_by, self.space, counts)

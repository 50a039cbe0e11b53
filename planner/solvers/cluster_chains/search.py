"""State of one search for stages: its problem, its clock, and the best plan and bound known so far."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from planner.solvers.cluster_chains.verdict import PartitionProblem

Progress = Callable[[str, float, float], None]
"""Called with (solver, objective of the best plan, bound) whenever one of the two improves."""

RELATIVE_TOLERANCE = 1e-9
"""Objectives whose relative difference is below this count as equal."""


@dataclass(frozen=True, slots=True)
class Result:
    """Best plan and bound after a search.

    Attributes:
        decision: the best decision found; None when none was found.
        objective: its objective as judged; infinite when there is none.
        bound: lower bound on the objective of every feasible decision; infinite when the problem is proven infeasible,
            0 when nothing is proven.
        solver: name of the solver that found the decision.
        space: the decisions that the bound covers, in words.
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
        """True if the decision is optimal, up to rounding."""
        return self.bound >= self.objective * (1 - RELATIVE_TOLERANCE)

    @property
    def gap(self) -> float:
        """(objective - bound) / objective; 1 without a decision."""
        if self.decision is None or self.objective <= 0:
            return 0.0 if self.proven else 1.0
        return max(0.0, 1 - self.bound / self.objective)


class OutOfTime(Exception):  # noqa: N818 - a signal between the phases of a solver, never seen by users
    """The deadline has passed. Plans offered and bounds proven before it was raised stay valid."""


class Deadline:
    """A moment on the wall clock.

    A phase without partial results calls `check`, which raises; a phase with partial results reads `passed` and returns
    them. Both are called often enough that a phase overruns by some hundredths of a second on thousands of nodes.
    """

    __slots__ = ("_at",)

    def __init__(self, limit_s: float) -> None:
        self._at = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline; negative after it."""
        return self._at - time.monotonic()

    @property
    def passed(self) -> bool:
        """True from the deadline on."""
        return self.left_s <= 0

    def check(self) -> None:
        """Return before the deadline, raise after it.

        Raises:
            OutOfTime: the deadline has passed.
        """
        if self.passed:
            raise OutOfTime

    def within(self, limit_s: float) -> Deadline:
        """The earlier of this deadline and `limit_s` seconds from now."""
        return Deadline(min(limit_s, self.left_s))


NEVER = Deadline(math.inf)
"""A deadline that never passes."""


class SearchState:
    """State of one search: problem, deadline, best plan, bound.

    Every kept plan has passed the judge, and no kept plan is below the bound.

    Attributes:
        problem: what is solved.
        deadline: when the running solver must return.
        work_s: seconds from which solvers derive their limits on counted work: the time limit of the whole search, not
            the time left, which depends on the machine.
        engine_work: deterministic work that CP-SAT has done so far, in its own unit.
        decision: the best plan; None before there is one.
        objective: the judge's objective of that plan; infinite without a plan.
        bound: lower bound on the objective of every plan; infinite when the problem is proven infeasible.
        solver: name of the running solver.
        space: the plans that the bound covers, in words.

    Args:
        problem: what is solved.
        time_limit_s: seconds until the deadline.
        progress: called whenever plan or bound improve.
    """

    def __init__(self, problem: PartitionProblem, time_limit_s: float, progress: Progress | None = None) -> None:
        self.problem: Any = problem
        self.work_s, self.engine_work = time_limit_s, 0.0
        self.deadline = Deadline(time_limit_s)
        self.progress = progress
        self.decision: Any = None
        self.objective, self.bound = math.inf, 0.0
        self.solver, self.space = "", ""
        self._found_by = ""
        self._counts: dict[str, dict[str, int]] = {}

    @property
    def settled(self) -> bool:
        """True if the best plan is proven optimal, or the problem proven infeasible."""
        return self.bound >= self.objective * (1 - RELATIVE_TOLERANCE)

    def offer(self, plan: Any, claimed: float | None = None) -> bool:  # noqa: ANN401
        """Keep a plan if the judge finds it feasible and better than the best one; returns whether it was kept.

        Args:
            plan: a decision of the problem; None is ignored.
            claimed: the objective that the solver computed; compared with the judge's if given.

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
        """Raise the lower bound on the objective of every plan; infinite means that no plan exists.

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

    def take_turn(self, name: str, run: Callable[[SearchState], None], share: float = 1.0) -> None:
        """Run a solver for a share of the remaining time, unless the search is settled.

        Args:
            name: of the solver, which its plans are credited to.
            run: offers plans and proves bounds until the deadline; may raise `OutOfTime`.
            share: fraction of the remaining time.
        """
        search_deadline = self.deadline
        if self.settled or share <= 0 or search_deadline.passed:
            return
        self.solver, self.deadline = name, search_deadline.within(search_deadline.left_s * share)
        with contextlib.suppress(OutOfTime):
            run(self)
        if self.deadline.passed and not self.settled:
            self.count(out_of_time=1)
        self.deadline = search_deadline

    def offer_trivial(self) -> None:
        """Offer the problem's trivial plans."""
        self.offer_all((f"trivial plan: {label}", plan) for label, plan in self.problem.trivial())

    def offer_all(self, plans: Iterable[tuple[str, Any]]) -> None:
        """Offer several plans, each with the name it is credited to."""
        for name, plan in plans:
            self.solver = name
            self.offer(plan)

    def count(self, **counts: int) -> None:
        """Set counts of the running solver, which the result shows."""
        self._counts.setdefault(self.solver, {}).update(counts)

    def report(self) -> None:
        """Call `progress` with the best objective and the bound."""
        if self.progress:
            self.progress(self.solver, self.objective, min(self.bound, self.objective))

    def result(self) -> Result:
        """Best plan and bound; counts carry the solver's name if several solvers ran."""
        single = len(self._counts) == 1
        counts = {
            key if single else f"{name}: {key}": int(value)
            for name, of_solver in self._counts.items()
            for key, value in of_solver.items()
        }
        bound = self.bound if self.decision is None else min(self.bound, self.objective)
        return Result(self.decision, self.objective, bound, self._found_by, self.space, counts)


def best_decision(problem: PartitionProblem, run: Callable[[SearchState], None], time_limit_s: float) -> Any:  # noqa: ANN401
    """The best decision that one solver finds within a time limit, trivial plans included; None if there is none."""
    search = SearchState(problem, time_limit_s)
    search.offer_trivial()
    search.take_turn(run.__name__, run)
    return search.decision

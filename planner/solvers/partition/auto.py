"""The front: picks solvers that take a problem, lets them take turns within the time limit, and judges every answer.

The turns: trivial plans first, as incumbents; then the family's own front, where it has one that knows better in which
order to let its solvers run; else quick improvers, programmes made for the problem, and general engines, each beginning
with the best plan so far. Engines race: every one gets a first turn, the one that got further gets the rest. All stop
as soon as the bound meets the plan. Oracles that try everything run only when they are named, or when there is nothing
else.

No answer is taken on trust: the front judges each plan itself, and refuses solvers whose plan breaks a limit, whose
objective is not the judge's, or whose bound a known plan contradicts.

Why a problem has no plan: the limits whose lifting alone makes it feasible, and how far they would have to give.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from planner.errors import InfeasibleError, UsageError
from planner.registry import did_you_mean
from planner.solvers.partition import (
    PARTITION_SOLVERS,
    RELATIVE_TOLERANCE,
    Deadline,
    OutOfTime,
    PartitionSolver,
    Progress,
    Result,
)
from planner.space.partition import PartitionProblem
from planner.units import format_bytes

Find = Callable[[PartitionProblem, float], Any]
"""Looks for a feasible decision of a problem for a number of seconds; None when it finds none."""
Trial = Callable[[PartitionProblem], Any]

_ALL_TRIALS_S = 12.0
_TRIAL_S = 3.0
_STEPS = 7
_ENOUGH = 1.01


def no_plan(problem: PartitionProblem, found: Result, time_limit_s: float, find: Find | None) -> InfeasibleError:
    """The error that says why there is no plan.

    Args:
        problem: the problem.
        found: what the search came to; its bound is infinite when it proved that there is no plan.
        time_limit_s: how long it took at the most.
        find: looks for any feasible plan; without it no reasons are sought.
    """
    if found.bound < math.inf:
        return InfeasibleError(
            f"no plan was found within {time_limit_s:g} s, and none was shown not to exist",
            hint="allow more time, more memory or more devices",
        )
    if find is None:
        return InfeasibleError("no plan keeps all limits", hint="allow more memory and devices")
    deadline = Deadline(min(_ALL_TRIALS_S, time_limit_s))

    def trial(changed: PartitionProblem) -> Any:  # noqa: ANN401
        return None if deadline.passed else find(changed, min(deadline.left_s, _TRIAL_S))

    reasons = [text for text in (_memory(problem, trial), _order(problem, trial)) if text]
    if not reasons:
        return InfeasibleError(
            "no plan keeps all limits, and lifting one of them was not seen to help",
            hint="allow more memory and devices",
        )
    return InfeasibleError("no plan keeps all limits", hint="; or ".join(reasons))


def _with_memory(problem: Any, limit: float) -> Any:  # noqa: ANN401
    """The problem with another memory limit, None when it has none that could be lifted."""
    if hasattr(problem, "memory_bytes") and isinstance(problem.memory_bytes, float):
        return dataclasses.replace(problem, memory_bytes=limit)
    if hasattr(problem, "capacity_bytes"):
        return dataclasses.replace(problem, capacity_bytes=limit)
    if hasattr(getattr(problem, "memory", None), "device_bytes"):
        return dataclasses.replace(problem, memory=dataclasses.replace(problem.memory, device_bytes=limit))
    return None


def _limit(problem: Any) -> float:  # noqa: ANN401
    for name in ("memory_bytes", "capacity_bytes"):
        if isinstance(getattr(problem, name, None), float):
            return float(getattr(problem, name))
    return float(problem.memory.device_bytes)


def _memory(problem: Any, find: Trial) -> str:  # noqa: ANN401
    """How much memory a device would need, "" when memory alone is not the reason."""
    free = _with_memory(problem, math.inf)
    if free is None or not math.isfinite(_limit(problem)):
        return ""
    plan = find(free)
    if plan is None:
        return ""
    low = _limit(problem)
    high = max((v.needed for v in problem.judge(plan).violations if v.kind == "memory"), default=low)
    for _ in range(_STEPS):
        if high <= low * _ENOUGH:
            break
        middle = math.sqrt(max(low, high * 1e-3) * high)
        plan = find(_with_memory(problem, middle))
        if plan is None:
            low = middle
        else:
            high = middle
    return f"{format_bytes(_limit(problem))} a device is too little memory: {format_bytes(high)} suffices"


def _order(problem: Any, find: Trial) -> str:  # noqa: ANN401
    if not getattr(problem, "contiguous", False):
        return ""
    free = dataclasses.replace(problem, contiguous=False)
    return "allow plans that are not contiguous" if find(free) is not None else ""


AUTO = "auto"
_FRONTS = ("max-load",)
"""Solvers that let others of their family run in turn."""
_ENGINES = ("cp-sat", "highs")
"""Parts of the names of solvers that hand the problem to a general engine."""
_IMPROVER_SHARE = 0.25
_PROGRAMME_SHARE = 0.6
_FIRST_TURN_SHARE = 0.3


def solvers_for(problem: object) -> tuple[str, ...]:
    """Names of all solvers that take a problem's type, sorted."""
    return tuple(name for name, entry in PARTITION_SOLVERS.items() if isinstance(problem, entry.takes))


def solve(
    problem: PartitionProblem,
    *,
    solver: str = AUTO,
    time_limit_s: float = 60.0,
    start: Any = None,  # noqa: ANN401
    progress: Progress | None = None,
    reasons: bool = True,
) -> Result:
    """The best plan that can be found within a time limit, with a bound on all plans.

    Args:
        problem: a problem of any family.
        solver: a solver's name, or "auto" to let all that take the problem have their turns.
        time_limit_s: about how long to search.
        start: a decision to begin with; left aside when it is not feasible.
        progress: called with (solver, incumbent, bound) whenever incumbent or bound improve.
        reasons: when there is no plan, take time to find out which limits stand in the way.

    Returns:
        a result whose decision has passed the judge.

    Raises:
        UsageError: no such solver, one that does not take the problem, or a time limit that is not positive.
        InfeasibleError: no plan was found; says whether there is none, and which limits stand in the way.
        RuntimeError: a solver broke its word (a limit, its objective or its bound); a bug.
    """
    if not time_limit_s > 0:
        raise UsageError(f"a time limit of {time_limit_s:g} s leaves no time", hint="give a positive limit")
    names = _chosen(problem, solver)
    race = Race(problem, time_limit_s, progress)
    race.offer(start)
    if solver == AUTO:
        race.run_all(names)
    else:
        race.turn(solver, 1.0)
        race.offer_trivial()
    found = race.result()
    if found.decision is None:
        raise no_plan(problem, found, time_limit_s, (lambda p, s: _feasible(p, solver, s)) if reasons else None)
    return found


def _chosen(problem: PartitionProblem, solver: str) -> tuple[str, ...]:
    able = solvers_for(problem)
    kind = type(problem).__name__
    if solver == AUTO:
        if not able:
            raise UsageError(f"no solver takes a {kind}", hint="register one in planner.solvers.partition")
        return able
    if solver not in able:
        known = PARTITION_SOLVERS.find(solver) is not None
        message = f"the solver {solver!r} does not take a {kind}" if known else f"unknown partition solver {solver!r}"
        hint = f"these do: {', '.join((AUTO, *able))}" if known else did_you_mean(solver, (AUTO, *able))
        raise UsageError(message, where="--solver", hint=hint)
    return (solver,)


def _feasible(problem: PartitionProblem, solver: str, time_limit_s: float) -> Any:  # noqa: ANN401
    """A feasible decision of a problem, None when none is found in time."""
    race = Race(problem, time_limit_s, None)
    for name in _chosen(problem, solver):
        if race.decision is None:
            race.turn(name, 1.0)
    return race.decision


class Race:
    """The best plan and bound so far, and the clock.

    Attributes:
        problem: what is solved.
        decision: the best plan, None before there is one.
        objective: as the judge says; infinite without a plan.
        bound: the highest bound that any solver proved.
        solver: who found the plan.
        space: what the bound speaks of.
        statistics: counts by solver.
    """

    def __init__(self, problem: PartitionProblem, limit_s: float, progress: Progress | None) -> None:
        self.problem, self.limit_s, self.progress = problem, limit_s, progress
        self.deadline = Deadline(limit_s)
        self.decision: Any = None
        self.objective, self.bound = math.inf, 0.0
        self.solver, self.space = "", ""
        self.counts: dict[str, dict[str, int]] = {}

    @property
    def settled(self) -> bool:
        """Whether nothing better exists, or nothing at all."""
        return self.bound >= self.objective * (1 - RELATIVE_TOLERANCE)

    @property
    def left_s(self) -> float:
        """Time that remains."""
        return self.deadline.left_s

    def offer(self, decision: Any, solver: str = "start") -> None:  # noqa: ANN401
        """Begin with a plan when it is feasible and better."""
        if decision is None:
            return
        verdict = self.problem.judge(decision)
        if verdict.feasible and verdict.objective < self.objective:
            self.decision, self.objective, self.solver = decision, float(verdict.objective), solver
            self._report(solver)

    def offer_trivial(self) -> None:
        """Take the plans that anybody would try first, unless a plan is known or shown not to exist."""
        if self.decision is None and self.bound < math.inf:
            for label, plan in self.problem.trivial():
                self.offer(plan, f"trivial plan: {label}")

    def run_all(self, names: Sequence[str]) -> None:
        """Give every solver its turn."""
        self.offer_trivial()
        fronts = [name for name in names if name in _FRONTS]
        names = fronts or list(names)
        engines = [name for name in names if _is(name, _ENGINES)]
        own = sorted((name for name in names if name not in engines), key=lambda n: (_entry(n).exact, n))
        for name in own:
            alone = not engines and name == own[-1]
            share = _PROGRAMME_SHARE if _entry(name).exact else _IMPROVER_SHARE
            self.turn(name, 1.0 if alone else share)
        self._engines(engines)

    def _engines(self, engines: list[str]) -> None:
        """A first turn for each, the rest for the one that got further."""
        if len(engines) == 1:
            self.turn(engines[0], 1.0)
            return
        reached: list[tuple[float, str]] = []
        for name in engines:
            reached.append((-self.turn(name, _FIRST_TURN_SHARE / (1 - _FIRST_TURN_SHARE * len(reached))), name))
        if reached:
            self.turn(min(reached)[1], 1.0)

    def turn(self, name: str, share: float) -> float:
        """Let a solver run for a share of the time that remains, unless all is settled; its bound."""
        left = self.left_s * share
        if self.settled or left <= 0:
            return 0.0
        entry = _entry(name)
        work: Any = {"work_s": self.limit_s * share} if entry.counts_work else {}
        try:
            found = entry.run(self.problem, time_limit_s=left, start=self.decision, progress=self._listen, **work)
        except OutOfTime:
            return 0.0
        self._take(name, found)
        return found.bound

    def _take(self, name: str, found: Result) -> None:
        """Check what a solver says and keep what is new."""
        if found.decision is not None:
            verdict = self.problem.judge(found.decision)
            if not verdict.feasible:
                raise RuntimeError(f"{name}: its plan breaks a limit: {verdict.violations[0].message}")
            if not math.isclose(verdict.objective, found.objective, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-300):
                raise RuntimeError(f"{name}: says {found.objective!r}, the judge says {verdict.objective!r}")
            if verdict.objective <= self.objective:
                self.decision, self.objective, self.solver = found.decision, float(verdict.objective), name
        if found.bound > self.objective * (1 + RELATIVE_TOLERANCE):
            raise RuntimeError(f"{name}: proves a bound of {found.bound!r}, yet a plan has {self.objective!r}")
        if math.isnan(found.bound):
            raise RuntimeError(f"{name}: its bound is not a number")
        if found.bound > self.bound or not self.space:
            self.space = found.space
        self.bound = max(self.bound, float(found.bound))
        known = self.counts.setdefault(name, {})
        known.update(found.statistics)
        self._report(name)

    def _listen(self, solver: str, incumbent: float, bound: float) -> None:
        if self.progress:
            self.progress(solver, min(incumbent, self.objective), max(bound, self.bound))

    def _report(self, solver: str) -> None:
        self._listen(solver, self.objective, self.bound)

    def result(self) -> Result:
        """What was found."""
        alone = len(self.counts) == 1
        counts = {
            key if alone else f"{name}: {key}": int(value)
            for name, found in self.counts.items()
            for key, value in found.items()
        }
        bound = self.bound if self.decision is None else min(self.bound, self.objective)
        return Result(self.decision, self.objective, bound, self.solver, self.space, counts)


def _entry(name: str) -> PartitionSolver:
    return PARTITION_SOLVERS.get(name)


def _is(name: str, kinds: Sequence[str]) -> bool:
    return any(kind in name for kind in kinds)


solve_partition = solve

"""Solvers of the partition problems, one file each, and the front that gives each its turn and judges every answer.

The turns of a problem: trivial plans first, then the solvers that take it in the order of their entries, each beginning
with the best plan so far. All stop as soon as the bound meets the plan.

No answer is taken on trust: a plan passes the problem's own judge before it counts, and a solver whose plan breaks a
limit, whose objective is not the judge's, or whose bound a known plan contradicts is refused.

Why a problem has no plan: the limits whose lifting alone makes it feasible, and how far they would have to give.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.errors import InfeasibleError, UsageError
from planner.registry import Registry, did_you_mean
from planner.solvers.partition.types import RELATIVE_TOLERANCE, Deadline, OutOfTime, Progress, Result, Search
from planner.space.partition import PartitionProblem
from planner.units import format_bytes

__all__ = [
    "AUTO",
    "PARTITION_SOLVERS",
    "RELATIVE_TOLERANCE",
    "Deadline",
    "OutOfTime",
    "PartitionSolver",
    "Progress",
    "Result",
    "Search",
    "search_partition",
    "solve_partition",
    "solvers_for",
]

AUTO = "auto"
_ALL_TRIALS_S = 12.0
_TRIAL_S = 3.0
_STEPS = 7
_ENOUGH = 1.01


@dataclass(frozen=True, slots=True)
class PartitionSolver:
    """A registered solver.

    Attributes:
        takes: the problem type that it solves.
        run: offers plans to the search, and proves bounds, until its deadline; may raise `OutOfTime`.
        turn: its place among the solvers of the problem, the smallest first.
        share: part of the time left that its turn may take; with 0 it runs only where it is named.
    """

    takes: type
    run: Callable[[Search], None]
    turn: int = 0
    share: Callable[[Any], float] = lambda _: 1.0


PARTITION_SOLVERS: Registry[PartitionSolver] = Registry(__name__, "partition solver")
"""All solvers by name; a module of this package registers its own."""


def solvers_for(problem: object) -> tuple[str, ...]:
    """Names of all solvers that take a problem's type, in the order of their turns."""
    able = [(entry.turn, name) for name, entry in PARTITION_SOLVERS.items() if isinstance(problem, entry.takes)]
    return tuple(name for _, name in sorted(able))


def solve_partition(
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
    found = search_partition(problem, solver=solver, time_limit_s=time_limit_s, start=start, progress=progress)
    if found.decision is None:
        raise _no_plan(problem, found, time_limit_s, solver if reasons else None)
    return found


def search_partition(
    problem: PartitionProblem,
    *,
    solver: str = AUTO,
    time_limit_s: float = 60.0,
    start: Any = None,  # noqa: ANN401
    progress: Progress | None = None,
) -> Result:
    """As `solve_partition`, but where no plan was found the result says so, without a decision."""
    if not time_limit_s > 0:
        raise UsageError(f"a time limit of {time_limit_s:g} s leaves no time", hint="give a positive limit")
    names = _chosen(problem, solver)
    search = Search(problem, time_limit_s, progress)
    search.alone = len(names) == 1
    search.offer_all([("start", start)])
    trivial = [(f"trivial plan: {label}", plan) for label, plan in problem.trivial()]
    if solver == AUTO:
        search.offer_all(trivial)
    for name in names:
        _take_turn(search, name, PARTITION_SOLVERS.get(name).share(problem) if solver == AUTO else 1.0)
    if search.decision is None and search.bound < math.inf:
        search.offer_all(trivial)
    return search.result()


def _take_turn(search: Search, name: str, share: float) -> None:
    """Let a solver run for a share of the time that remains, unless all is settled."""
    whole = search.deadline
    if search.settled or share <= 0 or whole.passed:
        return
    search.solver, search.deadline = name, whole.within(whole.left_s * share)
    with contextlib.suppress(OutOfTime):
        PARTITION_SOLVERS.get(name).run(search)
    if search.deadline.passed and not search.settled:
        search.count(out_of_time=1)
    search.deadline = whole


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


def _no_plan(problem: PartitionProblem, found: Result, time_limit_s: float, solver: str | None) -> InfeasibleError:
    """The error that says why there is no plan.

    Args:
        problem: the problem.
        found: what the search came to; its bound is infinite when it proved that there is no plan.
        time_limit_s: how long it took at the most.
        solver: looks for plans under lifted limits; without it no reasons are sought.
    """
    if found.bound < math.inf:
        return InfeasibleError(
            f"no plan was found within {time_limit_s:g} s, and none was shown not to exist",
            hint="allow more time, more memory or more devices",
        )
    if solver is None:
        return InfeasibleError("no plan keeps all limits", hint="allow more memory and devices")
    deadline = Deadline(min(_ALL_TRIALS_S, time_limit_s))

    def trial(changed: PartitionProblem) -> Any:  # noqa: ANN401
        left_s = min(deadline.left_s, _TRIAL_S)
        return search_partition(changed, solver=solver, time_limit_s=left_s).decision if left_s > 0 else None

    reasons = [text for text in (_memory_reason(problem, trial), _order_reason(problem, trial)) if text]
    if not reasons:
        return InfeasibleError(
            "no plan keeps all limits, and lifting one of them was not seen to help",
            hint="allow more memory and devices",
        )
    return InfeasibleError("no plan keeps all limits", hint="; or ".join(reasons))


def _memory_limit(problem: Any) -> float:  # noqa: ANN401
    """Bytes of a device; infinite where the problem has no single limit."""
    if isinstance(getattr(problem, "memory_bytes", None), float):
        return float(problem.memory_bytes)
    return float(getattr(getattr(problem, "memory", None), "device_bytes", math.inf))


def _with_memory(problem: Any, limit: float) -> Any:  # noqa: ANN401
    """The problem with another limit of memory."""
    if isinstance(getattr(problem, "memory_bytes", None), float):
        return dataclasses.replace(problem, memory_bytes=limit)
    return dataclasses.replace(problem, memory=dataclasses.replace(problem.memory, device_bytes=limit))


def _memory_reason(problem: Any, find: Callable[[Any], Any]) -> str:  # noqa: ANN401
    """How much memory a device would need, "" when memory alone is not the reason."""
    limit = _memory_limit(problem)
    plan = None if math.isinf(limit) else find(_with_memory(problem, math.inf))
    if plan is None:
        return ""
    low, high = limit, max((v.needed for v in problem.judge(plan).violations if v.kind == "memory"), default=limit)
    for _ in range(_STEPS):
        if high <= low * _ENOUGH:
            break
        middle = math.sqrt(max(low, high * 1e-3) * high)
        if find(_with_memory(problem, middle)) is None:
            low = middle
        else:
            high = middle
    return f"{format_bytes(limit)} a device is too little memory: {format_bytes(high)} suffices"


def _order_reason(problem: Any, find: Callable[[Any], Any]) -> str:  # noqa: ANN401
    if not getattr(problem, "contiguous", False):
        return ""
    free = dataclasses.replace(problem, contiguous=False)
    return "allow plans that are not contiguous" if find(free) is not None else ""

"""Solvers of the partition problems, one file each, and `solve_partition`, which runs them in turn.

Trivial plans are judged first. Then the registered solvers of the problem's type run in the order of their `turn`, each
starting from the best plan so far. The search ends as soon as the bound equals the best objective.

The problem's judge checks every plan before it counts. A solver whose plan breaks a limit, whose objective differs from
the judge's, or whose bound exceeds a known plan's objective raises RuntimeError.

When no plan exists, the error names each limit whose removal alone makes the problem feasible.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.errors import InfeasibleError, UsageError
from planner.published.problems import PartitionProblem
from planner.registry import Registry, did_you_mean
from planner.solvers.cluster_chains.search import RELATIVE_TOLERANCE as RELATIVE_TOLERANCE
from planner.solvers.cluster_chains.search import Deadline as Deadline
from planner.solvers.cluster_chains.search import OutOfTime as OutOfTime
from planner.solvers.cluster_chains.search import Progress as Progress
from planner.solvers.cluster_chains.search import Result as Result
from planner.solvers.cluster_chains.search import SearchState as SearchState
from planner.units import format_bytes

AUTO = "auto"
_ALL_TRIALS_S = 12.0
"""Seconds for all searches with a limit removed."""
_TRIAL_S = 3.0
_STEPS = 7
"""Bisection steps for the memory that would be enough."""
_CLOSE_ENOUGH = 1.01


@dataclass(frozen=True, slots=True)
class PartitionSolver:
    """A registered solver.

    Attributes:
        takes: the problem type that it solves.
        run: offers plans and proves bounds on a search until its deadline; may raise `OutOfTime`.
        turn: position among the solvers of the type, smallest first.
        share: fraction of the remaining time that it may use; a solver with 0 runs only when it is named.
    """

    takes: type
    run: Callable[[SearchState], None]
    turn: int = 0
    share: Callable[[Any], float] = lambda _: 1.0


PARTITION_SOLVERS: Registry[PartitionSolver] = Registry(__name__, "partition solver")
"""All solvers by name; a module of this package registers its own."""


def solvers_for(problem: object) -> tuple[str, ...]:
    """Names of the solvers of a problem's type, in the order of their turns."""
    able = [(entry.turn, name) for name, entry in PARTITION_SOLVERS.items() if isinstance(problem, entry.takes)]
    return tuple(name for _, name in sorted(able))


def solve_partition(
    problem: PartitionProblem,
    *,
    solver: str = AUTO,
    time_limit_s: float = 60.0,
    start: Any = None,  # noqa: ANN401
    progress: Progress | None = None,
) -> Result:
    """Find the best plan within a time limit, with a lower bound on the objective of every plan.

    Args:
        problem: a problem of any family.
        solver: a solver's name, or "auto" to run all solvers of the problem's type in turn.
        time_limit_s: seconds to search.
        start: a decision to start from; ignored when it is not feasible.
        progress: called with (solver, objective, bound) whenever one of the two improves.

    Returns:
        a result whose decision has passed the judge.

    Raises:
        UsageError: no such solver, a solver of another problem type, or a time limit that is not positive.
        InfeasibleError: no plan was found; says whether none exists, and which limits rule every plan out.
        RuntimeError: a plan breaks a limit, or an objective or bound is wrong; a bug of a solver.
    """
    if not time_limit_s > 0:
        raise UsageError(f"a time limit of {time_limit_s:g} s leaves no time", hint="give a positive limit")
    result = search_partition(problem, solver=solver, time_limit_s=time_limit_s, start=start, progress=progress)
    if result.decision is None:
        raise _no_plan(problem, result, time_limit_s, solver)
    return result


def search_partition(
    problem: PartitionProblem,
    *,
    solver: str = AUTO,
    time_limit_s: float = 60.0,
    start: Any = None,  # noqa: ANN401
    progress: Progress | None = None,
) -> Result:
    """Like `solve_partition`, but returns a result without a decision where that raises InfeasibleError.

    Where no time is left (zero or less), the result holds the best trivial plan.
    """
    names = _solver_names(problem, solver)
    search = SearchState(problem, time_limit_s, progress)
    search.offer_all([("start", start)])
    if solver == AUTO:
        search.offer_trivial()
    for name in names:
        entry = PARTITION_SOLVERS.get(name)
        search.take_turn(name, entry.run, entry.share(problem) if solver == AUTO else 1.0)
    if search.decision is None and search.bound < math.inf:
        search.offer_trivial()
    return search.result()


def _solver_names(problem: PartitionProblem, solver: str) -> tuple[str, ...]:
    names = solvers_for(problem)
    kind = type(problem).__name__
    if solver == AUTO:
        if not names:
            raise UsageError(f"no solver takes a {kind}", hint="register one in planner.published.solvers")
        return names
    if solver not in names:
        exists = PARTITION_SOLVERS.find(solver) is not None
        message = f"the solver {solver!r} does not take a {kind}" if exists else f"unknown partition solver {solver!r}"
        hint = f"these do: {', '.join((AUTO, *names))}" if exists else did_you_mean(solver, (AUTO, *names))
        raise UsageError(message, where="--solver", hint=hint)
    return (solver,)


def _no_plan(problem: PartitionProblem, result: Result, time_limit_s: float, solver: str) -> InfeasibleError:
    """The error that says why there is no plan.

    Args:
        problem: the problem.
        result: of the search; its bound is infinite if it proved that no plan exists.
        time_limit_s: of the search.
        solver: solves the problem with single limits removed.
    """
    if result.bound < math.inf:
        return InfeasibleError(
            f"no plan was found within {time_limit_s:g} s, and none was shown not to exist",
            hint="allow more time, more memory or more devices",
        )
    deadline = Deadline(min(_ALL_TRIALS_S, time_limit_s))

    def trial(changed: PartitionProblem) -> Any:  # noqa: ANN401
        return search_partition(changed, solver=solver, time_limit_s=min(deadline.left_s, _TRIAL_S)).decision

    reasons = [text for text in (_memory_reason(problem, trial), _order_reason(problem, trial)) if text]
    if not reasons:
        return InfeasibleError(
            "no plan keeps all limits, and lifting one of them was not seen to help",
            hint="allow more memory and devices",
        )
    return InfeasibleError("no plan keeps all limits", hint="; or ".join(reasons))


def _memory_limit(problem: Any) -> float:  # noqa: ANN401
    """Memory of a device in bytes; infinite where the problem has no single limit."""
    if isinstance(getattr(problem, "memory_bytes", None), float):
        return float(problem.memory_bytes)
    return float(getattr(getattr(problem, "memory", None), "device_bytes", math.inf))


def _with_memory(problem: Any, limit: float) -> Any:  # noqa: ANN401
    """The problem with another memory limit, in bytes."""
    if isinstance(getattr(problem, "memory_bytes", None), float):
        return dataclasses.replace(problem, memory_bytes=limit)
    return dataclasses.replace(problem, memory=dataclasses.replace(problem.memory, device_bytes=limit))


def _memory_reason(problem: Any, find: Callable[[Any], Any]) -> str:  # noqa: ANN401
    """Says how much memory would be enough; "" if the problem stays infeasible with unlimited memory."""
    limit = _memory_limit(problem)
    plan = None if math.isinf(limit) else find(_with_memory(problem, math.inf))
    if plan is None:
        return ""
    low, high = limit, max((v.needed for v in problem.judge(plan).violations if v.kind == "memory"), default=limit)
    for _ in range(_STEPS):
        if high <= low * _CLOSE_ENOUGH:
            break
        middle = math.sqrt(max(low, high * 1e-3) * high)
        if find(_with_memory(problem, middle)) is None:
            low = middle
        else:
            high = middle
    return f"{format_bytes(limit)} a device is too little memory: {format_bytes(high)} suffices"


def _order_reason(problem: Any, find: Callable[[Any], Any]) -> str:  # noqa: ANN401
    """Says that plans exist without contiguity; "" if not."""
    if not getattr(problem, "contiguous", False):
        return ""
    free = dataclasses.replace(problem, contiguous=False)
    return "allow plans that are not contiguous" if find(free) is not None else ""

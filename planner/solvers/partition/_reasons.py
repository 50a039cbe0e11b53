"""Why a problem has no plan: the limits whose lifting alone makes it feasible, and how far they would have to give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from planner.errors import InfeasibleError
from planner.solvers.partition import Result
from planner.solvers.partition._deadline import Deadline
from planner.space.partition.types import PartitionProblem
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

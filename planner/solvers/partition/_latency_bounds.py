"""What no placement of an operator graph can beat: its critical path, and its work shared by all devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np

from planner.solvers.partition._deadline import NEVER, Deadline, OutOfTime
from planner.space.partition.latency import LatencyProblem, topological

_ROUNDING = 1e-12
"""What sums of times may be off by; a bound has to stay below."""


def earliest_begin(problem: LatencyProblem, deadline: Deadline = NEVER) -> np.ndarray:
    """[n, k] when a node can begin on a device at the soonest if devices had all the time in the world."""
    begin = np.zeros(problem.time_ms.shape)
    reads = _neighbours(problem, backwards=True)
    for v in topological(problem.nodes, problem.edges):
        deadline.check()
        for u in reads[v]:
            finish = begin[u] + problem.time_ms[u]
            arrival = (finish[:, None] + problem.transfer_ms[u] * problem.hops).min(axis=0)
            begin[v] = np.maximum(begin[v], arrival)
    return begin


def least_rest(problem: LatencyProblem, deadline: Deadline = NEVER) -> np.ndarray:
    """[n, k] least time from the finish of a node on a device until everything that waits for it is done."""
    rest = np.zeros(problem.time_ms.shape)
    readers = _neighbours(problem, backwards=False)
    for u in reversed(topological(problem.nodes, problem.edges)):
        deadline.check()
        for v in readers[u]:
            onward = problem.transfer_ms[u] * problem.hops + (problem.time_ms[v] + rest[v])[None, :]
            rest[u] = np.maximum(rest[u], onward.min(axis=1))
    return rest


def latency_bound(problem: LatencyProblem, deadline: Deadline = NEVER) -> float:
    """The longer of the critical path and the work that must lie between early and late nodes, over all devices.

    With a deadline that passes before both are known it is what is known by then, at the least the longest node.
    """
    best = float(problem.time_ms.min(axis=1).max())
    with contextlib.suppress(OutOfTime):
        for bound in _rising_bounds(problem, deadline):
            best = bound
    return best * (1 - _ROUNDING)


def _rising_bounds(problem: LatencyProblem, deadline: Deadline) -> Iterator[float]:
    begin, rest = earliest_begin(problem, deadline), least_rest(problem, deadline)
    usable = np.isfinite(problem.time_ms)
    head = np.where(usable, begin, np.inf).min(axis=1)
    tail = np.where(usable, rest, np.inf).min(axis=1)
    best = float((begin + problem.time_ms + rest).min(axis=1).max())
    yield best
    work = problem.time_ms.min(axis=1)
    if not np.isfinite(best):
        return
    for since in np.unique(head):
        late = head >= since
        order = np.argsort(-tail[late], kind="stable")
        sums = np.cumsum(work[late][order]) / problem.devices
        best = max(best, float((since + sums + tail[late][order]).max()))
        yield best
        deadline.check()


def _neighbours(problem: LatencyProblem, *, backwards: bool) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(problem.nodes)]
    for u, v in problem.edges.tolist():
        found[v if backwards else u].append(u if backwards else v)
    return found

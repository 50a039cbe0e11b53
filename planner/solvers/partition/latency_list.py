"""Latency by list scheduling: nodes by urgency, each where it finishes first, and better urgencies while time lasts.

A node's urgency is the time that must pass from its start to the end, along the longest path of what waits for it. The
most urgent ready node goes to the device where it finishes first, in a gap between nodes placed already where there is
one. Several ways to count times and transfers are tried; then urgencies are shaken at random, the best kept.

What no placement of an operator graph can beat: its critical path, and its work shared by all devices.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from planner.memory import fits
from planner.solvers.partition import PARTITION_SOLVERS, Deadline, OutOfTime, PartitionSolver, Search
from planner.solvers.partition.types import NEVER
from planner.space.partition import LatencyDecision, LatencyProblem, numbered_order

_ROUNDING = 1e-12
"""What sums of times may be off by; a bound has to stay below."""


def earliest_begin(problem: LatencyProblem, deadline: Deadline = NEVER) -> np.ndarray:
    """[n, k] when a node can begin on a device at the soonest if devices had all the time in the world."""
    begin = np.zeros(problem.time_ms.shape)
    reads = _neighbours(problem, backwards=True)
    for v in numbered_order(problem.nodes, problem.edges):
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
    for u in reversed(numbered_order(problem.nodes, problem.edges)):
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


SPACE = "all placements and orders"
_ROUNDS = 300
_PLACES_PER_S = 50_000.0
"""Places that are tried a second (a node on a device), on a slow core; so many are for each second of `work_s`."""
_SEED = 20240229
_SHARE = 0.25
"""Of the time and the work of a search, as long as others follow."""


@dataclass(frozen=True)
class _Graph:
    problem: LatencyProblem
    reads: list[list[int]]
    readers: list[list[int]]
    groups: list[list[int]]
    """By node, the nodes of its colour, itself included."""
    depth: list[int]
    """By node, its place in a topological order."""


def solve_latency_by_list(search: Search) -> None:
    """A good latency and a bound; O(rounds (n + m) k)."""
    problem: LatencyProblem = search.problem
    search.space = SPACE
    search.prove(min(latency_bound(problem, search.deadline), search.objective))
    if math.isinf(search.bound):  # some node runs on no device
        return
    graph, rounds = _graph(problem), 0
    work_s = search.work_s * (1.0 if search.alone else _SHARE)
    random = np.random.default_rng(_SEED)
    affordable = max(1, int(_PLACES_PER_S * work_s / (problem.nodes * problem.devices)))
    urgencies = _urgencies(problem, search.deadline)
    leading = urgencies[0]
    while rounds < min(_ROUNDS + len(urgencies), affordable) and search.objective > search.bound * (1 + 1e-12):
        shaken = leading * random.uniform(0.8, 1.25, problem.nodes)
        urgency = urgencies[rounds] if rounds < len(urgencies) else shaken
        rounds += 1
        search.count(rounds=rounds)
        if search.offer(_schedule(graph, urgency, search.deadline)):
            leading = urgency


def _graph(problem: LatencyProblem) -> _Graph:
    of_colour: dict[int, list[int]] = {}
    for v, colour in enumerate(problem.colour.tolist()):
        of_colour.setdefault(colour, []).append(v)
    groups = [[v] if problem.colour[v] < 0 else of_colour[int(problem.colour[v])] for v in range(problem.nodes)]
    depth = [0] * problem.nodes
    for place, v in enumerate(numbered_order(problem.nodes, problem.edges)):
        depth[v] = place
    reads, readers = _neighbours(problem, backwards=True), _neighbours(problem, backwards=False)
    return _Graph(problem, reads, readers, groups, depth)


def _urgencies(problem: LatencyProblem, deadline: Deadline) -> list[np.ndarray]:
    """[n] each: longest paths by least, mean and most times, with and without mean transfers."""
    usable = np.isfinite(problem.time_ms)
    times = np.where(usable, problem.time_ms, 0.0)
    mean = times.sum(axis=1) / np.maximum(usable.sum(axis=1), 1)
    least = np.where(usable.any(axis=1), problem.time_ms.min(axis=1), 0.0)
    share = float(problem.hops.mean())
    found = [(least_rest(problem, deadline) + problem.time_ms).min(axis=1)]
    order = numbered_order(problem.nodes, problem.edges)
    readers: list[list[int]] = [[] for _ in range(problem.nodes)]
    for u, v in problem.edges.tolist():
        readers[u].append(v)
    for base in (least, mean, times.max(axis=1)):
        for weight in (0.0, share, 2 * share):
            deadline.check()
            urgency = np.zeros(problem.nodes)
            for u in reversed(order):
                ahead = max((float(urgency[v]) for v in readers[u]), default=0.0)
                urgency[u] = base[u] + ahead + (weight * problem.transfer_ms[u] if readers[u] else 0.0)
            found.append(urgency)
    return found


@dataclass
class _Plan:
    """A schedule in the making."""

    place: list[int]
    begin: list[float]
    finish: list[float]
    busy: list[list[tuple[float, float]]]
    """By device, (begin, end) of its nodes, in time order."""
    held: list[float]
    """Bytes by device."""


def _schedule(graph: _Graph, urgency: np.ndarray, deadline: Deadline) -> LatencyDecision | None:
    """Place nodes one by one; None when memory leaves a node no device."""
    problem = graph.problem
    n = problem.nodes
    plan = _Plan([-1] * n, [0.0] * n, [0.0] * n, [[] for _ in range(problem.devices)], [0.0] * problem.devices)
    waiting = [len(reads) for reads in graph.reads]
    ready = [(-float(urgency[v]), v) for v in range(n) if waiting[v] == 0]
    heapq.heapify(ready)
    while ready:
        deadline.check()
        node = heapq.heappop(ready)[1]
        if not _place(graph, plan, node):
            return None
        for reader in graph.readers[node]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, (-float(urgency[reader]), reader))
    order = sorted(range(n), key=lambda v: (plan.begin[v], plan.finish[v], graph.depth[v]))
    return LatencyDecision(tuple(plan.place), tuple(order))


def _place(graph: _Graph, plan: _Plan, node: int) -> bool:
    """Put a node where it finishes first; a colour's first node takes its companions' memory along."""
    problem = graph.problem
    group = graph.groups[node]
    fixed = next((plan.place[v] for v in group if plan.place[v] >= 0), -1)
    size = float(problem.size_bytes[group].sum())
    best: tuple[float, float, int] | None = None
    for device in range(problem.devices) if fixed < 0 else (fixed,):
        if not np.isfinite(problem.time_ms[group, device]).all():
            continue
        if fixed < 0 and problem.limited[device] and not fits(plan.held[device] + size, problem.memory_bytes):
            continue
        seconds = float(problem.time_ms[node, device])
        arrival = 0.0
        for u in graph.reads[node]:
            delay = float(problem.transfer_ms[u]) * float(problem.hops[plan.place[u], device])
            arrival = max(arrival, plan.finish[u] + delay)
        begin = _gap(plan.busy[device], arrival, seconds)
        if best is None or (begin + seconds, begin) < best[:2]:
            best = (begin + seconds, begin, device)
    if best is None:
        return False
    plan.finish[node], plan.begin[node], plan.place[node] = best
    if fixed < 0:
        plan.held[best[2]] += size
    busy = plan.busy[best[2]]
    bisect.insort(busy, (best[1], best[0]))
    return True


def _gap(busy: list[tuple[float, float]], arrival: float, seconds: float) -> float:
    """The first time from `arrival` on when a device is free for that long."""
    begin = arrival
    for start, end in busy[max(0, bisect.bisect_right(busy, (arrival, math.inf)) - 1) :]:
        if begin + seconds <= start:
            return begin
        begin = max(begin, end)
    return begin


PARTITION_SOLVERS.register(
    "latency-list", PartitionSolver(LatencyProblem, solve_latency_by_list, share=lambda _: _SHARE)
)

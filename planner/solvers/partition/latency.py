"""Latency: by list scheduling, nodes by urgency and each where it finishes first, and exactly by CP-SAT.

A node's urgency is the time that must pass from its start to the end, along the longest path of what waits for it. The
most urgent ready node goes to the device where it finishes first, in a gap between nodes placed already where there is
one. Several ways to count times and transfers are tried; then urgencies are shaken at random, the best kept. What no
placement can beat: the graph's critical path, and its work shared by all devices.

The exact programme has an interval for every node and device, no two at once on a device, delays between. Times become
whole numbers of about 2^-40 of the known latency, rounded down, so that the bound holds for the true times and falls
short by less than the tolerance for graphs of hundreds of nodes. One worker, a fixed seed: the answer depends on the
machine's speed only where the time limit cuts the search off.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.graph import numbered_line
from planner.memory import fits
from planner.solvers.partition import PARTITION_SOLVERS, Deadline, OutOfTime, PartitionSolver, Search
from planner.solvers.partition._cp_sat import careful_solver, memory_units, solved
from planner.solvers.partition.types import NEVER
from planner.space.partition import LatencyDecision, LatencyProblem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_ROUNDING = 1e-12
"""What sums of times may be off by; a bound has to stay below."""


def earliest_begin(problem: LatencyProblem, deadline: Deadline = NEVER) -> np.ndarray:
    """[n, k] when a node can begin on a device at the soonest if devices had all the time in the world."""
    begin = np.zeros(problem.time_ms.shape)
    reads = _neighbours(problem, backwards=True)
    for v in numbered_line(problem.nodes, problem.edges.tolist()):
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
    for u in reversed(numbered_line(problem.nodes, problem.edges.tolist())):
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
    for place, v in enumerate(numbered_line(problem.nodes, problem.edges.tolist())):
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
    order = numbered_line(problem.nodes, problem.edges.tolist())
    readers = _neighbours(problem, backwards=False)
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


_TIME_BITS = 40
_WORK = 0.06
"""Work for each second of `work_s`, as the engine counts it; a slow core does that in half a second."""


def solve_latency_by_cp_sat(search: Search) -> None:
    """The least latency, given time."""
    problem: LatencyProblem = search.problem
    search.space = SPACE
    if not np.isfinite(problem.time_ms).any(axis=1).all():
        search.prove(math.inf)
        return
    model = _Model(problem, search.objective, search.bound, search.deadline)
    if search.decision is not None:
        model.hint(search.decision)
    search.deadline.check()
    found, proven, branches = model.solve(search)
    search.count(branches=branches)
    search.offer(found)
    search.prove(min(proven, search.objective))


class _Model:
    """The programme and its variables."""

    def __init__(self, problem: LatencyProblem, known_ms: float, bound_ms: float, deadline: Deadline) -> None:
        from ortools.sat.python import cp_model

        self.problem, self.bound_ms, self.deadline = problem, bound_ms, deadline
        self.program = cp_model.CpModel()
        top = known_ms
        if not math.isfinite(top):
            usable = np.where(np.isfinite(problem.time_ms), problem.time_ms, 0.0)
            top = float(usable.max(axis=1).sum() + problem.transfer_ms.sum() * max(float(problem.hops.max()), 1.0))
        self.scale = 2.0 ** (_TIME_BITS - math.frexp(max(top, 1e-300))[1])
        self.horizon = math.ceil(top * self.scale) + 1
        self._place()
        self._time()
        self._follow()
        self._break_symmetry()

    def _whole(self, milliseconds: float) -> int:
        return math.floor(milliseconds * self.scale)

    def _place(self) -> None:
        p = self.problem
        self.on: list[list[cp_model.IntVar | None]] = []
        first_of_colour: dict[int, list[cp_model.IntVar | None]] = {}
        for v in range(p.nodes):
            self.deadline.check()
            colour = int(p.colour[v])
            row = first_of_colour.get(colour)
            if row is None:
                row = [
                    self.program.new_bool_var(f"on{v}_{d}") if math.isfinite(p.time_ms[v, d]) else None
                    for d in range(p.devices)
                ]
                self.program.add_exactly_one([x for x in row if x is not None])
                if colour >= 0:
                    first_of_colour[colour] = row
            for d in range(p.devices):
                x = row[d]
                if x is not None and not math.isfinite(p.time_ms[v, d]):
                    self.program.add(x == 0)
            self.on.append(row)
        self._limit_memory()

    def _limit_memory(self) -> None:
        p = self.problem
        if not math.isfinite(p.memory_bytes):
            return
        sizes, room = memory_units(p.size_bytes, p.memory_bytes)
        for d in range(p.devices):
            if p.limited[d]:
                terms = [size * x for size, row in zip(sizes, self.on, strict=True) if (x := row[d]) is not None]
                self.program.add(sum(terms) <= room)

    def _time(self) -> None:
        p = self.problem
        head = np.where(np.isfinite(p.time_ms), earliest_begin(p, self.deadline), np.inf).min(axis=1)
        tail = least_rest(p, self.deadline)
        self.begin: list[cp_model.IntVar] = []
        self.latency = self.program.new_int_var(0, self.horizon, "latency")
        intervals: list[list[Any]] = [[] for _ in range(p.devices)]
        for v in range(p.nodes):
            self.deadline.check()
            begin = self.program.new_int_var(self._whole(float(head[v])), self.horizon, f"begin{v}")
            self.begin.append(begin)
            for d in range(p.devices):
                x = self.on[v][d]
                if x is None or not math.isfinite(p.time_ms[v, d]):
                    continue
                length = self._whole(float(p.time_ms[v, d]))
                intervals[d].append(self.program.new_optional_fixed_size_interval_var(begin, length, x, f"run{v}_{d}"))
                rest = self._whole(float(tail[v, d]))
                self.program.add(self.latency >= begin + length + rest).only_enforce_if(x)
        for d in range(p.devices):
            self.program.add_no_overlap(intervals[d])
        self.program.add(self.latency >= self._whole(self.bound_ms))
        self.program.minimize(self.latency)

    def _follow(self) -> None:
        p = self.problem
        for u, v in p.edges.tolist():
            self.deadline.check()
            for a in range(p.devices):
                x = self.on[u][a]
                if x is None or not math.isfinite(p.time_ms[u, a]):
                    continue
                end = self.begin[u] + self._whole(float(p.time_ms[u, a]))
                self.program.add(self.begin[v] >= end).only_enforce_if(x)
                for b in range(p.devices):
                    y = self.on[v][b]
                    delay = self._whole(float(p.transfer_ms[u] * p.hops[a, b]))
                    if y is not None and delay > 0:
                        self.program.add(self.begin[v] >= end + delay).only_enforce_if([x, y])

    def _break_symmetry(self) -> None:
        """Of devices that nothing tells apart, a later one is used only by nodes after one on the device before it."""
        p = self.problem
        for d in range(1, p.devices):
            if not _alike(p, d - 1, d):
                continue
            for v in range(p.nodes):
                self.deadline.check()
                x = self.on[v][d]
                earlier = [y for u in range(v) if (y := self.on[u][d - 1]) is not None]
                if x is not None:
                    self.program.add_bool_or([x.negated(), *earlier])

    def hint(self, decision: LatencyDecision) -> None:
        """Begin with a plan, its devices renamed as the symmetry wants them."""
        p = self.problem
        name: dict[int, int] = {}
        for device in decision.devices:
            if device not in name:
                group = [d for d in range(p.devices) if d == device or _interchangeable(p, d, device)]
                name[device] = next(d for d in group if d not in name.values())
        hinted: set[int] = set()
        for v, device in enumerate(decision.devices):
            for d in range(p.devices):
                x = self.on[v][d]
                if x is not None and x.index not in hinted:
                    hinted.add(x.index)
                    self.program.add_hint(x, name[device] == d)

    def solve(self, search: Search) -> tuple[LatencyDecision | None, float, int]:
        """A plan (None when none was found), a lower bound in ms (infinite when there is no plan), and branches."""
        from ortools.sat.python import cp_model

        known_ms = search.objective
        solver = careful_solver(_WORK * search.work_s, search.deadline.left_s, seed=1)
        solver.best_bound_callback = lambda value: search.prove(min(value / self.scale, known_ms))
        status = solved(solver, self.program)
        if status == cp_model.INFEASIBLE:
            # within the horizon, which a known plan sets: then nothing is better than that plan
            return None, (known_ms if math.isfinite(known_ms) else math.inf), int(solver.num_branches)
        bound = solver.best_objective_bound / self.scale
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None, bound, int(solver.num_branches)
        place = [next(d for d, x in enumerate(row) if x is not None and solver.value(x)) for row in self.on]
        depth = {v: i for i, v in enumerate(numbered_line(self.problem.nodes, self.problem.edges.tolist()))}
        begin = [solver.value(x) for x in self.begin]
        lengths = [self._whole(float(self.problem.time_ms[v, place[v]])) for v in range(self.problem.nodes)]
        order = sorted(range(self.problem.nodes), key=lambda v: (begin[v], lengths[v], depth[v]))
        return LatencyDecision(tuple(place), tuple(order)), bound, int(solver.num_branches)


def _alike(problem: LatencyProblem, a: int, b: int) -> bool:
    """Whether swapping two devices changes nothing."""
    swapped = np.arange(problem.devices)
    swapped[[a, b]] = b, a
    return bool(
        np.array_equal(problem.time_ms[:, a], problem.time_ms[:, b])
        and problem.limited[a] == problem.limited[b]
        and np.array_equal(problem.hops[np.ix_(swapped, swapped)], problem.hops)
    )


def _interchangeable(problem: LatencyProblem, a: int, b: int) -> bool:
    """Whether two devices belong to one run of neighbours that are all alike."""
    low, high = min(a, b), max(a, b)
    return all(_alike(problem, d, d + 1) for d in range(low, high))


PARTITION_SOLVERS.register("latency-cp-sat", PartitionSolver(LatencyProblem, solve_latency_by_cp_sat, turn=1))

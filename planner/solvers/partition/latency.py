"""Latency of one sample: list scheduling for a good plan, simple lower bounds, and an exact model for CP-SAT.

List scheduling: a node's urgency is the length of the longest path from its start to the end of the graph. The most
urgent ready node goes to the device where it finishes first, into an idle gap if there is one. Then the best urgencies
are perturbed at random. Lower bounds: the critical path, and the work between early and late nodes divided by the
devices.

Exact model: one optional interval per node and device, no overlap on a device, transfer delays between them. Times are
integers in units of about 2^-40 of the known latency, rounded down, so that the bound is valid for the true times and
weaker than for them by less than the tolerance on graphs of hundreds of nodes. One thread and a fixed seed: the answer
depends on the machine's speed only if the time limit ends the search.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cp_sat import careful_solver, memory_units, solved
from planner.graph import numbered_line
from planner.memory import fits
from planner.solvers.partition import PARTITION_SOLVERS, Deadline, OutOfTime, PartitionSolver, Search
from planner.solvers.partition.types import NEVER
from planner.space.partition import LatencyDecision, LatencyProblem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_ROUNDING = 1e-12
"""Relative rounding error of sums of times, subtracted from bounds."""


def path_ms(problem: LatencyProblem, deadline: Deadline = NEVER, *, to_end: bool = False) -> np.ndarray:
    """[n, k] lower bounds in ms on the paths of a node on a device, as if a device could run any nodes at once.

    O((n + m) k^2) for n nodes, m edges and k devices.

    Args:
        problem: the instance.
        deadline: when to stop.
        to_end: from the node's finish until all its descendants have finished; else until the node can start.

    Raises:
        OutOfTime: the deadline passed.
    """
    path = np.zeros(problem.time_ms.shape)
    order = numbered_line(problem.nodes, problem.edges.tolist())
    neighbours = _neighbours(problem, backwards=not to_end)
    hops = problem.hops.T if to_end else problem.hops
    for v in reversed(order) if to_end else order:
        deadline.check()
        for u in neighbours[v]:
            transfers_ms = problem.transfer_ms[v if to_end else u] * hops
            through_u = (path[u] + problem.time_ms[u])[:, None] + transfers_ms
            path[v] = np.maximum(path[v], through_u.min(axis=0))
    return path


def latency_bound(problem: LatencyProblem, deadline: Deadline = NEVER) -> float:
    """Lower bound in ms: the critical path, or the work between early and late nodes divided by the devices.

    If the deadline passes, it is the best bound by then, at least the longest node.
    """
    best = float(problem.time_ms.min(axis=1).max())
    with contextlib.suppress(OutOfTime):
        for bound in _rising_bounds(problem, deadline):
            best = bound
    return best * (1 - _ROUNDING)


def _rising_bounds(problem: LatencyProblem, deadline: Deadline) -> Iterator[float]:
    begin, to_end = path_ms(problem, deadline), path_ms(problem, deadline, to_end=True)
    usable = np.isfinite(problem.time_ms)
    head = np.where(usable, begin, np.inf).min(axis=1)
    tail = np.where(usable, to_end, np.inf).min(axis=1)
    bound = float((begin + problem.time_ms + to_end).min(axis=1).max())
    yield bound
    work = problem.time_ms.min(axis=1)
    if not np.isfinite(bound):
        return
    for since in np.unique(head):
        late = head >= since
        order = np.argsort(-tail[late], kind="stable")
        sums = np.cumsum(work[late][order]) / problem.devices
        bound = max(bound, float((since + sums + tail[late][order]).max()))
        yield bound
        deadline.check()


def _neighbours(problem: LatencyProblem, *, backwards: bool) -> list[list[int]]:
    neighbours: list[list[int]] = [[] for _ in range(problem.nodes)]
    for u, v in problem.edges.tolist():
        neighbours[v if backwards else u].append(u if backwards else v)
    return neighbours


SPACE = "all placements and orders"
_ROUNDS = 300
_PLACES_PER_S = 50_000.0
"""Pairs of node and device tried per second of `work_s`; a slow core does about as many."""
_SEED = 20240229
_SHARE = 0.25
"""Fraction of the time and work of a search, if other solvers follow."""


def solve_latency_by_list(search: Search) -> None:
    """Find a good plan and a lower bound; O(rounds (n + m) k)."""
    problem: LatencyProblem = search.problem
    search.space = SPACE
    search.prove(min(latency_bound(problem, search.deadline), search.objective))
    if math.isinf(search.bound):  # a node can run on no device
        return
    scheduler, rounds = _ListScheduler(problem), 0
    work_s = search.work_s * (1.0 if search.alone else _SHARE)
    random = np.random.default_rng(_SEED)
    affordable = max(1, int(_PLACES_PER_S * work_s / (problem.nodes * problem.devices)))
    leading = (path_ms(problem, search.deadline, to_end=True) + problem.time_ms).min(axis=1)
    while rounds < min(_ROUNDS, affordable) and search.objective > search.bound * (1 + 1e-12):
        urgency = leading * random.uniform(0.8, 1.25, problem.nodes) if rounds else leading
        rounds += 1
        search.count(rounds=rounds)
        if search.offer(scheduler.schedule(urgency, search.deadline)):
            leading = urgency


class _ListScheduler:
    """Schedules of a graph, node by node."""

    def __init__(self, problem: LatencyProblem) -> None:
        self.problem = problem
        of_colour: dict[int, list[int]] = {}
        for v, colour in enumerate(problem.colour.tolist()):
            of_colour.setdefault(colour, []).append(v)
        self.groups = [[v] if c < 0 else of_colour[c] for v, c in enumerate(problem.colour.tolist())]
        line = numbered_line(problem.nodes, problem.edges.tolist())
        self.depth = {v: place for place, v in enumerate(line)}
        self.reads, self.readers = _neighbours(problem, backwards=True), _neighbours(problem, backwards=False)

    def schedule(self, urgency: np.ndarray, deadline: Deadline) -> LatencyDecision | None:
        """Place all nodes, most urgent ready node first; None if a node fits no device."""
        n, devices = self.problem.nodes, self.problem.devices
        self.place, self.begin, self.finish = [-1] * n, [0.0] * n, [0.0] * n
        self.busy: list[list[tuple[float, float]]] = [
            [] for _ in range(devices)
        ]  # (begin, end) of nodes, in time order
        self.held = [0.0] * devices
        waiting = [len(reads) for reads in self.reads]
        ready = [(-float(urgency[v]), v) for v in range(n) if waiting[v] == 0]
        heapq.heapify(ready)
        while ready:
            deadline.check()
            node = heapq.heappop(ready)[1]
            if not self._place_node(node):
                return None
            for reader in self.readers[node]:
                waiting[reader] -= 1
                if waiting[reader] == 0:
                    heapq.heappush(ready, (-float(urgency[reader]), reader))
        order = sorted(range(n), key=lambda v: (self.begin[v], self.finish[v], self.depth[v]))
        return LatencyDecision(tuple(self.place), tuple(order))

    def _place_node(self, node: int) -> bool:
        """Put a node on the device where it finishes first; False if it fits none.

        The first node of a colour reserves memory for all its nodes.
        """
        problem, group = self.problem, self.groups[node]
        colour_device = next((self.place[v] for v in group if self.place[v] >= 0), -1)
        size = float(problem.size_bytes[group].sum())
        best: tuple[float, float, int] | None = None
        for device in range(problem.devices) if colour_device < 0 else (colour_device,):
            if not np.isfinite(problem.time_ms[group, device]).all():
                continue
            reserved = self.held[device] + (size if colour_device < 0 else 0.0)
            if problem.limited[device] and not fits(reserved, problem.memory_bytes):
                continue
            time_ms = float(problem.time_ms[node, device])
            arrival_ms = 0.0
            for u in self.reads[node]:
                delay_ms = float(problem.transfer_ms[u]) * float(problem.hops[self.place[u], device])
                arrival_ms = max(arrival_ms, self.finish[u] + delay_ms)
            begin = _first_gap(self.busy[device], arrival_ms, time_ms)
            if best is None or (begin + time_ms, begin) < best[:2]:
                best = (begin + time_ms, begin, device)
        if best is None:
            return False
        self.finish[node], self.begin[node], self.place[node] = best
        if colour_device < 0:
            self.held[best[2]] += size
        bisect.insort(self.busy[best[2]], (best[1], best[0]))
        return True


def _first_gap(busy: list[tuple[float, float]], arrival: float, seconds: float) -> float:
    """The first time from `arrival` on at which a device is idle for so many ms."""
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
"""Deterministic work per second of `work_s`; a slow core does it in half a second."""


def solve_latency_by_cp_sat(search: Search) -> None:
    """Find the least latency and prove it, given time."""
    problem: LatencyProblem = search.problem
    search.space = SPACE
    if not np.isfinite(problem.time_ms).any(axis=1).all():
        search.prove(math.inf)
        return
    model = _Model(problem, search.objective, search.bound, search.deadline)
    if search.decision is not None:
        model.hint(search.decision)
    search.deadline.check()
    plan, bound_ms, branches = model.solve(search)
    search.count(branches=branches)
    search.offer(plan)
    search.prove(min(bound_ms, search.objective))


class _Model:
    """The CP-SAT model and its variables."""

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
        head = np.where(np.isfinite(p.time_ms), path_ms(p, self.deadline), np.inf).min(axis=1)
        tail = path_ms(p, self.deadline, to_end=True)
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
                to_end = self._whole(float(tail[v, d]))
                self.program.add(self.latency >= begin + length + to_end).only_enforce_if(x)
        for d in range(p.devices):
            self.program.add_no_overlap(intervals[d])
        self.program.add(self.latency >= self._whole(self.bound_ms))
        self.program.minimize(self.latency)

    def _follow(self) -> None:
        p = self.problem
        for u, v in p.edges.tolist():
            self.deadline.check()
            for a in range(p.devices):
                u_on_a = self.on[u][a]
                if u_on_a is None or not math.isfinite(p.time_ms[u, a]):
                    continue
                end = self.begin[u] + self._whole(float(p.time_ms[u, a]))
                self.program.add(self.begin[v] >= end).only_enforce_if(u_on_a)
                for b in range(p.devices):
                    v_on_b = self.on[v][b]
                    delay = self._whole(float(p.transfer_ms[u] * p.hops[a, b]))
                    if v_on_b is not None and delay > 0:
                        self.program.add(self.begin[v] >= end + delay).only_enforce_if([u_on_a, v_on_b])

    def _break_symmetry(self) -> None:
        """A node may use a device only if an earlier node uses the interchangeable device before it."""
        p = self.problem
        for d in range(1, p.devices):
            if d == p.accelerators:
                continue
            for v in range(p.nodes):
                self.deadline.check()
                x = self.on[v][d]
                earlier = [y for u in range(v) if (y := self.on[u][d - 1]) is not None]
                if x is not None:
                    self.program.add_bool_or([x.negated(), *earlier])

    def hint(self, decision: LatencyDecision) -> None:
        """Hint a plan, with interchangeable devices renumbered to keep the symmetry breaking."""
        p = self.problem
        name: dict[int, int] = {}
        for device in decision.devices:
            if device not in name:
                group = [d for d in range(p.devices) if p.limited[d] == p.limited[device]]
                name[device] = next(d for d in group if d not in name.values())
        hinted: set[int] = set()
        for v, device in enumerate(decision.devices):
            for d in range(p.devices):
                x = self.on[v][d]
                if x is not None and x.index not in hinted:
                    hinted.add(x.index)
                    self.program.add_hint(x, name[device] == d)

    def solve(self, search: Search) -> tuple[LatencyDecision | None, float, int]:
        """The best plan (None without one), a lower bound in ms (infinite if no plan exists), and branches."""
        from ortools.sat.python import cp_model

        known_ms = search.objective
        solver = careful_solver(_WORK * search.work_s, search.deadline.left_s, seed=1)
        solver.best_bound_callback = lambda value: search.prove(min(value / self.scale, known_ms))
        status = solved(solver, self.program)
        if status == cp_model.INFEASIBLE:
            # The horizon is the known latency, so no plan is better than the known one.
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


PARTITION_SOLVERS.register("latency-cp-sat", PartitionSolver(LatencyProblem, solve_latency_by_cp_sat, turn=1))

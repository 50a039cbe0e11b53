"""Latency of one sample: list scheduling for a good plan, simple lower bounds, and an exact model for CP-SAT.

List scheduling: a node's urgency is the length of the longest path from its start to the end of the graph. The most
urgent ready node goes to the device where it finishes first, into an idle gap if there is one. Then the best urgencies
are perturbed at random. Lower bounds: the critical path, and all work divided by the devices.

Exact model: one optional interval per node and device, no overlap on a device, transfer delays between them. Times are
integers in units of about 2^-40 of the known latency, rounded down, so that the bound is valid for the true times and
weaker than for them by less than the tolerance on graphs of hundreds of nodes. One thread and a fixed seed: the answer
depends on the machine's speed only if the time limit ends the search.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.cp_sat import careful_solver, memory_units, solved, weighted_sum
from planner.graph import numbered_line
from planner.memory import fits
from planner.published.problems import LatencyDecision, LatencyProblem
from planner.published.solvers import PARTITION_SOLVERS, Deadline, PartitionSolver, SearchState
from planner.published.solvers._max_load_form import device_numbers
from planner.solvers.cluster_chains.search import NEVER

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
    for v in reversed(order) if to_end else order:
        deadline.check()
        for u in neighbours[v]:
            transfers_ms = problem.transfer_ms[v if to_end else u] * problem.hops
            through_u = (path[u] + problem.time_ms[u])[:, None] + transfers_ms
            path[v] = np.maximum(path[v], through_u.min(axis=0))
    return path


def latency_bound(problem: LatencyProblem, deadline: Deadline = NEVER) -> float:
    """Lower bound in ms: the critical path, or all work divided by the devices; infinite if a node runs nowhere.

    Raises:
        OutOfTime: the deadline passed.
    """
    through = path_ms(problem, deadline) + problem.time_ms + path_ms(problem, deadline, to_end=True)
    work_ms = math.fsum(problem.time_ms.min(axis=1))
    return max(float(through.min(axis=1).max()), work_ms / problem.devices) * (1 - _ROUNDING)


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
"""Fraction of the time and work of a search."""


def solve_latency_by_list(search: SearchState) -> None:
    """Find a good plan and a lower bound; O(rounds (n + m) k)."""
    problem: LatencyProblem = search.problem
    search.space = SPACE
    search.prove(min(float(problem.time_ms.min(axis=1).max()) * (1 - _ROUNDING), search.objective))
    search.prove(min(latency_bound(problem, search.deadline), search.objective))
    if math.isinf(search.bound):  # a node can run on no device
        return
    scheduler, rounds = _ListScheduler(problem), 0
    random = np.random.default_rng(_SEED)
    affordable = max(1, int(_PLACES_PER_S * _SHARE * search.work_s / (problem.nodes * problem.devices)))
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
        self.groups = [[v] if c < 0 else np.flatnonzero(problem.colour == c) for v, c in enumerate(problem.colour)]
        self.depth = _depths(problem)
        self.reads, self.readers = _neighbours(problem, backwards=True), _neighbours(problem, backwards=False)

    def schedule(self, urgency: np.ndarray, deadline: Deadline) -> LatencyDecision | None:
        """Place all nodes, most urgent ready node first; None if a node fits no device."""
        n, devices = self.problem.nodes, self.problem.devices
        self.place, self.begin, self.finish = [-1] * n, [0.0] * n, [0.0] * n
        # (begin, end) of each device's nodes, in time order
        self.busy: list[list[tuple[float, float]]] = [[] for _ in range(devices)]
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
        return _decision(self.place, self.begin, self.finish, self.depth)

    def _place_node(self, node: int) -> bool:
        """Put a node on the device where it finishes first; False if it fits none.

        The first node of a colour reserves memory for all its nodes.
        """
        problem, group = self.problem, self.groups[node]
        colour_device = max(self.place[v] for v in group)
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


def _depths(problem: LatencyProblem) -> list[int]:
    """The position of each node in a topological order."""
    return [int(i) for i in np.argsort(numbered_line(problem.nodes, problem.edges.tolist()))]


def _decision(
    place: Sequence[int], begin: Sequence[float], finish: Sequence[float], depth: Sequence[int]
) -> LatencyDecision:
    """The plan in which nodes take turns in the order in which they begin."""
    order = sorted(range(len(place)), key=lambda v: (begin[v], finish[v], depth[v]))
    return LatencyDecision(tuple(place), tuple(order))


PARTITION_SOLVERS.register(
    "latency-list", PartitionSolver(LatencyProblem, solve_latency_by_list, share=lambda _: _SHARE)
)


_TIME_BITS = 40
_WORK = 0.06
"""Deterministic work per second of `work_s`; a slow core does it in half a second."""


def solve_latency_by_cp_sat(search: SearchState) -> None:
    """Find the least latency and prove it, given time."""
    problem: LatencyProblem = search.problem
    search.space = SPACE
    if not np.isfinite(problem.time_ms).any(axis=1).all():
        search.prove(math.inf)
        return
    from ortools.sat.python import cp_model

    model = _Model(problem, search.objective, search.bound, search.deadline)
    if search.decision is not None:
        model.hint(search.decision)
    search.deadline.check()
    solver = careful_solver(_WORK * search.work_s, search.deadline.left_s, seed=1)
    status = solved(solver, model.program)
    search.count(branches=int(solver.num_branches))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        search.offer(model.decision(solver.value))
    # The horizon is the known latency: if the model is infeasible, no plan is better than the known one.
    bound_ms = math.inf if status == cp_model.INFEASIBLE else solver.best_objective_bound / model.scale
    search.prove(min(bound_ms, search.objective))


class _Model:
    """The CP-SAT model and its variables."""

    def __init__(self, problem: LatencyProblem, known_ms: float, bound_ms: float, deadline: Deadline) -> None:
        from ortools.sat.python import cp_model

        self.problem, self.deadline = problem, deadline
        self.program = cp_model.CpModel()
        self.usable = np.isfinite(problem.time_ms)
        top = known_ms
        if not math.isfinite(top):
            slowest = np.where(self.usable, problem.time_ms, 0.0).max(axis=1)
            top = float(slowest.sum() + problem.transfer_ms.sum() * max(float(problem.hops.max()), 1.0))
        self.scale = 2.0 ** (_TIME_BITS - math.frexp(max(top, 1e-300))[1])
        horizon = math.ceil(top * self.scale) + 1
        self.on = self._placed()
        self.latency = self.program.new_int_var(self._whole(bound_ms), horizon, "latency")
        head = np.where(self.usable, path_ms(problem, deadline), np.inf).min(axis=1)
        self.begin = [self.program.new_int_var(self._whole(start), horizon, "") for start in head]
        self._run()
        self._follow()
        self._break_symmetry()
        self.program.minimize(self.latency)

    def _whole(self, milliseconds: float) -> int:
        return math.floor(float(milliseconds) * self.scale)

    def _placed(self) -> list[list[cp_model.IntVar]]:
        """By node and device, whether the node is there; nodes of one colour have the same variables."""
        p, of_colour, on = self.problem, {}, []
        for v, colour in enumerate(p.colour.tolist()):
            self.deadline.check()
            key = colour if colour >= 0 else -1 - v
            if key not in of_colour:
                of_colour[key] = [self.program.new_bool_var("") for _ in range(p.devices)]
                self.program.add_exactly_one(of_colour[key])
            on.append(of_colour[key])
            for d in np.flatnonzero(~self.usable[v]).tolist():
                self.program.add(on[v][d] == 0)
        if math.isfinite(p.memory_bytes):
            sizes, room = memory_units(p.size_bytes, p.memory_bytes)
            for d in range(p.accelerators):
                self.program.add(weighted_sum([(on[v][d], size) for v, size in enumerate(sizes)]) <= room)
        return on

    def _run(self) -> None:
        """A device runs one node at a time, and the latency covers the shortest way from each to the end."""
        p = self.problem
        tail = path_ms(p, self.deadline, to_end=True)
        intervals: list[list[cp_model.IntervalVar]] = [[] for _ in range(p.devices)]
        for v, d in np.argwhere(self.usable).tolist():
            self.deadline.check()
            begin, placed, length = self.begin[v], self.on[v][d], self._whole(p.time_ms[v, d])
            intervals[d].append(self.program.new_optional_fixed_size_interval_var(begin, length, placed, ""))
            end = begin + length + self._whole(tail[v, d])
            self.program.add(self.latency >= end).only_enforce_if(placed)
        for of_device in intervals:
            self.program.add_no_overlap(of_device)

    def _follow(self) -> None:
        """A node begins when all results that it reads have arrived."""
        p = self.problem
        for u, v in p.edges.tolist():
            self.deadline.check()
            for a in np.flatnonzero(self.usable[u]).tolist():
                end = self.begin[u] + self._whole(p.time_ms[u, a])
                self.program.add(self.begin[v] >= end).only_enforce_if(self.on[u][a])
                for b in np.flatnonzero(self.usable[v]).tolist():
                    delay = self._whole(p.transfer_ms[u] * p.hops[a, b])
                    if delay > 0:
                        both = self.on[u][a], self.on[v][b]
                        self.program.add(self.begin[v] >= end + delay).only_enforce_if(*both)

    def _break_symmetry(self) -> None:
        """A node may use a device only if an earlier node uses the interchangeable device before it."""
        p = self.problem
        for d in range(1, p.devices):
            if d == p.accelerators:
                continue
            for v in range(p.nodes):
                self.deadline.check()
                self.program.add_bool_or([~self.on[v][d], *(self.on[u][d - 1] for u in range(v))])

    def hint(self, decision: LatencyDecision) -> None:
        """Hint a plan, with interchangeable devices renumbered to keep the symmetry breaking."""
        numbers = device_numbers(self.problem.accelerators, decision.devices)
        hints = {
            x.index: (x, numbers[device] == d)
            for row, device in zip(self.on, decision.devices, strict=True)
            for d, x in enumerate(row)
        }
        for x, value in hints.values():
            self.program.add_hint(x, value)

    def decision(self, value: Callable[[cp_model.IntVar], int]) -> LatencyDecision:
        """The plan that a solution states."""
        place = [next(d for d, x in enumerate(row) if value(x)) for row in self.on]
        begin = [value(x) for x in self.begin]
        finish = [b + self._whole(self.problem.time_ms[v, place[v]]) for v, b in enumerate(begin)]
        return _decision(place, begin, finish, _depths(self.problem))


PARTITION_SOLVERS.register("latency-cp-sat", PartitionSolver(LatencyProblem, solve_latency_by_cp_sat, turn=1))

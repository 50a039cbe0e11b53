"""Latency exactly, by CP-SAT: an interval for every node and device, no two at once on a device, delays between.

Times become whole numbers of about 2^-40 of the known latency, rounded down, so that the bound holds for the true
times and falls short by less than the tolerance for graphs of hundreds of nodes. One worker, a fixed seed: the answer
depends on the machine's speed only where the time limit cuts the search off.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.solvers.partition import PARTITION_SOLVERS, Deadline, PartitionSolver, Search
from planner.solvers.partition._cp_sat import careful_solver, memory_units, solved
from planner.solvers.partition.latency_list import SPACE, earliest_begin, least_rest
from planner.space.partition import LatencyDecision, LatencyProblem, numbered_order

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

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
        depth = {v: i for i, v in enumerate(numbered_order(self.problem.nodes, self.problem.edges))}
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

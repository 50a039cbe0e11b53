"""Two devices of a max-load plan divided anew, the fullest with another, until no pair gets better.

What two devices hold can be divided between them without touching any other: a net that a third device holds in part
costs it the same whoever holds the rest. So each pair is a small problem of its own, which CP-SAT solves or improves
within a fixed amount of its own work. Where pairs helped until none does, the fullest device is taken with two others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.solvers.partition import PARTITION_SOLVERS, Deadline, PartitionSolver, Search
from planner.solvers.partition._cp_sat import careful_solver, memory_units, weighted_sum
from planner.solvers.partition._max_load_form import Form, canonical, form_of, reduce_form, space
from planner.solvers.partition.local_search_max_load import Loads, group_devices
from planner.space.partition import MaxLoadDecision, MaxLoadProblem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


_MOST_DEVICES = 3
"""Devices that are divided anew at a time, at the most."""
_WORK = 0.15
"""CP-SAT's work a second of the search, as the engine counts it."""
_WORK_EACH = 0.5
"""Work of one small problem."""
_LEAST_WORK = 0.01
"""What a small problem counts at the least: building it takes time as well."""
_TIME_BITS = 40
_BETTER = 1 - 1e-9


def solve_by_pairs(search: Search) -> None:
    """Divide pairs and triples of devices of the best plan anew; the plans need not be contiguous."""
    problem: MaxLoadProblem = search.problem
    search.space = space(problem)
    if search.decision is None or problem.contiguous:
        return
    best, load, size, improved = search.decision, search.objective, 2, False
    limit = search.engine_work + _WORK * search.work_s
    while size <= _MOST_DEVICES and search.engine_work < limit and load > search.bound * (1 + 1e-9):
        better = _better(search, best, load, size, limit)
        if better is None:
            size = size + 1 if improved else _MOST_DEVICES + 1
            continue
        best, load, size, improved = better, problem.judge(better).objective, 2, True
        search.offer(canonical(problem, best))


def _better(search: Search, best: MaxLoadDecision, load: float, size: int, limit: float) -> MaxLoadDecision | None:
    """The first plan in which the fullest device and `size - 1` others are less full; None when there is none."""
    problem = search.problem
    form, device = _grouped(problem, best, load, search.deadline)
    if form.decision(device) != best:
        return form.decision(device)
    for free in _fullest_with_others(Loads(form, device).load, size):
        search.deadline.check()
        if search.engine_work >= limit:
            return None
        found, spent = _divided(form, device, free, search.deadline)
        search.engine_work += max(spent, _LEAST_WORK)
        better = _accepted(problem, form, device, free, found)
        if better is not None:
            return better
    return None


def _grouped(
    problem: MaxLoadProblem, plan: MaxLoadDecision, load: float, deadline: Deadline
) -> tuple[Form, np.ndarray]:
    """The problem on groups that no better plan tears apart, and the devices of the groups.

    A plan that tears some of them stands for another, which is the better one, or else is left as it is on groups that
    it does not tear.
    """
    whole = form_of(problem)
    form = reduce_form(whole, load, deadline)
    device = group_devices(form, plan)
    mended = form.decision(device)
    if mended != plan:
        verdict = problem.judge(mended)
        if not verdict.feasible or verdict.objective >= load:
            return whole, group_devices(whole, plan)
    return form, device


def _fullest_with_others(loads: np.ndarray, size: int) -> Iterator[tuple[int, ...]]:
    """The fullest device with `size - 1` others, those with the most room first."""
    full = int(np.argmax(loads))
    others = [d for d in range(len(loads)) if d != full]
    yield from (
        (full, *rest) for rest in sorted(itertools.combinations(others, size - 1), key=lambda r: _sum(loads, r))
    )


def _sum(loads: np.ndarray, devices: Sequence[int]) -> float:
    return float(loads[list(devices)].sum())


def _accepted(
    problem: MaxLoadProblem, form: Form, device: np.ndarray, free: Sequence[int], found: np.ndarray | None
) -> MaxLoadDecision | None:
    """The plan, if the judge allows it and the fullest of the free devices is less full than before."""
    if found is None:
        return None
    before, after = Loads(form, device).load[list(free)].max(), Loads(form, found).load[list(free)].max()
    plan = form.decision(found)
    return plan if after < before * _BETTER and problem.judge(plan).feasible else None


def _divided(
    form: Form, device: np.ndarray, free: Sequence[int], deadline: Deadline
) -> tuple[np.ndarray | None, float]:
    """The devices of all groups with those of the free devices divided anew, and the work it took."""
    from ortools.sat.python import cp_model

    pair = _Pair(form, device, free)
    if deadline.passed:
        return None, 0.0
    solver = careful_solver(_WORK_EACH, deadline.left_s)
    status = solver.solve(pair.program)
    work = float(solver.response_proto.deterministic_time)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, work
    found = device.copy()
    for (v, d), here in pair.place.items():
        if solver.value(here):
            found[v] = d
    return found, work


class _Pair:
    """The small problem: where the groups of some devices go among these, so that the fullest is least full."""

    def __init__(self, form: Form, device: np.ndarray, free: Sequence[int]) -> None:
        from ortools.sat.python import cp_model

        self.form, self.program = form, cp_model.CpModel()
        self.place: dict[tuple[int, int], cp_model.IntVar] = {}
        limit = float(Loads(form, device).load[list(free)].max())
        self.scale = 2.0 ** (_TIME_BITS - math.frexp(max(limit, 1e-200))[1])
        for v in np.flatnonzero(np.isin(device, free)).tolist():
            able = [d for d in free if d >= form.problem.accelerators or form.supported[v]]
            for d in able:
                self.place[v, d] = self.program.new_bool_var(f"g{v}d{d}")
                self.program.add_hint(self.place[v, d], bool(device[v] == d))
            self.program.add_exactly_one([self.place[v, d] for d in able])
        fullest = self.program.new_int_var(0, math.ceil(limit * self.scale), "fullest")
        for d in free:
            mine = {v: here for (v, at), here in self.place.items() if at == d}
            if d < form.problem.accelerators:
                self.program.add(self._accelerator(mine) <= fullest)
                self._within_memory(mine)
            else:
                self.program.add(
                    weighted_sum([(here, self._whole(form.cpu[v])) for v, here in mine.items()]) <= fullest
                )
        self.program.minimize(fullest)

    def _whole(self, milliseconds: float) -> int:
        return math.floor(float(milliseconds) * self.scale)

    def _accelerator(self, mine: dict[int, cp_model.IntVar]) -> cp_model.LinearExprT:
        """Work of what it holds, and every net that it holds in part."""
        terms = [(here, self._whole(self.form.acc[v])) for v, here in mine.items()]
        for net, cost in zip(self.form.nets, self.form.cost.tolist(), strict=True):
            pins = [mine[v] for v in net if v in mine]
            if not pins:
                continue
            part = self.program.new_bool_var("part")
            for pin in pins:
                self.program.add_implication(pin, part)
            terms.append((part, self._whole(cost)))
            if len(pins) == len(net):
                whole = self.program.new_bool_var("whole")
                for pin in pins:
                    self.program.add_implication(whole, pin)
                terms.append((whole, -self._whole(cost)))
        return weighted_sum(terms)

    def _within_memory(self, mine: dict[int, cp_model.IntVar]) -> None:
        if self.form.roomy:
            return
        sizes, room = memory_units(self.form.size, self.form.problem.memory_bytes)
        self.program.add(weighted_sum([(here, sizes[v]) for v, here in mine.items()]) <= room)


PARTITION_SOLVERS.register(
    "max-load-pairs",
    PartitionSolver(MaxLoadProblem, solve_by_pairs, turn=4, share=lambda problem: 0.0 if problem.contiguous else 1.0),
)

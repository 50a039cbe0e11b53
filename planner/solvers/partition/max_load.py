"""The front of the max-load solvers: who runs in what order, and what is proven in the end.

Contiguous: the programme over ideals, which calls CP-SAT where it needs to. Not contiguous: the best contiguous plan
first, so that the answer is never worse; then tabu moves; then the root of HiGHS' search, which has the sharper
relaxation; then pairs of devices divided anew; then CP-SAT on the whole. The order is fixed and all of them count work
and not seconds: about half of what a slow core does within the time limit. So equal problems give equal plans, also on
a machine that is busy with other things; where the clock strikes all the same, the statistics say so (`out_of_time`).

Two devices of a max-load plan divided anew, the fullest with another, until no pair gets better.

What two devices hold can be divided between them without touching any other: a net that a third device holds in part
costs it the same whoever holds the rest. So each pair is a small problem of its own, which CP-SAT solves or improves
within a fixed amount of its own work. Where pairs helped until none does, the fullest device is taken with two others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.solvers.partition import (
    PARTITION_SOLVERS,
    RELATIVE_TOLERANCE,
    Deadline,
    Incumbent,
    PartitionSolver,
    Progress,
    Result,
)
from planner.solvers.partition._cp_sat import careful_solver, memory_units, weighted_sum
from planner.solvers.partition._max_load_form import Form, canonical, form_of, reduce_form, result, simple_bound
from planner.solvers.partition.cp_sat_max_load import solve_by_cp_sat
from planner.solvers.partition.highs_max_load import solve_by_highs
from planner.solvers.partition.ideal_dp_max_load import solve_by_ideals
from planner.solvers.partition.local_search_max_load import Loads, group_devices, improve
from planner.space.partition.max_load import MaxLoadDecision, MaxLoadProblem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


MOST_DEVICES = 3
"""Devices that are divided anew at a time, at the most."""
_WORK_EACH = 0.5
"""Work of one small problem, as the engine counts it."""
_LEAST_WORK = 0.01
"""What a small problem counts at the least: building it takes time as well."""
_TIME_BITS = 40
_BETTER = 1 - 1e-9


@dataclass(frozen=True, slots=True)
class Divided:
    """What dividing anew came to.

    Attributes:
        plan: the best plan; the start where nothing was better.
        work: what it took, as the engine counts it.
        in_time: whether the clock left it alone.
    """

    plan: MaxLoadDecision
    work: float
    in_time: bool


def divide_anew(
    problem: MaxLoadProblem,
    start: MaxLoadDecision,
    *,
    work_limit: float,
    deadline: Deadline,
    bound: float = 0.0,
    progress: Progress | None = None,
) -> Divided:
    """The best plan that dividing pairs and triples of devices anew comes by; never worse than the start.

    Args:
        problem: the problem, whose plans need not be contiguous.
        start: a feasible plan.
        work_limit: stop after so much work as the engine counts it.
        deadline: when to stop whatever the work.
        bound: a lower bound; the search stops when it is reached.
        progress: called when a better plan is found.
    """
    best, load, work, size = start, problem.judge(start).objective, 0.0, 2
    while size <= MOST_DEVICES and work < work_limit and load > bound * (1 + 1e-9):
        form, device = _grouped(problem, best, load, deadline)
        better = form.decision(device) if form.decision(device) != best else None
        for free in _fullest_with_others(Loads(form, device).load, size) if better is None else ():
            if deadline.passed or work >= work_limit:
                return Divided(best, work, not deadline.passed)
            found, spent = _divided(form, device, free, deadline)
            work += max(spent, _LEAST_WORK)
            better = _accepted(problem, form, device, free, found)
            if better is not None:
                break
        if better is None:
            size = size + 1 if best is not start else MOST_DEVICES + 1
            continue
        best, load, size = better, problem.judge(better).objective, 2
        if progress:
            progress("max-load-pairs", load, bound)
    return Divided(best, work, True)


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


NAME = "max-load"
_CHAIN_SHARE, _MOVES_SHARE, _ROOT_SHARE = 0.3, 0.25, 0.4
"""Parts of the time limit, and the root's of what is left of it, at which the clock ends a turn whatever its work."""
_PAIRS_WORK, _ENGINE_WORK = 0.15, 0.5
"""CP-SAT's work a second of the time limit: for pairs, and for pairs and the whole problem together."""
_NO_TIME_S = 0.25
"""With less than this left after the last turn, the clock may have ended it."""


def solve_max_load(
    problem: MaxLoadProblem,
    *,
    time_limit_s: float,
    work_s: float | None = None,
    start: MaxLoadDecision | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best plan with its bound.

    Args:
        problem: the problem, contiguous or not.
        time_limit_s: stop after about this long.
        work_s: seconds by which its work is measured out; by default the time limit.
        start: a feasible plan to begin with.
        progress: called with the name of the solver at work, incumbent and bound when either improves.
    """
    if problem.contiguous:
        return solve_by_ideals(problem, time_limit_s=time_limit_s, start=start, progress=progress)
    search = _Search(problem, time_limit_s, time_limit_s if work_s is None else work_s, progress)
    search.best.offer(start)
    search.by_ideals()
    for turn in (search.by_moves, search.by_root, search.by_pairs, search.by_cp_sat):
        if not search.proven:
            turn()
    return search.result()


class _Search:
    """The incumbent and the bound of one run, its clock and its work."""

    def __init__(self, problem: MaxLoadProblem, time_limit_s: float, work_s: float, progress: Progress | None) -> None:
        self.problem, self.limit_s, self.work_s, self.progress = problem, time_limit_s, work_s, progress
        self.deadline = Deadline(time_limit_s)
        self.best = Incumbent(problem, NAME)
        self.best.bound = simple_bound(form_of(problem))
        self.work = 0.0
        self.out_of_time = False
        self.statistics: dict[str, int] = {}

    @property
    def left_s(self) -> float:
        return self.deadline.left_s

    @property
    def proven(self) -> bool:
        """Whether there is nothing more to find, or no time to find it."""
        self.out_of_time |= self.left_s <= 0
        return self.best.bound >= self.best.objective * (1 - RELATIVE_TOLERANCE) or self.left_s <= 0

    def by_ideals(self) -> None:
        """The best contiguous plan."""
        limit_s = _CHAIN_SHARE * self.limit_s
        chain = solve_by_ideals(self.problem, time_limit_s=limit_s, start=self.best.decision, progress=self.progress)
        self.best.offer(chain.decision)

    def by_moves(self) -> None:
        """Tabu moves, which end by themselves."""
        if self.best.decision is None:
            return
        until = self.deadline.within(_MOVES_SHARE * self.limit_s)
        moved = improve(self.problem, self.best.decision, until, bound=self.best.bound, progress=self.progress)
        self.out_of_time |= until.passed
        self.best.offer(canonical(self.problem, moved))

    def by_root(self) -> None:
        """The root of HiGHS' search."""
        until = self.deadline.within(_ROOT_SHARE * self.left_s)
        root = solve_by_highs(
            self.problem,
            time_limit_s=until.left_s,
            start=self.best.decision,
            progress=self.progress,
            bound=self.best.bound,
            most_nodes=1,
        )
        self.out_of_time |= until.passed
        self.best.offer(root.decision)
        self.best.bound = max(self.best.bound, root.bound)

    def by_pairs(self) -> None:
        """Pairs of devices divided anew."""
        if self.best.decision is None:
            return
        divided = divide_anew(
            self.problem,
            self.best.decision,
            work_limit=_PAIRS_WORK * self.work_s,
            deadline=self.deadline,
            bound=self.best.bound,
            progress=self.progress,
        )
        self.work += divided.work
        self.out_of_time |= not divided.in_time
        self.best.offer(canonical(self.problem, divided.plan))

    def by_cp_sat(self) -> None:
        """CP-SAT on the whole problem, with the work that is left."""
        found = solve_by_cp_sat(
            self.problem,
            time_limit_s=self.left_s,
            start=self.best.decision,
            progress=self.progress,
            bound=self.best.bound,
            work_limit=_ENGINE_WORK * self.work_s - self.work,
        )
        self.best.offer(found.decision)
        self.best.bound = max(self.best.bound, found.bound)
        self.statistics |= found.statistics
        self.out_of_time |= self.left_s < _NO_TIME_S

    def result(self) -> Result:
        statistics = {**self.statistics, "out_of_time": int(self.out_of_time)}
        best = canonical(self.problem, self.best.decision) if self.best.decision is not None else None
        return result(self.problem, best, min(self.best.bound, self.best.objective), NAME, statistics=statistics)


PARTITION_SOLVERS.register(NAME, PartitionSolver((MaxLoadProblem,), exact=True, run=solve_max_load, counts_work=True))

"""Max-load plans by CP-SAT: one model that proves the best plan, or shares out the groups of a few devices.

x[v, p] = 1 if group v is at place p. For a net and an accelerator, t = 1 if the accelerator holds any of the net's
groups and w = 1 if it holds all of them; the net adds cost * (t - w), one variable for a net of two groups. Without
contiguity the places are the devices, and the heaviest groups break the symmetry of equal accelerators: each may only
use the accelerators up to the first that no heavier group uses. Contiguous plans: the places are those of a chain,
y[v, p] = 1 if v is at one of the places 0..p, y[b, p] <= y[a, p] for every forward edge a -> b, and z[p] = 1 if place p
is a CPU.

Division: the groups of the fullest device and one other are shared out between these two, until no pair improves. The
other devices are not affected: a net that a third device holds in part costs it the same wherever the other groups are.
If no pair does, the fullest device is taken with two others. All is done with little work for each division at first,
which soon gives a good plan of a large graph, then with more.

Times are integers in units of about 2^-43 of the incumbent, rounded down. So a bound is valid for the true times and
weaker than for them by less than the tolerance. CP-SAT runs on one thread up to a limit on deterministic work, so that
the answer depends on the machine's speed only if the time limit ends it first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cp_sat import careful_solver, memory_units, solved, weighted_sum
from planner.graph import topological_line
from planner.published.problems import MaxLoadDecision, MaxLoadProblem
from planner.published.solvers import PARTITION_SOLVERS, PartitionSolver, SearchState
from planner.published.solvers._max_load_form import (
    MaxLoadForm,
    canonical,
    device_numbers,
    form_of,
    group_devices,
    prove,
    reduce_form,
    simple_bound,
    space,
)
from planner.solvers.cluster_chains.search import Deadline

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_TIME_BITS = 43
_RANKED_PER_DEVICE = 2
_WORK = 0.5
"""Deterministic work of CP-SAT per second of the time limit, minus the work it already did in earlier turns."""
_DIVISION_WORK = 0.3
"""The same for all divisions together."""
_WORK_EACH = (0.1, 0.5)
"""Limits on the deterministic work of one division, in the order in which they are tried."""
_LEAST_WORK = 0.01
"""Work that every division counts at least: building its model takes time as well."""
_MOST_DEVICES = 3
"""Largest number of devices that are divided at a time."""
_BETTER = 1 - 1e-9


class PlacementModel:
    """A CP-SAT model that places groups so that the largest load of some places is least.

    All its constraints are linear; those of non-contiguous plans hold without conditions.

    Attributes:
        program: the CP-SAT model.
        place: by group and place, whether the group is there; groups without an entry stay where the start has them.
        is_cpu: by place of a chain, whether it is a CPU; empty without contiguity.
        largest: the largest load, in units of 1 / `scale` ms.
        scale: units of time per ms.
        top_ms: upper bound on the largest load; positive.

    Args:
        form: the problem on groups.
        free: places that share out the groups that the start has there; all groups if they are all the places.
        start: int64 [g] place of each group, which is hinted; None without a plan.
        cpu_places: places of the chain that are CPUs in the start; contiguous plans only.
        low_ms: lower bound on the largest load.
        top_ms: upper bound on it.
        deadline: of building the model.

    Raises:
        OutOfTime: the deadline passed.
    """

    def __init__(
        self,
        form: MaxLoadForm,
        free: Sequence[int],
        start: np.ndarray | None,
        cpu_places: set[int],
        low_ms: float,
        top_ms: float,
        deadline: Deadline,
    ) -> None:
        from ortools.sat.python import cp_model

        problem = form.problem
        self.form, self.free, self.start, self.top_ms, self.deadline = form, free, start, max(top_ms, 1e-200), deadline
        self.scale = 2.0 ** (_TIME_BITS - math.frexp(self.top_ms)[1])
        self.program = cp_model.CpModel()
        self.largest = self.program.new_int_var(
            math.floor(low_ms * (1 - 1e-12) * self.scale), math.ceil(top_ms * (1 + 1e-9) * self.scale), "load"
        )
        whole = len(free) == problem.devices
        groups = range(form.groups) if whole or start is None else np.flatnonzero(np.isin(start, free)).tolist()
        self.place = {(v, p): self._binary(start is not None and start[v] == p) for v in groups for p in free}
        for v in groups:
            self.program.add(sum(self.place[v, p] for p in free) == 1)
        self.is_cpu: list[cp_model.IntVar] = []
        if problem.contiguous:
            self._chain(cpu_places)
        elif whole:
            self._rank()
        for p in free:
            deadline.check()
            self._limit_place(p, {v: self.place[v, p] for v in groups})
        self.program.minimize(self.largest)

    def _binary(self, hint: bool) -> cp_model.IntVar:
        """A new binary, hinted if there is a start."""
        variable = self.program.new_bool_var("")
        if self.start is not None:
            self.program.add_hint(variable, bool(hint))
        return variable

    def _chain(self, cpu_places: set[int]) -> None:
        """The kinds of the places, and forward edges that lead to the same or a later place."""
        form, places = self.form, len(self.free)
        self.is_cpu = [self._binary(p in cpu_places) for p in range(places)]
        self.program.add(sum(self.is_cpu) == form.problem.cpus)
        reached: dict[tuple[int, int], cp_model.IntVar] = {}
        for v in np.flatnonzero(form.ordered).tolist():
            self.deadline.check()
            for p in range(places):
                reached[v, p] = self._binary(self.start is not None and bool(self.start[v] <= p))
                before = reached[v, p - 1] if p else 0
                self.program.add(reached[v, p] == before + self.place[v, p])
        for a, b in form.arcs:
            self.deadline.check()
            for p in range(places - 1):
                self.program.add(reached[b, p] <= reached[a, p])

    def _rank(self) -> None:
        """Let a heavy group use an accelerator only if a heavier one uses the accelerator before it."""
        ranked = ranked_groups(self.form)
        for j, v in enumerate(ranked):
            self.deadline.check()
            for d in range(1, self.form.problem.accelerators):
                earlier = [self.place[u, d - 1] for u in ranked[:j]]
                self.program.add(self.place[v, d] <= sum(earlier))

    def _limit_place(self, p: int, members: dict[int, cp_model.IntVar]) -> None:
        """The load and the memory of a place, whichever kind of device it is."""
        form = self.form
        may_be_cpu = form.problem.contiguous or p >= form.problem.accelerators
        if may_be_cpu:
            load = [(x, self._whole(form.cpu[v])) for v, x in members.items()]
            self._add(weighted_sum(load) <= self.largest, [self.is_cpu[p]] if self.is_cpu else [])
        if self.is_cpu or not may_be_cpu:
            on_accelerator = [~self.is_cpu[p]] if self.is_cpu else []
            for v, x in members.items():
                if not form.supported[v]:
                    self._add(x == 0, on_accelerator)
            load = [(x, self._whole(form.acc[v])) for v, x in members.items()]
            load += self._transfers(p, members)
            self._add(weighted_sum(load) <= self.largest, on_accelerator)
            if not form.roomy:
                sizes, room = memory_units(form.size, form.problem.memory_bytes)
                self._add(weighted_sum([(x, sizes[v]) for v, x in members.items()]) <= room, on_accelerator)

    def _add(self, constraint: Any, when: list[Any]) -> None:  # noqa: ANN401
        self.program.add(constraint).only_enforce_if(*when)

    def _transfers(self, p: int, members: dict[int, cp_model.IntVar]) -> Iterator[tuple[cp_model.IntVar, int]]:
        """Terms of an accelerator's load: the cost of every net that it holds in part."""
        for net, cost in zip(self.form.nets, self.form.cost.tolist(), strict=True):
            pins = [members[v] for v in net if v in members]
            held = 0 if self.start is None else int((self.start[list(net)] == p).sum())
            if not pins:
                continue
            if len(pins) == len(net) == 2:
                cut = self._binary(held == 1)
                self.program.add(pins[0] - pins[1] <= cut)
                self.program.add(pins[1] - pins[0] <= cut)
                yield cut, self._whole(cost)
                continue
            any_held = self._binary(held > 0)
            for pin in pins:
                self.program.add(pin <= any_held)
            yield any_held, self._whole(cost)
            if len(pins) == len(net):
                all_held = self._binary(held == len(net))
                for pin in pins:
                    self.program.add(all_held <= pin)
                yield all_held, -self._whole(cost)

    def _whole(self, milliseconds: float) -> int:
        """A time in whole units; one above twice the largest load counts as that, since no solution has it either way:
        integers of the program have 64 bits."""
        return math.floor(min(float(milliseconds), 2 * self.top_ms) * self.scale)

    def devices(self, value: Callable[[cp_model.IntVar], int]) -> np.ndarray:
        """int64 [g] device of each group in a solution, accelerators first."""
        places = np.full(self.form.groups, -1) if self.start is None else self.start.copy()
        for (v, p), placed in self.place.items():
            if value(placed):
                places[v] = p
        if not self.is_cpu:
            return places
        kinds = np.array([value(z) for z in self.is_cpu], dtype=bool)
        device = np.where(kinds, self.form.problem.accelerators + np.cumsum(kinds), np.cumsum(~kinds)) - 1
        return np.asarray(device[places])


def ranked_groups(form: MaxLoadForm) -> list[int]:
    """The groups that break the symmetry of equal accelerators, heaviest first."""
    able = [int(v) for v in np.argsort(-form.acc, kind="stable") if form.supported[v]]
    return able[: _RANKED_PER_DEVICE * form.problem.accelerators]


def _start_places(form: MaxLoadForm, device: np.ndarray) -> tuple[np.ndarray | None, set[int]]:
    """The place of each group (None if the devices form no chain but must), and the places that are CPUs."""
    problem = form.problem
    if not problem.contiguous:
        numbers = device_numbers(problem.accelerators, device[[*ranked_groups(form), *range(form.groups)]].tolist())
        return np.array([numbers[d] for d in device.tolist()], dtype=np.int64), set()
    line = topological_line(problem.devices, {(int(device[a]), int(device[b])) for a, b in form.arcs})
    if len(line) < problem.devices:
        return None, set()
    place = np.argsort(line)
    return place[device], {int(p) for p in place[problem.accelerators :]}


def model_of_search(search: SearchState) -> PlacementModel | None:
    """The model of a search's problem on reduced groups; None if the simple bounds settle the search.

    Raises:
        OutOfTime: the deadline passed before it was built.
    """
    problem: MaxLoadProblem = search.problem
    search.space = space(problem)
    unreduced = form_of(problem)
    prove(search, simple_bound(unreduced))
    if search.settled:
        return None
    form = reduce_form(unreduced, search.objective, search.deadline)
    top_ms, places = search.objective, None
    cpu_places: set[int] = set()
    if search.decision is None:
        top_ms = float(form.acc.sum() + 2 * form.cost.sum() + form.cpu.sum())
    else:
        places, cpu_places = _start_places(form, group_devices(form, search.decision))
    free = range(problem.devices)
    model = PlacementModel(form, free, places, cpu_places, search.bound, top_ms, search.deadline)
    search.count(groups=form.groups, binaries=len(model.program.proto.variables) - 1)
    return model


def solve_by_cp_sat(search: SearchState) -> None:
    """Find the best plan and prove it, given time; starts from the best plan so far."""
    start = search.decision
    model = model_of_search(search)
    work = (1.0 if search.problem.contiguous else _WORK) * search.work_s - search.engine_work
    if model is None or work <= 0 or not _proves_infeasible(search, model, work):
        return
    if start is not None and model.start is not None and model.form.decision(group_devices(model.form, start)) == start:
        raise RuntimeError(f"{search.solver}: the engine says that a model is infeasible which the start satisfies")
    search.prove(search.objective)


def _proves_infeasible(search: SearchState, model: PlacementModel, work: float) -> bool:
    """Run CP-SAT, offer its best plan, prove its bound; returns whether the model is infeasible.

    With a known plan the model only holds plans no worse than that.
    """
    from ortools.sat.python import cp_model

    search.deadline.check()
    solver = careful_solver(work, search.deadline.left_s)
    status = solved(solver, model.program)
    if status == cp_model.INFEASIBLE:
        return True
    if status == cp_model.MODEL_INVALID:
        raise RuntimeError(f"{search.solver}: the model is not valid: {model.program.validate()}")
    if status != cp_model.UNKNOWN:
        search.offer(canonical(search.problem, model.form.decision(model.devices(solver.value))))
    prove(search, solver.best_objective_bound / model.scale * (1 - 1e-13))
    return False


def solve_by_pairs(search: SearchState) -> None:
    """Improve the best plan by dividing pairs and triples of devices; for non-contiguous problems only."""
    problem: MaxLoadProblem = search.problem
    search.space = space(problem)
    if search.decision is None or problem.contiguous:
        return
    plan = search.decision
    limit = search.engine_work + _DIVISION_WORK * search.work_s
    for work in _WORK_EACH:
        size = 2
        while size <= _MOST_DEVICES and search.engine_work < limit and not search.settled:
            better = _divide(search, plan, size, work, limit)
            if better is None:
                size += 1
                continue
            plan, size = better, 2
            search.offer(canonical(problem, plan))


def _divide(search: SearchState, plan: MaxLoadDecision, size: int, work: float, limit: float) -> MaxLoadDecision | None:
    """The first plan in which the fullest device and `size - 1` others have smaller loads; None if there is none."""
    problem: MaxLoadProblem = search.problem
    load_ms = problem.judge(plan).objective
    form = reduce_form(form_of(problem), load_ms, search.deadline)
    device = group_devices(form, plan)
    if form.decision(device) != plan:
        # The plan splits a reduced group. The groups' devices state another plan, which is often better.
        verdict = problem.judge(form.decision(device))
        if verdict.feasible and verdict.objective < load_ms:
            return form.decision(device)
        form = form_of(problem)
        device = group_devices(form, plan)
    loads = np.array(problem.judge(plan).parts)
    fullest = int(np.argmax(loads))
    others = [d for d in range(problem.devices) if d != fullest]
    for partners in sorted(itertools.combinations(others, size - 1), key=lambda p: float(loads[list(p)].sum())):
        search.deadline.check()
        if search.engine_work >= limit:
            return None
        free = [fullest, *partners]
        divided = form.decision(_divided(search, form, device, free, float(loads[fullest]), work))
        verdict = problem.judge(divided)
        if verdict.feasible and max(verdict.parts[d] for d in free) < loads[fullest] * _BETTER:
            return divided
    return None


def _divided(
    search: SearchState, form: MaxLoadForm, device: np.ndarray, free: Sequence[int], top_ms: float, work: float
) -> np.ndarray:
    """int64 [g] devices with the groups of the free devices shared out anew; as before if CP-SAT finds no plan."""
    from ortools.sat.python import cp_model

    model = PlacementModel(form, free, device, set(), 0.0, top_ms, search.deadline)
    solver = careful_solver(work, search.deadline.left_s)
    solver.parameters.linearization_level = 2  # the relaxation says much about so few devices
    status = solver.solve(model.program)
    search.engine_work += max(float(solver.response_proto.deterministic_time), _LEAST_WORK)
    return model.devices(solver.value) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else device


PARTITION_SOLVERS.register("max-load-pairs", PartitionSolver(MaxLoadProblem, solve_by_pairs, turn=4))
PARTITION_SOLVERS.register("max-load-cp-sat", PartitionSolver(MaxLoadProblem, solve_by_cp_sat, turn=5))

"""Max-load plans improved: by a tabu search over single groups, and by dividing two or three devices anew.

The tabu search moves the group whose change of device lowers a steep sum of powers of the loads most. The sum of load^p
looks at all devices, most at the fullest, and has none of the plateaus of the maximum. Each run starts from the best
plan so far, with another power; a group that moved must stay for a while. Runs go from coarse to fine: first regions of
the plan move as a whole, then their halves, at last single groups. The search ends after a number of runs without
success, so that equal problems give equal plans; only the time limit can cut it short.

Then the fullest device and another are divided anew, until no pair gets better. What two devices hold can be divided
between them without touching any other: a net that a third device holds in part costs it the same whoever holds the
rest. So each pair is a small problem of its own, which CP-SAT solves or improves within a fixed amount of its own work.
Where pairs helped until none does, the fullest device is taken with two others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.memory import fits
from planner.solvers.partition import PARTITION_SOLVERS, Deadline, PartitionSolver, Search
from planner.solvers.partition._cp_sat import careful_solver, memory_units, weighted_sum
from planner.solvers.partition._max_load_form import Form, canonical, form_of, merge_groups, reduce_form, space
from planner.solvers.partition.types import NEVER
from planner.space.partition import MaxLoadDecision, MaxLoadProblem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


class Loads:
    """Loads of the devices under an assignment of groups.

    A net costs an accelerator that holds some of its groups but not all. So a group that leaves device y for device x
    changes the loads of these two alone.

    Attributes:
        form: the problem on groups.
        device: int64 [g] device of each group.
        load: float64 [devices] ms.
        held: float64 [devices] bytes.
    """

    def __init__(self, form: Form, device: np.ndarray) -> None:
        self.form = form
        problem = form.problem
        self.devices, self.accs = problem.devices, problem.accelerators
        self.device = np.array(device, dtype=np.int64)
        sizes = np.array([len(pins) for pins in form.nets], dtype=np.int64)
        pin_net = np.repeat(np.arange(len(sizes)), sizes)
        pin_group = np.array([v for pins in form.nets for v in pins], dtype=np.int64)
        order = np.lexsort((pin_net, pin_group))
        self.pin_net, self.pin_group, self.net_size = pin_net[order], pin_group[order], sizes
        self.time = np.where(np.arange(self.devices) < self.accs, form.acc[:, None], form.cpu[:, None])
        self.allowed = np.ones((form.groups, self.devices), dtype=bool)
        self.allowed[~form.supported, : self.accs] = False
        self.on_acc = np.arange(self.devices) < self.accs
        self.refresh()

    def refresh(self) -> None:
        """Compute counts and loads anew from the assignment; O(pins + groups)."""
        self.count = np.zeros((len(self.net_size), self.devices), dtype=np.int64)
        np.add.at(self.count, (self.pin_net, self.device[self.pin_group]), 1)
        members = np.arange(self.form.groups)
        work = np.bincount(self.device, weights=self.time[members, self.device], minlength=self.devices)
        self.held = np.bincount(self.device, weights=self.form.size, minlength=self.devices)
        cut = (self.count > 0) & (self.count < self.net_size[:, None])
        self.load: np.ndarray = work + (self.form.cost @ cut if len(cut) else 0.0) * self.on_acc

    def move(self, group: int, to: int) -> None:
        """Put a group on another device; O(pins of the group * devices)."""
        start, stop = np.searchsorted(self.pin_group, [group, group + 1])
        nets = self.pin_net[start:stop]
        before, whole = self.count[nets], self.net_size[nets, None]
        self.count[nets, self.device[group]] -= 1
        self.count[nets, to] += 1
        after = self.count[nets]
        change = ((after > 0) & (after < whole)).astype(float) - ((before > 0) & (before < whole))
        self.load += (self.form.cost[nets] @ change) * self.on_acc
        came = self.device[group]
        self.load[came] -= self.time[group, came]
        self.load[to] += self.time[group, to]
        self.held[came] -= self.form.size[group]
        self.held[to] += self.form.size[group]
        self.device[group] = to

    def moves(self) -> tuple[np.ndarray, np.ndarray]:
        """What each move would do: loads that its device is left with [g], and that each device gets [g, devices].

        The second is infinite where a move is not allowed or does not fit the memory.
        """
        cost = self.form.cost[:, None]
        whole = self.net_size[:, None]
        joining = cost * ((self.count + 1 < whole).astype(float) - (self.count >= 1))
        groups = self.form.groups
        gets = np.zeros((groups, self.devices))
        leaves = np.zeros(groups)
        if len(self.pin_net):
            present, first = np.unique(self.pin_group, return_index=True)
            gets[present] = np.add.reduceat(joining[self.pin_net], first, axis=0)
            here = self.count[self.pin_net, self.device[self.pin_group]]
            change = self.form.cost[self.pin_net] * ((here >= 2).astype(float) - (here < self.net_size[self.pin_net]))
            leaves[present] = np.add.reduceat(change, first)
        members = np.arange(groups)
        left = self.load[self.device] - self.time[members, self.device] + leaves * self.on_acc[self.device]
        got = self.load + self.time + gets * self.on_acc
        full = self.on_acc & ~fits(self.held + self.form.size[:, None], self.form.problem.memory_bytes)
        got[full | ~self.allowed] = np.inf
        got[members, self.device] = np.inf
        return left, got


_SHARE = 0.25
_POWERS = (16.0, 64.0, 8.0, 32.0)
_ROUNDS = 1000
_PATIENCE = 16
_LEVELS = 4
_TENURE = (8, 13)


def solve_by_moves(search: Search) -> None:
    """Improve the best plan by moving one group at a time.

    Contiguous plans keep their chain: only nodes that no forward edge binds are moved.
    """
    search.space = space(search.problem)
    search.offer_all((search.solver, plan) for _, plan in search.problem.trivial())
    if search.decision is not None:
        improve(search, search.decision)


def improve(search: Search, start: MaxLoadDecision, *, patience: int = _PATIENCE) -> None:
    """Offer the plans that tabu runs from a feasible plan come by, each better than it and the ones before.

    Args:
        search: the problem and its best plan, which need not be the start.
        start: a feasible plan.
        patience: stop after so many runs in a row without a better plan; each run after the first begins with regions
            of the plan merged and moved as a whole.
    """
    problem: MaxLoadProblem = search.problem
    best, load = start, problem.judge(start).objective
    search.offer(canonical(problem, best))
    random = np.random.default_rng(len(start))
    cycle, last = -1, 0
    while (cycle := cycle + 1) - last < patience:
        form = form_of(problem) if problem.contiguous else reduce_form(form_of(problem), load, search.deadline)
        movable = ~form.ordered if problem.contiguous else np.ones(form.groups, dtype=bool)
        if not movable.any():
            return
        device = group_devices(form, best)
        levels = [(form, movable)]
        if cycle and not problem.contiguous:
            levels += _coarser(form, device, random)
        power = _POWERS[cycle % len(_POWERS)]
        for level, free in reversed(levels):
            loads = Loads(level, group_devices(level, form.decision(device)))
            rounds = _ROUNDS if level is form else _ROUNDS // 2
            found, placed = tabu(loads, free, power, rounds, random, search.deadline)
            device = group_devices(form, level.decision(placed))
            if found < load * (1 - 1e-12):
                plan = level.decision(placed)
                verdict = problem.judge(plan)
                if verdict.feasible and verdict.objective < load:
                    best, load, last = plan, verdict.objective, cycle
                    search.offer(canonical(problem, best))
            if search.deadline.passed or load <= search.bound * (1 + 1e-9):
                return


def _coarser(form: Form, device: np.ndarray, random: np.random.Generator) -> list[tuple[Form, np.ndarray]]:
    """Ever smaller forms, neighbours on one device merged two by two, so that whole regions can move at once."""
    levels = []
    for _ in range(_LEVELS):
        merged = _matching(form, device, random)
        smaller = merge_groups(form, merged)
        if smaller.groups > 0.9 * form.groups or smaller.groups < 3 * form.problem.devices:
            break
        device = group_devices(smaller, form.decision(device))
        form = smaller
        levels.append((form, np.ones(form.groups, dtype=bool)))
    return levels


def _matching(form: Form, device: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Pairs of neighbours on one device, those with the dearest common nets first, chance breaking in."""
    weight = form.cost * random.uniform(0.2, 1.0, size=len(form.nets)) if len(form.nets) else form.cost
    into = np.arange(form.groups)
    paired = np.zeros(form.groups, dtype=bool)
    for e in np.argsort(-weight, kind="stable"):
        alone = [v for v in form.nets[e] if not paired[v]]
        for a, b in zip(alone[::2], alone[1::2], strict=False):
            if device[a] == device[b]:
                into[b] = a
                paired[[a, b]] = True
    return into


def group_devices(form: Form, plan: MaxLoadDecision) -> np.ndarray:
    """The device of each group: that of its node with most work, where a plan tears a group apart."""
    nodes = np.array(plan, dtype=np.int64)
    by_work = np.argsort(form.problem.accelerator_ms, kind="stable")
    device = np.zeros(form.groups, dtype=np.int64)
    device[form.group_of[by_work]] = nodes[by_work]
    return device


def tabu(
    loads: Loads,
    movable: np.ndarray,
    power: float,
    rounds: int,
    random: np.random.Generator,
    deadline: Deadline = NEVER,
) -> tuple[float, np.ndarray]:
    """Run a number of moves, each the best for the sum of powers among groups that have not moved lately.

    Returns:
        the least largest load met, and the devices of the groups there. O(rounds * (pins + groups) * devices).
    """
    best, device = float(loads.load.max()), loads.device.copy()
    blocked = np.zeros(loads.form.groups, dtype=np.int64)
    blocked[~movable] = rounds + 1
    tenure = random.integers(*_TENURE, size=rounds)
    for step in range(rounds):
        if deadline.passed:
            break
        left, got = loads.moves()
        scale = float(loads.load.max())
        if scale <= 0:
            break
        now = (loads.load / scale) ** power
        change = ((left / scale) ** power - now[loads.device])[:, None] + (got / scale) ** power - now
        change[blocked > step] = np.inf
        group, to = divmod(int(np.argmin(change)), loads.devices)
        if not math.isfinite(change[group, to]):
            break
        loads.move(group, to)
        blocked[group] = step + tenure[step]
        if step % 512 == 511:
            loads.refresh()
        if loads.load.max() < best * (1 - 1e-12):
            best, device = float(loads.load.max()), loads.device.copy()
    return best, device


PARTITION_SOLVERS.register(
    "max-load-moves",
    PartitionSolver(
        MaxLoadProblem, solve_by_moves, turn=2, share=lambda problem: 0.0 if problem.contiguous else _SHARE
    ),
)


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

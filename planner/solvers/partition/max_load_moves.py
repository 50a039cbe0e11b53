"""Improve max-load plans: a tabu search over single groups, and an exact division of two or three devices.

Tabu search: each step moves the group whose change of device lowers the sum of load^p over the devices most, for a
large p. That sum follows the fullest devices, yet has none of the plateaus of the maximum. A group that moved stays for
a number of steps. Each run starts from the best plan so far with another p and goes from coarse to fine: first regions
of the plan move as a whole, then smaller ones, at last single groups. The search ends after a number of runs without
success, so that equal problems give equal plans unless the time limit ends it first.

Division: the groups of the fullest device and one other are divided between these two, until no pair improves. The
other devices are not affected: a net that a third device holds in part costs it the same wherever the other groups are.
So each pair is a small problem, which CP-SAT solves within a fixed amount of deterministic work. If pairs improved the
plan and none does any more, the fullest device is taken with two others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from planner.memory import fits
from planner.solvers.partition import PARTITION_SOLVERS, Deadline, PartitionSolver, Search
from planner.solvers.partition._max_load_form import (
    Form,
    canonical,
    form_of,
    group_devices,
    merge_groups,
    reduce_form,
    space,
)
from planner.solvers.partition.types import NEVER
from planner.space.partition import MaxLoadDecision, MaxLoadProblem

if TYPE_CHECKING:
    pass


class Loads:
    """Loads of the devices under an assignment of groups.

    A net costs an accelerator that holds some of its groups but not all, so a move changes the loads of its two devices
    only.

    Attributes:
        form: the problem on groups.
        device: int64 [g] device of each group.
        load: float64 [devices] ms.
        held: float64 [devices] bytes of its groups.
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
        """Recompute counts and loads from the assignment; O(pins + groups)."""
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
        before, net_size = self.count[nets], self.net_size[nets, None]
        self.count[nets, self.device[group]] -= 1
        self.count[nets, to] += 1
        after = self.count[nets]
        change = ((after > 0) & (after < net_size)).astype(float) - ((before > 0) & (before < net_size))
        self.load += (self.form.cost[nets] @ change) * self.on_acc
        source = self.device[group]
        self.load[source] -= self.time[group, source]
        self.load[to] += self.time[group, to]
        self.held[source] -= self.form.size[group]
        self.held[to] += self.form.size[group]
        self.device[group] = to

    def moves(self) -> tuple[np.ndarray, np.ndarray]:
        """Loads after each possible move: [g] of the device that the group leaves, [g, devices] of the one it enters.

        The second is infinite where a move is not allowed or does not fit the memory.
        """
        cost = self.form.cost[:, None]
        net_size = self.net_size[:, None]
        joining = cost * ((self.count + 1 < net_size).astype(float) - (self.count >= 1))
        groups = self.form.groups
        gained = np.zeros((groups, self.devices))
        lost = np.zeros(groups)
        if len(self.pin_net):
            present, first = np.unique(self.pin_group, return_index=True)
            gained[present] = np.add.reduceat(joining[self.pin_net], first, axis=0)
            held = self.count[self.pin_net, self.device[self.pin_group]]
            change = self.form.cost[self.pin_net] * ((held >= 2).astype(float) - (held < self.net_size[self.pin_net]))
            lost[present] = np.add.reduceat(change, first)
        members = np.arange(groups)
        source_ms = self.load[self.device] - self.time[members, self.device] + lost * self.on_acc[self.device]
        target_ms = self.load + self.time + gained * self.on_acc
        full = self.on_acc & ~fits(self.held + self.form.size[:, None], self.form.problem.memory_bytes)
        target_ms[full | ~self.allowed] = np.inf
        target_ms[members, self.device] = np.inf
        return source_ms, target_ms


_SHARE = 0.25
_POWERS = (16.0, 64.0, 8.0, 32.0)
_ROUNDS = 1000
_PATIENCE = 16
_LEVELS = 4
_TENURE = (8, 13)


def solve_by_moves(search: Search) -> None:
    """Improve the best plan by moving one group at a time.

    In contiguous plans only loose groups, those without forward nodes, are moved.
    """
    search.space = space(search.problem)
    search.offer_all((search.solver, plan) for _, plan in search.problem.trivial())
    if search.decision is not None:
        improve(search, search.decision)


def improve(search: Search, start: MaxLoadDecision, *, patience: int = _PATIENCE) -> None:
    """Run tabu searches from a feasible plan and offer every plan that is better than the ones before.

    Args:
        search: the problem and its best plan, which need not be the start.
        start: a feasible plan.
        patience: stop after so many runs in a row without a better plan; every run but the first starts on merged
            groups.
    """
    problem: MaxLoadProblem = search.problem
    best, load = start, problem.judge(start).objective
    search.offer(canonical(problem, best))
    random = np.random.default_rng(len(start))
    cycle, last_success = -1, 0
    while (cycle := cycle + 1) - last_success < patience:
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
            level_load, level_device = tabu(loads, free, power, rounds, random, search.deadline)
            device = group_devices(form, level.decision(level_device))
            if level_load < load * (1 - 1e-12):
                plan = level.decision(level_device)
                verdict = problem.judge(plan)
                if verdict.feasible and verdict.objective < load:
                    best, load, last_success = plan, verdict.objective, cycle
                    search.offer(canonical(problem, best))
            if search.deadline.passed or load <= search.bound * (1 + 1e-9):
                return


def _coarser(form: Form, device: np.ndarray, random: np.random.Generator) -> list[tuple[Form, np.ndarray]]:
    """Coarser and coarser forms with their movable groups: each merges pairs of neighbours on the same device."""
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
    """int64 [g] the group into which each is merged: pairs on one device, costliest common net first, randomised."""
    weight = form.cost * random.uniform(0.2, 1.0, size=len(form.nets)) if len(form.nets) else form.cost
    into = np.arange(form.groups)
    paired = np.zeros(form.groups, dtype=bool)
    for e in np.argsort(-weight, kind="stable"):
        unpaired = [v for v in form.nets[e] if not paired[v]]
        for a, b in zip(unpaired[::2], unpaired[1::2], strict=False):
            if device[a] == device[b]:
                into[b] = a
                paired[[a, b]] = True
    return into


def tabu(
    loads: Loads,
    movable: np.ndarray,
    power: float,
    rounds: int,
    random: np.random.Generator,
    deadline: Deadline = NEVER,
) -> tuple[float, np.ndarray]:
    """Make a number of moves, each the best for the sum of powers among groups that have not moved recently.

    Returns:
        the smallest largest load on the way, and int64 [g] the devices there. O(rounds * (pins + groups) * devices).
    """
    best_load, best_device = float(loads.load.max()), loads.device.copy()
    blocked = np.zeros(loads.form.groups, dtype=np.int64)
    blocked[~movable] = rounds + 1
    tenure = random.integers(*_TENURE, size=rounds)
    for step in range(rounds):
        if deadline.passed:
            break
        source_ms, target_ms = loads.moves()
        scale = float(loads.load.max())
        if scale <= 0:
            break
        powers = (loads.load / scale) ** power
        change = ((source_ms / scale) ** power - powers[loads.device])[:, None] + (target_ms / scale) ** power - powers
        change[blocked > step] = np.inf
        group, to = divmod(int(np.argmin(change)), loads.devices)
        if not math.isfinite(change[group, to]):
            break
        loads.move(group, to)
        blocked[group] = step + tenure[step]
        if step % 512 == 511:
            loads.refresh()
        if loads.load.max() < best_load * (1 - 1e-12):
            best_load, best_device = float(loads.load.max()), loads.device.copy()
    return best_load, best_device


PARTITION_SOLVERS.register(
    "max-load-moves",
    PartitionSolver(
        MaxLoadProblem, solve_by_moves, turn=2, share=lambda problem: 0.0 if problem.contiguous else _SHARE
    ),
)

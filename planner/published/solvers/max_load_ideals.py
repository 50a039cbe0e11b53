"""Exact dynamic program over ideals for contiguous max-load plans.

An ideal is a set of groups that holds the sources of all its arcs. A contiguous plan is a chain of ideals (the groups
on the first 1, 2, ... devices); a device's part is the difference of two consecutive ones. State: an ideal and the
numbers of accelerators and CPUs that hold it; value: the least largest load so far. With a known plan of load T, only
parts below T matter, and only ideals whose remaining work fits the remaining devices below T. If T is near the mean
load, few ideals around the multiples of the mean remain, so that graphs with tens of thousands of ideals are quick.

The program first runs on the prefixes of a few topological orders, which gives a good plan, then on all ideals, which
improves it or proves it optimal. Two cases are left to CP-SAT: too many ideals, and the proof where there are loose
groups, those without forward nodes, which no order constrains: the program merges each with its costliest neighbour.

Times are rounded to multiples of 2^-50 of their total, so that all sums are exact in any order.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from planner.graph.ideals import bit_row, enumerate_ideals, prefix_ideals, topological_lines
from planner.memory import fits
from planner.published.problems import MaxLoadProblem
from planner.published.solvers import PARTITION_SOLVERS, PartitionSolver, SearchState
from planner.published.solvers._max_load_form import (
    MaxLoadForm,
    canonical,
    form_of,
    merge_groups,
    prove,
    reduce_form,
    simple_bound,
    space,
)
from planner.solvers.cluster_chains.search import NEVER, Deadline

_FREE = 1e-10
"""Relative difference of loads from which on a plan counts as better than another."""


def best_chain(
    form: MaxLoadForm, ideals: np.ndarray, limit_ms: float, deadline: Deadline = NEVER
) -> tuple[np.ndarray | None, float]:
    """The chain through some ideals of a form with the smallest largest load.

    Args:
        form: the problem on groups, all of which have a forward node.
        ideals: uint64 [ideals, words] bit sets of its groups, without repetition; the empty and the full set must be
            among them.
        limit_ms: only chains with a smaller load count.
        deadline: when to stop.

    Returns:
        int64 [g] the device of each group, accelerators in the order of the chain, then CPUs; and the largest load, ms.
        None and infinity if no chain is below the limit.

    Raises:
        OutOfTime: the deadline passed.

    Complexity: O(ideals * (ideals in a window) * (words + nets cut by an ideal)).
    """
    return _Search(form, limit_ms, deadline).run(ideals)


class _Search:
    """One run of the program; times are integers, ms * scale."""

    def __init__(self, form: MaxLoadForm, limit_ms: float, deadline: Deadline) -> None:
        problem = form.problem
        self.form, self.deadline = form, deadline
        self.accs, self.cpus = problem.accelerators, problem.cpus
        total_ms = max(float(form.acc.sum() + 2 * form.cost.sum()), float(form.cpu.sum()), 1e-200)
        self.scale = 2.0 ** (50 - math.frexp(total_ms)[1])
        acc, cpu = np.rint(form.acc * self.scale), np.rint(form.cpu * self.scale)
        self.cost = np.rint(form.cost * self.scale)
        self.limit = min(limit_ms, float(form.acc.sum() + form.cpu.sum() + form.cost.sum()) + 1.0) * self.scale
        self.limit = self.limit * (1 - _FREE)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(acc > 0, acc / cpu, 0.0)
        self.ratio = float(ratio.max(initial=0.0)) if self.cpus else 0.0
        self.times = acc, cpu

    def _load_family(self, ideals: np.ndarray) -> None:
        form, (acc, cpu) = self.form, self.times
        columns = np.column_stack([acc, cpu, form.size, (~form.supported).astype(float), np.ones(form.groups)])
        sums = _weigh(ideals, columns, self.deadline)
        reach = self._within_reach(sums[:, 0])
        kept = np.flatnonzero(reach.any(axis=(1, 2)))
        order = kept[np.lexsort((*ideals[kept].T, sums[kept, 4], sums[kept, 0]))]
        self.reach = reach[order]
        self.bits = np.ascontiguousarray(ideals[order])
        self.missing = ~self.bits
        self.acc, self.cpu, self.size, self.unsupported = (np.ascontiguousarray(sums[order, k]) for k in range(4))
        # Ideals are sorted by accelerator time, so CPU time may fall: this is its minimum from each position on.
        self.cpu_floor = np.minimum.accumulate(self.cpu[::-1])[::-1]
        self.frontier, self.frontier_cost, self.cut = self._frontiers()

    def _within_reach(self, done: np.ndarray) -> np.ndarray:
        """bool [ideals, cpus + 1, accelerators + 1]: so many devices can hold an ideal, and the others the rest.

        Both below the limit. If all devices together cannot do all the work, nothing is within reach.
        """
        rest, slack = float(done.max(initial=0.0)) - done, 1 + 1e-9
        reach = np.zeros((len(done), self.cpus + 1, self.accs + 1), dtype=bool)
        for c, a in np.ndindex(reach.shape[1:]):
            self.deadline.check()
            others = self._capacity(self.accs - a, self.cpus - c)
            reach[:, c, a] = (done <= self._capacity(a, c) * slack) & (rest <= others * slack)
        return reach

    def _capacity(self, accs: int, cpus: int) -> float:
        """Upper bound on the accelerator time of the work that so many devices do below the limit."""
        return accs * self.limit + (cpus * self.limit * self.ratio if cpus else 0.0)

    def _frontiers(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[ideals, width] nets cut by each ideal (padded with the number of nets), their costs; [ideals] cost sums."""
        width = self.bits.shape[1]
        self.pins = np.array([bit_row(pins, width) for pins in self.form.nets], dtype=np.uint64).reshape(-1, width)
        rows, nets = [], []
        for e, pins in enumerate(self.pins):
            self.deadline.check()
            touched = np.zeros(len(self.bits), dtype=bool)
            all_inside = np.ones(len(self.bits), dtype=bool)
            for w in np.flatnonzero(pins):
                part = self.bits[:, w] & pins[w]
                touched |= part != 0
                all_inside &= part == pins[w]
            at = np.flatnonzero(touched & ~all_inside)
            rows.append(at)
            nets.append(np.full(len(at), e))
        row = np.concatenate([*rows, np.zeros(0, dtype=np.int64)]).astype(np.int64)
        net = np.concatenate([*nets, np.zeros(0, dtype=np.int64)]).astype(np.int64)
        order = np.argsort(row, kind="stable")
        row, net = row[order], net[order]
        counts = np.bincount(row, minlength=len(self.bits))
        padded = np.full((len(self.bits), int(counts.max(initial=0))), len(self.pins), dtype=np.int32)
        padded[row, np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)] = net
        costs = np.append(self.cost, 0.0)[padded]
        return padded, costs, costs.sum(axis=1)

    def run(self, ideals: np.ndarray) -> tuple[np.ndarray | None, float]:
        """Fill the table, one ideal after the other in the order of accelerator time, and trace the best chain."""
        self._load_family(ideals)
        count = len(self.bits)
        if not count:
            return None, math.inf
        shape = (count, self.cpus + 1, self.accs + 1)
        self.value = np.full(shape, np.inf)
        self.parent = np.full(shape, -1, dtype=np.int32)
        self.by_cpu = np.zeros(shape, dtype=bool)
        self.value[0, 0, 0] = 0.0
        for i in range(count - 1):
            if (self.value[i] < self.limit).any():
                self.deadline.check()
                self._extend(i)
        return self._trace()

    def _extend(self, i: int) -> None:
        """Put one more device after the chains that end at ideal i: relax the states of all later ideals in reach."""
        high = int(np.searchsorted(self.acc, self.acc[i] + self.limit, side="left"))
        if self.cpus:
            high = max(high, int(np.searchsorted(self.cpu_floor, self.cpu[i] + self.limit, side="left")))
        after = np.arange(i + 1, high)
        for w in np.flatnonzero(self.bits[i])[::-1]:
            after = after[(self.missing[after, w] & self.bits[i, w]) == 0]
        work = self.acc[after] - self.acc[i]
        if self.accs:
            possible = (
                (work < self.limit)
                & (self.unsupported[after] == self.unsupported[i])
                & fits(self.size[after] - self.size[i], self.form.problem.memory_bytes)
            )
            targets = after[possible]
            load = work[possible] + self._transfers(i, targets)
            keep = load < self.limit
            self._offer(i, targets[keep], load[keep], cpu=0)
        if self.cpus:
            load = self.cpu[after] - self.cpu[i]
            keep = load < self.limit
            self._offer(i, after[keep], load[keep], cpu=1)

    def _transfers(self, i: int, after: np.ndarray) -> np.ndarray:
        """[after] cost of the nets that the part between ideal i and each later ideal holds in part."""
        touched = np.append(((self.pins & self.bits[i]) != 0).any(axis=1), False)
        cost = self.cut[after] - (self.frontier_cost[after] * touched[self.frontier[after]]).sum(axis=1)
        for e in self.frontier[i]:
            if e == len(self.pins):
                break
            pins_left = self.pins[e] & self.missing[i]
            reached = np.zeros(len(after), dtype=bool)
            for w in np.flatnonzero(pins_left):
                reached |= (self.bits[after, w] & pins_left[w]) != 0
            cost += self.cost[e] * reached
        return np.asarray(cost)

    def _offer(self, i: int, targets: np.ndarray, load: np.ndarray, cpu: int) -> None:
        """Lower the values of the target ideals: a CPU (1) or an accelerator (0) with these loads behind ideal i."""
        before = self.value[i, : self.cpus + 1 - cpu, : self.accs + cpu]
        to = slice(cpu, None), slice(1 - cpu, None)
        offered = np.maximum(before[None], load[:, None, None])
        rows, c, a = np.nonzero((offered < self.value[(targets, *to)]) & self.reach[(targets, *to)])
        at = targets[rows], c + cpu, a + 1 - cpu
        self.value[at], self.parent[at], self.by_cpu[at] = offered[rows, c, a], i, cpu

    def _trace(self) -> tuple[np.ndarray | None, float]:
        last = len(self.bits) - 1
        best = int(np.argmin(self.value[last]))
        c, a = divmod(best, self.accs + 1)
        load = float(self.value[last, c, a])
        if not load < self.limit:
            return None, math.inf
        device = np.full(self.form.groups, -1, dtype=np.int64)
        i = last
        while i != 0:
            before = int(self.parent[i, c, a])
            part = self.bits[i] & ~self.bits[before]
            members = np.flatnonzero(np.unpackbits(part.view(np.uint8), bitorder="little")[: self.form.groups])
            cpu = bool(self.by_cpu[i, c, a])
            c, a = (c - 1, a) if cpu else (c, a - 1)
            device[members] = self.accs + c if cpu else a
            i = before
        return device, load / self.scale


def _weigh(ideals: np.ndarray, columns: np.ndarray, deadline: Deadline) -> np.ndarray:
    """float64 [ideals, columns] sums of some columns over the members of each ideal."""
    step, parts = 4096, []
    for start in range(0, len(ideals), step):
        deadline.check()
        rows = np.ascontiguousarray(ideals[start : start + step]).view(np.uint8)
        parts.append(np.unpackbits(rows, axis=1, count=len(columns), bitorder="little").astype(float) @ columns)
    return np.concatenate(parts) if parts else np.zeros((0, columns.shape[1]))


_SHARE = 0.3
MOST_IDEALS = 400_000
"""With more ideals than this the proof is left to CP-SAT."""


def solve_by_ideals(search: SearchState) -> None:
    """Find and prove the best contiguous plan; for a non-contiguous problem it is a good plan without proof."""
    problem: MaxLoadProblem = search.problem
    search.space = space(problem)
    prove(search, simple_bound(form_of(problem)))
    unreduced = form_of(replace(problem, contiguous=True))
    form = glued(reduce_form(unreduced, search.objective, search.deadline))
    lines = topological_lines(form.groups, form.arcs)
    # All orders together may run out of time; a single one is much quicker and gives a plan at least.
    for some_lines in (lines[:1], lines):
        _offer_best_chain(search, form, prefix_ideals(form.groups, some_lines))
    if search.settled:
        return
    form = glued(reduce_form(unreduced, search.objective, search.deadline))
    ideals = enumerate_ideals(form.groups, form.arcs, MOST_IDEALS, check=search.deadline.check)
    if ideals is None:
        return
    search.count(groups=form.groups, ideals=len(ideals))
    known_load = search.objective
    load_ms = _offer_best_chain(search, form, ideals)
    if problem.contiguous and unreduced.ordered.all():
        prove(search, min(load_ms, known_load))


def _offer_best_chain(search: SearchState, form: MaxLoadForm, ideals: np.ndarray) -> float:
    """Offer the best chain through some ideals if it is better than the best plan; its load in ms, or infinity."""
    device, load_ms = best_chain(form, ideals, search.objective, search.deadline)
    if device is not None:
        search.offer(canonical(search.problem, form.decision(device)))
    return load_ms


def glued(form: MaxLoadForm) -> MaxLoadForm:
    """The form with its loose groups merged, one by one, into their costliest neighbour; may exclude all best plans.

    The next group to merge is the one with the largest cost of nets shared with an ordered or merged neighbour.
    """
    into = np.arange(form.groups, dtype=np.int64)
    shared: dict[int, dict[int, float]] = {v: {} for v in range(form.groups) if not form.ordered[v]}
    for pins, cost in zip(form.nets, form.cost.tolist(), strict=True):
        for v in pins:
            for u in pins:
                if v in shared and u != v:
                    shared[v][u] = shared[v].get(u, 0.0) + cost
    placed = form.ordered.copy()
    while not placed.all():
        links = [(-c, v, u) for v, costs in shared.items() if not placed[v] for u, c in costs.items() if placed[u]]
        # A group without links goes to the first group that is placed, or stays if there is none.
        _, v, u = min(links, default=(0.0, int(np.argmin(placed)), int(np.argmax(placed))))
        into[v] = into[u]
        placed[v] = True
    return merge_groups(form, into)


PARTITION_SOLVERS.register(
    "max-load-ideals",
    PartitionSolver(
        MaxLoadProblem, solve_by_ideals, turn=1, share=lambda problem: 1.0 if problem.contiguous else _SHARE
    ),
)

"""Dynamic programme over ideals for contiguous max-load plans, with proof.

First the prefixes of a few topological orders give a good plan; then all ideals, of which the plan's load leaves only
narrow windows, prove it optimal or better it. Two cases need more: where there are too many ideals, and where
backward nodes without forward twin leave a gap between the bound (each device takes those that suit it) and the best
plan found (each is on one device only). Both are handed to CP-SAT with the plan and the bound so far.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from planner.graph.ideals import enumerate_ideals, prefix_ideals, topological_lines
from planner.solvers.partition import (
    PARTITION_SOLVERS,
    RELATIVE_TOLERANCE,
    Deadline,
    OutOfTime,
    PartitionSolver,
    Progress,
    Result,
)
from planner.solvers.partition._max_load_chain import Chain, best_chain
from planner.solvers.partition._max_load_form import (
    Form,
    canonical,
    form_of,
    merge_groups,
    reduce_form,
    result,
    simple_bound,
    usable,
)
from planner.solvers.partition.cp_sat_max_load import solve_by_cp_sat
from planner.solvers.partition.local_search_max_load import improve
from planner.space.partition.max_load import MaxLoadDecision, MaxLoadProblem

NAME = "max-load-ideals"
_SETTLING_PATIENCE = 4
_LONG = 800
"""Groups from which on a first plan comes from the prefixes of a single order."""
MOST_IDEALS = 400_000
"""With more ideals than this the programme is left to CP-SAT."""


def solve_by_ideals(
    problem: MaxLoadProblem,
    *,
    time_limit_s: float,
    start: MaxLoadDecision | None = None,
    progress: Progress | None = None,
    most_ideals: int = MOST_IDEALS,
) -> Result:
    """The best contiguous plan; for a problem that does not ask for contiguity, a good plan of it.

    Args:
        problem: the problem.
        time_limit_s: stop after about this long.
        start: a feasible plan to begin with.
        progress: called when incumbent or bound improve.
        most_ideals: leave it to CP-SAT when there are more ideals.
    """
    deadline = Deadline(time_limit_s)
    asked = problem
    if not problem.contiguous:
        problem = chained(problem)
    search = _Search(problem, deadline, progress)
    search.offer(start)
    for _, plan in problem.trivial():
        search.offer(plan)
    search.by_prefixes()
    if not search.proven and not search.by_all_ideals(most_ideals):
        search.by_cp_sat()
    if asked is problem:
        return search.result()
    best = canonical(asked, search.best) if search.best is not None else None
    return result(asked, best, simple_bound(form_of(asked)), NAME, statistics=search.statistics)


def chained(problem: MaxLoadProblem) -> MaxLoadProblem:
    """The same problem, for contiguous plans."""
    return replace(problem, contiguous=True)


class _Search:
    """The incumbent and the bound of one run."""

    def __init__(self, problem: MaxLoadProblem, deadline: Deadline, progress: Progress | None) -> None:
        self.problem, self.deadline, self.progress = problem, deadline, progress
        self.form = form_of(problem)
        self.bound = simple_bound(self.form)
        self.best: MaxLoadDecision | None = None
        self.load = math.inf
        self.infeasible = False
        self.statistics: dict[str, int] = {}

    @property
    def proven(self) -> bool:
        return self.infeasible or self.bound >= self.load * (1 - RELATIVE_TOLERANCE)

    def offer(self, plan: MaxLoadDecision | None) -> None:
        """Take a plan if it is feasible and better."""
        found, load = usable(self.problem, plan)
        if found is not None and load < self.load:
            self.best, self.load = found, load
            self.say()

    def say(self) -> None:
        if self.progress:
            self.progress(NAME, self.load, min(self.bound, self.load))

    def by_prefixes(self) -> None:
        """A plan from the prefixes of a few orders, loose groups glued to neighbours first and let free after."""
        form = reduce_form(self.form, self.load, self.deadline)
        glued = merge_groups(form, glue(form))
        lines = topological_lines(glued.groups, glued.arcs)
        if glued.groups > _LONG:
            # All orders together may take longer than there is time; one by itself takes a small part of that.
            self._take(glued, best_chain(glued, prefix_ideals(glued.groups, lines[:1]), self.load, self.deadline))
        chain = best_chain(glued, prefix_ideals(glued.groups, lines), self.load, self.deadline)
        self._take(glued, chain)
        self._settle()

    def by_all_ideals(self, most: int) -> bool:
        """Bound and plan from all ideals; false when a gap is left."""
        form = reduce_form(self.form, self.load, self.deadline)
        self.statistics["groups"] = form.groups
        try:
            ideals = enumerate_ideals(form.groups, form.arcs, most, only=form.ordered, check=self.deadline.check)
        except OutOfTime:
            return False
        if ideals is None:
            return False
        self.statistics["ideals"] = len(ideals)
        chain = best_chain(form, ideals, self.load, self.deadline)
        self.statistics["pairs"] = chain.pairs
        if not chain.complete:
            return True
        self.infeasible = chain.device_of_group is None and self.best is None
        self.bound = max(self.bound, min(chain.load_ms, self.load))
        self.say()
        if chain.device_of_group is not None and not form.ordered.all():
            seated = form.decision(_seated(form, chain.device_of_group))
            self.offer(improve(self.problem, seated, self.deadline, bound=self.bound, patience=_SETTLING_PATIENCE))
        else:
            self._take(form, chain)
        return self.proven

    def by_cp_sat(self) -> None:
        """What remains, by CP-SAT."""
        if self.deadline.passed:
            return
        left_s = self.deadline.left_s
        found = solve_by_cp_sat(
            self.problem, time_limit_s=left_s, start=self.best, progress=self.progress, bound=self.bound
        )  # fmt: skip
        self.statistics |= {f"cp_sat_{name}": count for name, count in found.statistics.items()}
        self.offer(found.decision)
        self.bound = max(self.bound, min(found.bound, self.load))
        self.infeasible = found.decision is None and math.isinf(found.bound)

    def _take(self, form: Form, chain: Chain) -> None:
        if chain.device_of_group is not None:
            self.offer(form.decision(chain.device_of_group))

    def _settle(self) -> None:
        """Move the loose groups of the incumbent to where they are best."""
        if self.best is not None and not self.form.ordered.all():
            self.offer(improve(self.problem, self.best, self.deadline, bound=self.bound, patience=_SETTLING_PATIENCE))

    def result(self) -> Result:
        bound = math.inf if self.infeasible else min(self.bound, self.load)
        best = canonical(self.problem, self.best) if self.best is not None else None
        return result(self.problem, best, bound, NAME, statistics=self.statistics)


def glue(form: Form) -> np.ndarray:
    """Each group that no order binds into the neighbour it shares the dearest nets with, step by step; int64 [g]."""
    into = np.arange(form.groups, dtype=np.int64)
    shared: dict[int, dict[int, float]] = {v: {} for v in range(form.groups) if not form.ordered[v]}
    for pins, cost in zip(form.nets, form.cost.tolist(), strict=True):
        for v in pins:
            for u in pins:
                if v in shared and u != v:
                    shared[v][u] = shared[v].get(u, 0.0) + cost
    fixed = form.ordered.copy()
    while True:
        links = [(c, v, u) for v, near in shared.items() if not fixed[v] for u, c in near.items() if fixed[u]]
        if not links:
            break
        _, v, u = min(links, key=lambda link: (-link[0], link[1], link[2]))
        into[v] = into[u]
        fixed[v] = True
    rest = np.flatnonzero(~fixed)
    if len(rest):
        into[rest] = into[np.flatnonzero(form.ordered)[0]] if form.ordered.any() else rest[0]
    return into


def _seated(form: Form, device_of_group: tuple[int, ...]) -> tuple[int, ...]:
    """A chain's devices with every loose group on the device of the neighbour it is glued to."""
    device = np.array(device_of_group, dtype=np.int64)
    device = device[glue(form)]
    device[device < 0] = 0
    return tuple(int(d) for d in device)


PARTITION_SOLVERS.register(NAME, PartitionSolver((MaxLoadProblem,), exact=True, run=solve_by_ideals))

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
    Incumbent,
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
    for plan in (start, *(plan for _, plan in problem.trivial())):
        search.best.offer(plan)
    search.by_prefixes()
    if not search.proven and not search.by_all_ideals(most_ideals):
        search.by_cp_sat()
    if asked is problem:
        return search.result()
    best = canonical(asked, search.best.decision) if search.best.decision is not None else None
    return result(asked, best, simple_bound(form_of(asked)), NAME, statistics=search.statistics)


def chained(problem: MaxLoadProblem) -> MaxLoadProblem:
    """The same problem, for contiguous plans."""
    return replace(problem, contiguous=True)


class _Search:
    """The incumbent and the bound of one run."""

    def __init__(self, problem: MaxLoadProblem, deadline: Deadline, progress: Progress | None) -> None:
        self.problem, self.deadline = problem, deadline
        self.form = form_of(problem)
        self.best = Incumbent(problem, NAME, progress)
        self.best.bound = simple_bound(self.form)
        self.infeasible = False
        self.statistics: dict[str, int] = {}

    @property
    def proven(self) -> bool:
        return self.infeasible or self.best.bound >= self.best.objective * (1 - RELATIVE_TOLERANCE)

    def by_prefixes(self) -> None:
        """A plan from the prefixes of a few orders, loose groups glued to neighbours first and let free after."""
        form = reduce_form(self.form, self.best.objective, self.deadline)
        glued = merge_groups(form, glue(form))
        lines = topological_lines(glued.groups, glued.arcs)
        if glued.groups > _LONG:
            # All orders together may take longer than there is time; one by itself takes a small part of that.
            self._take(
                glued, best_chain(glued, prefix_ideals(glued.groups, lines[:1]), self.best.objective, self.deadline)
            )
        chain = best_chain(glued, prefix_ideals(glued.groups, lines), self.best.objective, self.deadline)
        self._take(glued, chain)
        self._settle()

    def by_all_ideals(self, most: int) -> bool:
        """Bound and plan from all ideals; false when a gap is left."""
        form = reduce_form(self.form, self.best.objective, self.deadline)
        self.statistics["groups"] = form.groups
        try:
            ideals = enumerate_ideals(form.groups, form.arcs, most, only=form.ordered, check=self.deadline.check)
        except OutOfTime:
            return False
        if ideals is None:
            return False
        self.statistics["ideals"] = len(ideals)
        chain = best_chain(form, ideals, self.best.objective, self.deadline)
        self.statistics["pairs"] = chain.pairs
        if not chain.complete:
            return True
        self.infeasible = chain.device_of_group is None and self.best.decision is None
        self.best.bound = max(self.best.bound, min(chain.load_ms, self.best.objective))
        self.best.report()
        if chain.device_of_group is not None and not form.ordered.all():
            seated = form.decision(_seated(form, chain.device_of_group))
            self._improve(seated)
        else:
            self._take(form, chain)
        return self.proven

    def by_cp_sat(self) -> None:
        """What remains, by CP-SAT."""
        if self.deadline.passed:
            return
        best, left_s = self.best, self.deadline.left_s
        found = solve_by_cp_sat(
            self.problem, time_limit_s=left_s, start=best.decision, progress=best.progress, bound=best.bound
        )
        self.statistics |= {f"cp_sat_{name}": count for name, count in found.statistics.items()}
        self.best.offer(found.decision)
        self.best.bound = max(self.best.bound, min(found.bound, self.best.objective))
        self.infeasible = found.decision is None and math.isinf(found.bound)

    def _take(self, form: Form, chain: Chain) -> None:
        if chain.device_of_group is not None:
            self.best.offer(form.decision(chain.device_of_group))

    def _settle(self) -> None:
        """Move the loose groups of the incumbent to where they are best."""
        if self.best.decision is not None and not self.form.ordered.all():
            self._improve(self.best.decision)

    def _improve(self, plan: MaxLoadDecision) -> None:
        bound, patience = self.best.bound, _SETTLING_PATIENCE
        self.best.offer(improve(self.problem, plan, self.deadline, bound=bound, patience=patience))

    def result(self) -> Result:
        bound = math.inf if self.infeasible else min(self.best.bound, self.best.objective)
        best = canonical(self.problem, self.best.decision) if self.best.decision is not None else None
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

"""Dynamic programme over ideals for contiguous max-load plans, with proof.

First the prefixes of a few topological orders give a good plan; then all ideals, of which the plan's load leaves only
narrow windows, prove it optimal or better it. Two cases need more: where there are too many ideals, and where
backward nodes without forward twin leave a gap between the bound (each device takes those that suit it) and the best
plan found (each is on one device only). Both are handed to CP-SAT with the plan and the bound so far.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.graph.ideals import enumerate_ideals, prefix_ideals, topological_lines
from planner.solvers.partition import PARTITION_SOLVERS, PartitionSolver, Search
from planner.solvers.partition._max_load_chain import Chain, best_chain
from planner.solvers.partition._max_load_form import (
    Form,
    canonical,
    form_of,
    merge_groups,
    prove,
    reduce_form,
    simple_bound,
    space,
)
from planner.solvers.partition.local_search_max_load import improve
from planner.space.partition import MaxLoadProblem

_SHARE = 0.3
_SETTLING_PATIENCE = 4
_LONG = 800
"""Groups from which on a first plan comes from the prefixes of a single order."""
MOST_IDEALS = 400_000
"""With more ideals than this the programme is left to CP-SAT."""


def solve_by_ideals(search: Search) -> None:
    """The best contiguous plan; for a problem that does not ask for contiguity, a good plan of it."""
    problem: MaxLoadProblem = search.problem
    search.space = space(problem)
    search.offer_all((search.solver, plan) for _, plan in problem.trivial())
    prove(search, simple_bound(form_of(problem)))
    if problem.contiguous:
        _by_chains(search)
        return
    chained = Search(replace(problem, contiguous=True), search.deadline.left_s)
    chained.offer(search.decision)
    try:
        _by_chains(chained)
    finally:
        search.offer(chained.decision)


def _by_chains(search: Search) -> None:
    """A plan from the prefixes of a few orders, loose groups glued to neighbours first and let free after; then from
    all ideals."""
    problem: MaxLoadProblem = search.problem
    whole = form_of(problem)
    form = reduce_form(whole, search.objective, search.deadline)
    glued = merge_groups(form, glue(form))
    lines = topological_lines(glued.groups, glued.arcs)
    if glued.groups > _LONG:
        # All orders together may take longer than there is time; one by itself takes a small part of that.
        first = prefix_ideals(glued.groups, lines[:1])
        _take(search, glued, best_chain(glued, first, search.objective, search.deadline))
    few = prefix_ideals(glued.groups, lines)
    _take(search, glued, best_chain(glued, few, search.objective, search.deadline))
    if search.decision is not None and not whole.ordered.all():
        # Move the loose groups to where they are best.
        improve(search, search.decision, patience=_SETTLING_PATIENCE)
    if not search.settled:
        _by_all_ideals(search, reduce_form(whole, search.objective, search.deadline))


def _by_all_ideals(search: Search, form: Form) -> None:
    """Bound and plan from all ideals, unless there are too many."""
    search.count(groups=form.groups)
    ideals = enumerate_ideals(form.groups, form.arcs, MOST_IDEALS, only=form.ordered, check=search.deadline.check)
    if ideals is None:
        return
    search.count(ideals=len(ideals))
    chain = best_chain(form, ideals, search.objective, search.deadline)
    search.count(pairs=chain.pairs)
    if not chain.complete:
        return
    known = search.objective
    loose = not form.ordered.all()
    if chain.device_of_group is not None and loose:
        seated = form.decision(_seated(form, chain.device_of_group))
        improve(search, seated, patience=_SETTLING_PATIENCE)
    elif not loose:
        _take(search, form, chain)
    prove(search, min(chain.load_ms, known))


def _take(search: Search, form: Form, chain: Chain) -> None:
    if chain.device_of_group is not None:
        search.offer(canonical(search.problem, form.decision(chain.device_of_group)))


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


PARTITION_SOLVERS.register(
    "max-load-ideals",
    PartitionSolver(
        MaxLoadProblem, solve_by_ideals, turn=1, share=lambda problem: 1.0 if problem.contiguous else _SHARE
    ),
)

"""Latency by trying every placement and every order: the oracle of the other solvers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from planner.errors import UsageError
from planner.solvers.partition import Progress, Result
from planner.space.partition import LatencyDecision, LatencyProblem
from tests.oracles.every_plan import best_of

_MOST_NODES = 6


def solve_latency_by_force(
    problem: LatencyProblem, *, time_limit_s: float = 60.0, start: object = None, progress: Progress | None = None
) -> Result:
    """Judge every placement with every topological order.

    Raises:
        UsageError: more nodes than can be tried.
    """
    del start
    if problem.nodes > _MOST_NODES:
        message = f"brute force takes {_MOST_NODES} nodes at most, the problem has {problem.nodes}"
        raise UsageError(message, hint="use the solver 'latency-cp-sat'")
    orders = list(_orders(problem, ()))
    plans = (
        LatencyDecision(places, order)
        for places in itertools.product(range(problem.devices), repeat=problem.nodes)
        if problem.judge(LatencyDecision(places, orders[0])).feasible
        for order in orders
    )
    return best_of(problem, plans, solver="latency-brute-force", time_limit_s=time_limit_s, progress=progress)


def _orders(problem: LatencyProblem, done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All topological orders."""
    if len(done) == problem.nodes:
        yield done
        return
    edges = problem.edges.tolist()
    for v in range(problem.nodes):
        if v not in done and all(u in done for u, target in edges if target == v):
            yield from _orders(problem, (*done, v))

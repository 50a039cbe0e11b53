"""Piper's problem by trying everything: the oracle of the other solvers, for a handful of nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from planner.errors import UsageError
from planner.memory import fits
from planner.solvers.partition import Deadline, Progress, Result
from planner.space.partition import PiperDecision, PiperProblem, PiperStage, stage_figures

_MOST_NODES = 7


def solve_piper_by_force(
    problem: PiperProblem, *, time_limit_s: float = 60.0, start: object = None, progress: Progress | None = None
) -> Result:
    """Every ordered partition, degrees and choices; exponential in the nodes.

    Raises:
        UsageError: more nodes than can be tried.
    """
    del start, progress
    if problem.node_count > _MOST_NODES:
        message = f"brute force takes {_MOST_NODES} nodes at most, the problem has {problem.node_count}"
        raise UsageError(message, hint="use the solver 'piper-dp'")
    deadline = Deadline(time_limit_s)
    best, found, tried, complete = float("inf"), None, 0, True
    for stages in _ordered_partitions(problem, frozenset(range(problem.node_count))):
        if deadline.passed:
            complete = False
            break
        for degrees in itertools.product(_degrees(problem), repeat=len(stages)):
            tried += 1
            decision = _fill(problem, stages, degrees)
            if decision is not None:
                verdict = problem.judge(decision)
                if verdict.feasible and verdict.objective < best:
                    best, found = verdict.objective, decision
    bound = best if complete else 0.0
    return Result(found, best, bound, "piper-brute-force", "everything", {"tried": tried})


def _degrees(problem: PiperProblem) -> list[tuple[int, int]]:
    """(tensor, data) degrees a stage may have."""
    return [
        (t, d)
        for t in problem.tensor_degrees
        for d in range(1, min(problem.devices // t, problem.batch) + 1)
        if problem.batch % d == 0
    ]


def _ordered_partitions(problem: PiperProblem, left: frozenset[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All ways to cut the nodes `left` into stages in an order that no edge runs against."""
    if not left:
        yield ()
        return
    edges = problem.edges.tolist()
    for size in range(1, len(left) + 1):
        for nodes in itertools.combinations(sorted(left), size):
            if all(u in nodes for u, v in edges if v in nodes and u in left):
                for rest in _ordered_partitions(problem, left - set(nodes)):
                    yield (nodes, *rest)


def _fill(
    problem: PiperProblem, stages: tuple[tuple[int, ...], ...], degrees: tuple[tuple[int, int], ...]
) -> PiperDecision | None:
    """The best choices for given stages and degrees; None when some stage has none that fit."""
    if sum(t * d for t, d in degrees) > problem.devices:
        return None
    filled = []
    for i, (nodes, (t, d)) in enumerate(zip(stages, degrees, strict=True)):
        in_flight = -(-sum(data for _, data in degrees[i:]) // d)
        best: tuple[float, PiperStage] | None = None
        for choices in itertools.product(*(range(len(problem.options(v, t))) for v in nodes)):
            stage = PiperStage(nodes, t, d, choices)
            seconds, needed = stage_figures(problem, stage, in_flight)
            if fits(needed, problem.memory_bytes) and (best is None or seconds < best[0]):
                best = seconds, stage
        if best is None:
            return None
        filled.append(best[1])
    return PiperDecision(tuple(filled))

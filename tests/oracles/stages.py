"""Every decision of a problem, priced by the judge alone: the oracle that other solvers are tested against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from planner.solvers import Judge, Solution
from planner.solvers.types import Measure
from planner.space import Configuration, Evaluation, StageProblem


def decisions(problem: StageProblem) -> Iterator[Configuration]:
    """All decisions of the problem, feasible or not; their number grows exponentially with blocks."""
    replicas = problem.replicas.tolist()
    recompute = range(len(problem.ways))
    most = min(problem.blocks, problem.slice_devices, problem.max_stages or problem.blocks)
    for count in range(1, most + 1):
        for cuts in itertools.combinations(range(1, problem.blocks), count - 1):
            ranges = list(itertools.pairwise((0, *cuts, problem.blocks)))
            for chosen in itertools.product(range(len(replicas)), repeat=count):
                taken = [replicas[o] for o in chosen]
                if sum(taken) > problem.slice_devices or (problem.uniform and len(set(taken)) > 1):
                    continue
                for again in itertools.product(recompute, repeat=count):
                    yield problem.decision(
                        tuple(
                            problem.stage(start, stop, o, way)
                            for (start, stop), o, way in zip(ranges, chosen, again, strict=True)
                        )
                    )


def solve(
    problem: StageProblem,
    judge: Judge,
    *,
    cutoff_s: float = math.inf,
    keep: int = 8,
    measure: Measure = lambda _, evaluation: evaluation.iteration_s,
) -> Solution:
    """Enumerate and judge; exact, for a handful of blocks and devices.

    Args:
        problem: the problem.
        judge: prices a decision.
        cutoff_s: only decisions below it are kept.
        keep: how many at the most.
        measure: the time that is minimised; by default the closed form.
    """
    priced: list[tuple[float, Configuration, Evaluation]] = []
    for decision in decisions(problem):
        evaluation = judge(decision)
        if evaluation.feasible:
            priced.append((measure(decision, evaluation), decision, evaluation))
    priced.sort(key=lambda entry: entry[0])
    bound_s = priced[0][0] if priced else math.inf
    found = tuple((decision, verdict) for seconds, decision, verdict in priced[:keep] if seconds < cutoff_s)
    return Solution(found, bound_s)

"""Every decision of a problem, priced by the judge alone: the oracle that other solvers are tested against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from planner.solvers._registry import SOLVERS
from planner.solvers.types import Judge, Solution
from planner.space.problem import StageProblem
from planner.space.types import Decision, Evaluation


def decisions(problem: StageProblem) -> Iterator[Decision]:
    """All decisions of the problem, feasible or not; their number grows exponentially with blocks."""
    replicas = problem.replicas.tolist()
    recompute = {"never": (False,), "always": (True,), "auto": (False, True)}[problem.recompute]
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
                            problem.stage(start, stop, o, flag)
                            for (start, stop), o, flag in zip(ranges, chosen, again, strict=True)
                        )
                    )


def solve(problem: StageProblem, judge: Judge, *, cutoff_s: float = math.inf, keep: int = 8) -> Solution:
    """Enumerate and judge; exact, for a handful of blocks and devices."""
    priced: list[tuple[Decision, Evaluation]] = []
    states = 0
    for decision in decisions(problem):
        states += 1
        evaluation = judge(decision)
        if evaluation.feasible:
            priced.append((decision, evaluation))
    priced.sort(key=lambda entry: entry[1].iteration_s)
    bound_s = priced[0][1].iteration_s if priced else math.inf
    found = tuple(entry for entry in priced[:keep] if entry[1].iteration_s < cutoff_s)
    return Solution(found, bound_s, states)


SOLVERS.register("brute_force", solve)

"""Tries every hierarchical plan of a small `PipeDreamProblem`: the oracle of the exact solvers."""

from __future__ import annotations

from collections.abc import Iterator

from planner.solvers.partition import Progress, Result
from planner.space.partition import PipeDreamProblem, ReplicatedStage
from tests.oracles.every_cut import Cut, every_cut
from tests.oracles.every_plan import best_of

NAME = "hierarchical-brute"
Plan = tuple[ReplicatedStage, ...]


def try_everything(
    problem: PipeDreamProblem,
    *,
    time_limit_s: float = 60.0,
    start: Plan | None = None,
    progress: Progress | None = None,
) -> Result:
    """The best of all plans; exponential in layers and machines."""
    cuts = every_cut(problem.layers)
    plans = _runs(problem, cuts, len(problem.machines) - 1, cuts[0], cuts[-1])
    every = [start, *plans] if start else plans
    return best_of(problem, every, solver=NAME, time_limit_s=time_limit_s, progress=progress)


def _runs(problem: PipeDreamProblem, cuts: list[Cut], level: int, start: Cut, stop: Cut) -> Iterator[Plan]:
    """All ways to run the layers between two cuts on one unit of the level above."""

    def rest(before: Cut, units: int) -> Iterator[Plan]:
        if before == stop:
            if units == 0 or problem.use_fewer:
                yield ()
            return
        for cut in cuts:
            if before < cut <= stop:
                for replicas in range(1, units + 1 if problem.replicate else min(units, 1) + 1):
                    layers = tuple(sorted(cut - before))
                    inners = _runs(problem, cuts, level - 1, before, cut) if level else iter([()])
                    for inner in inners:
                        for later in rest(cut, units - replicas):
                            yield (ReplicatedStage(layers, replicas, inner), *later)

    return rest(start, problem.machines[level])

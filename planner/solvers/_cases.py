"""Problems that a search over labels cannot hold at once, as several that it can."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from planner.solvers._pins import by_count
from planner.space.problem import StageProblem


def cases(problem: StageProblem) -> tuple[StageProblem, ...]:
    """The problem, or one for each number of replicas and of stages that the search has to know beforehand."""
    return tuple(case for alike in by_replicas(problem) for case in by_count(alike))


def by_replicas(problem: StageProblem) -> tuple[StageProblem, ...]:
    """One problem for each number of replicas, where all stages have the same."""
    counts = np.unique(problem.replicas)
    if not problem.uniform or len(counts) == 1:
        return (problem,)
    return tuple(_of_options(problem, np.flatnonzero(problem.replicas == count)) for count in counts)


def _of_options(problem: StageProblem, options: np.ndarray) -> StageProblem:
    """The problem with some of its options only."""
    names = ("replicas", "shardings", "place", "in_flight", "passing", "filling", "tied_class")
    kept = {name: getattr(problem, name)[options] for name in names}
    return replace(
        problem, **kept, link=problem.link[np.ix_(options, options)], tied_s=problem.tied_s[:, options], uniform=False
    )

"""Types that solvers take and return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.space.types import BlockCosts, Candidate, Certificate, Configuration, Evaluation

CostsFor = Callable[[int], BlockCosts]
"""Block costs by micro-batch size; the caller caches them."""

Judge = Callable[[Configuration], Evaluation]
"""Evaluates a configuration independently of the solvers: `planner.space.evaluate` with its inputs filled in."""

Measure = Callable[[Configuration, Evaluation], float]
"""Simulated iteration time of an evaluated configuration, in seconds."""

KnownPlan = tuple[Candidate, Sequence[BlockCosts]]
"""A simulated candidate, and the costs of its stages' shardings."""

Progress = Callable[[int, int, float, float], None]
"""Called with problems done, problems in total, best time so far and bound, both in seconds."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Result of solving one problem.

    Attributes:
        decisions: distinct feasible configurations below the cutoff with the judge's evaluations, fastest first.
        bound_s: lower bound on the time of any configuration of the problem; infinite if none is feasible.
    """

    decisions: tuple[tuple[Configuration, Evaluation], ...]
    bound_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a search.

    Attributes:
        best: the fastest configuration found.
        runners_up: other feasible, distinct configurations that came close, fastest first; not exhaustive.
        trivial: plans that need no search, feasible or not: one device, data parallel, even split.
        certificate: bound and gap proven for `best`.
    """

    best: Candidate
    runners_up: tuple[Candidate, ...]
    trivial: tuple[Candidate, ...]
    certificate: Certificate

    def without(self, decision: Configuration) -> Answer | None:
        """The answer without one of its configurations; None if no other is left."""
        left = [candidate for candidate in (self.best, *self.runners_up) if candidate.decision != decision]
        trivial = tuple(candidate for candidate in self.trivial if candidate.decision != decision)
        return replace(self, best=left[0], runners_up=tuple(left[1:]), trivial=trivial) if left else None

"""What solvers take and give, and all of them by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from planner.registry import Registry
from planner.space.problem import StageProblem
from planner.space.types import BlockCosts, Candidate, Certificate, Configuration, Evaluation

Judge = Callable[[Configuration], Evaluation]
"""Prices a decision with code that no solver shares: `planner.space.evaluate` with its inputs filled in."""

Measure = Callable[[Configuration, Evaluation], float]
"""Seconds of an iteration of a judged decision when it is played out."""

Progress = Callable[[int, int, float, float], None]
"""Called with problems done, problems in all, the best seconds so far, and the bound in seconds."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver found out about one problem.

    Attributes:
        found: feasible decisions faster than the cutoff with the judge's verdicts, fastest first, no two alike.
        bound_s: no decision of the problem is faster; infinite when none is feasible.
        states: partial decisions that were looked at.
    """

    found: tuple[tuple[Configuration, Evaluation], ...]
    bound_s: float
    states: int = 0


class Solver(Protocol):
    """A way to solve a `StageProblem`."""

    def __call__(self, problem: StageProblem, judge: Judge, *, cutoff_s: float, keep: int) -> Solution:
        """Find the fastest feasible decision.

        Args:
            problem: what can be decided.
            judge: prices complete decisions.
            cutoff_s: only decisions faster than this matter; where there is none, the bound is at least this.
            keep: most decisions to return.
        """
        ...


Key = tuple[object, ...]
"""Names what a floor stands for; the search hands it back."""


Refined = tuple[Sequence[tuple[BlockCosts, Key]], Sequence[BlockCosts], BlockCosts | None]
"""Floors that are closer, and shardings that are worked out."""


class Shardings(Protocol):
    """The ways to share operators among several ranks that a search may ask for, worked out when it does."""

    def in_words(self) -> str:
        """Which they are, as part of what a bound speaks of."""

    def floors(self, micro_batch: int) -> Sequence[tuple[BlockCosts, Key]]:
        """By mesh, what no sharding on it is cheaper than."""

    def even_split(self, micro_batch: int) -> Sequence[BlockCosts]:
        """A few shardings that a first plan can be made of, and with each all that stages can choose beside it."""

    def refine(self, micro_batch: int, key: Key) -> tuple[Sequence[tuple[BlockCosts, Key]], Sequence[BlockCosts]]:
        """What a floor stands for: closer floors, or shardings worked out, each with a number of its own."""

    def least(self, micro_batch: int, key: Key) -> BlockCosts | None:
        """What no sharding that a floor stands for is below, with a negative number; None where those that were worked
        out are all that could be best."""

    def finer(self, micro_batch: int, number: int) -> Sequence[BlockCosts]:
        """More shardings that can be mixed with one, where the choice matters most."""


class Outcome(StrEnum):
    """How a problem of the search was settled."""

    SOLVED = "solved"
    """Its best decision is known, or that none is better than the best known when its turn came."""

    BOUNDED = "bounded"
    """Its compute alone, in as few stages as memory allows, takes longer than the best known decision."""

    DOMINATED = "dominated"
    """Another problem has every decision of this one at no more time and memory."""

    INFEASIBLE = "infeasible"
    """Nothing fits."""


@dataclass(frozen=True, slots=True)
class Explored:
    """One problem of the search and what became of it.

    Attributes:
        micro_batch, copies, schedule, zero: which problem.
        outcome: how it was settled.
        bound_s: none of its decisions is faster; infinite when nothing fits.
        best_s: its fastest decision where one was found, else infinite.
        states: partial decisions that were looked at.
        ranks, sharding: how many devices share every operator, and in which way.
    """

    micro_batch: int
    copies: int
    schedule: str
    zero: int
    outcome: Outcome
    bound_s: float
    best_s: float
    states: int
    ranks: int = 1
    sharding: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a search.

    Attributes:
        best: the fastest decision that was found.
        runners_up: other decisions that came close, fastest first; all feasible, no two alike, not an exhaustive list.
        trivial: the plans one would write down without a search, feasible or not: one device, data parallel, even
            split.
        certificate: what is proven about `best`.
        explored: every problem, in the order in which they were settled.
    """

    best: Candidate
    runners_up: tuple[Candidate, ...]
    trivial: tuple[Candidate, ...]
    certificate: Certificate
    explored: tuple[Explored, ...]


SOLVERS: Registry[Solver] = Registry("planner.solvers", "solver")
"""A module of this package registers its own."""

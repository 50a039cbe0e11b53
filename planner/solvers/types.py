"""What solvers take and give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

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
    """

    found: tuple[tuple[Configuration, Evaluation], ...]
    bound_s: float


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


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a search.

    Attributes:
        best: the fastest decision that was found.
        runners_up: other decisions that came close, fastest first; all feasible, no two alike, not an exhaustive list.
        trivial: the plans one would write down without a search, feasible or not: one device, data parallel, even
            split.
        certificate: what is proven about `best`.
    """

    best: Candidate
    runners_up: tuple[Candidate, ...]
    trivial: tuple[Candidate, ...]
    certificate: Certificate

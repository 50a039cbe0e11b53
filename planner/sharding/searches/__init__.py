"""Searches over layouts, one file each, found by name.

>>> from planner.sharding.searches import names
>>> "ilp" in names()
True
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from planner.errors import InfeasibleError
from planner.memory import fits
from planner.registry import Registry
from planner.sharding.judge import Verdict, evaluate
from planner.sharding.problem import Choice, Setting


@dataclass(frozen=True)
class ShardingAnswer:
    """What a search found.

    Attributes:
        decision: strategy of each operator and resting layout of each tensor and weight, by variable name.
        verdict: what the judge says it costs.
        bound_s: no decision of the search's space takes less; 0 when the search proves nothing.
        method: how it was found.
        states: size of what was looked at, in the method's own unit.
    """

    decision: dict[str, Choice]
    verdict: Verdict
    bound_s: float
    method: str
    states: int = 0

    @staticmethod
    def of(
        setting: Setting,
        decision: dict[str, Choice],
        memory_bytes: float | None,
        method: str,
        *,
        bound_s: float = 0.0,
        states: int = 0,
        fixed: str = "",
    ) -> ShardingAnswer:
        """A decision as an answer, with the judge's verdict.

        Args:
            setting: what was to be sharded.
            decision: strategies and layouts.
            memory_bytes: what a rank may hold; None for any.
            method: how it was found.
            bound_s: no decision of the search's space takes less.
            states: size of what was looked at.
            fixed: of a search that cannot trade time for memory, what it found in words.

        Raises:
            InfeasibleError: what such a search found does not fit.
        """
        verdict = evaluate(setting, decision, memory_bytes=memory_bytes)
        if fixed and memory_bytes is not None and not fits(verdict.memory_bytes, memory_bytes):
            raise InfeasibleError(f"{fixed} does not fit the devices' memory", hint="use a larger mesh")
        return ShardingAnswer(decision, verdict, bound_s, method, states)

    @property
    def gap(self) -> float:
        """How much slower than the bound the answer may be, as a fraction of it."""
        if self.bound_s <= 0:
            return 0.0 if self.verdict.seconds <= 0 else float("inf")
        return max(0.0, self.verdict.seconds / self.bound_s - 1.0)


class Search(Protocol):
    """A way to choose layouts."""

    def __call__(self, setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
        """Choose strategies and layouts that take the least time within the memory of a rank.

        Raises:
            InfeasibleError: nothing in the search's space fits.
        """
        ...


SEARCHES: Registry[Search] = Registry("planner.sharding.searches", "sharding search")


def get(name: str) -> Search:
    """The search of that name.

    Raises:
        UsageError: no search has that name.
    """
    return SEARCHES.get(name)


def names() -> tuple[str, ...]:
    """Names of all searches."""
    return SEARCHES.names()

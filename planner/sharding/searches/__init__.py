"""Searches over layouts, one file each, found by name.

>>> from planner.sharding.searches import names
>>> "gshard" in names()
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
    """The answer of a search.

    Attributes:
        decision: strategy of each operator and resting layouts of each tensor and weight, by variable name.
        verdict: its cost by the judge.
    """

    decision: dict[str, Choice]
    verdict: Verdict

    @staticmethod
    def of(
        setting: Setting, decision: dict[str, Choice], memory_bytes: float | None, *, fixed: str = ""
    ) -> ShardingAnswer:
        """The answer for a decision, with the judge's verdict.

        Args:
            setting: what is sharded.
            decision: strategies and layouts.
            memory_bytes: bytes that a rank may hold; None for no limit.
            fixed: for a search that cannot trade time for memory, the name of its decision in the error.

        Raises:
            InfeasibleError: the decision of such a search does not fit.
        """
        verdict = evaluate(setting, decision, memory_bytes=memory_bytes)
        if fixed and memory_bytes is not None and not fits(verdict.memory_bytes, memory_bytes):
            raise InfeasibleError(f"{fixed} does not fit the devices' memory", hint="use a larger mesh")
        return ShardingAnswer(decision, verdict)


class Search(Protocol):
    """A search over layouts."""

    def __call__(self, setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
        """Choose the strategies and layouts with the least time within the memory of a rank.

        Raises:
            InfeasibleError: no decision of the search's space fits.
        """
        ...


SEARCHES: Registry[Search] = Registry("planner.sharding.searches", "sharding search")


get, names = SEARCHES.get, SEARCHES.names
"""The search of a name, and the names of all."""

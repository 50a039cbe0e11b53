"""Searches over layouts, one file each, found by name.

>>> from planner.sharding.searches import names
>>> "gshard" in names()
True
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from planner.errors import InfeasibleError
from planner.registry import Registry
from planner.sharding.elimination import CLOSE, Factor, least_within, minimise
from planner.sharding.judge import Verdict, evaluate
from planner.sharding.problem import Choice, Setting
from planner.units import format_bytes


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
    def of(setting: Setting, decision: dict[str, Choice], memory_bytes: float | None) -> ShardingAnswer:
        """The answer for a decision, with the judge's verdict; it has a violation where the decision does not fit.

        Args:
            setting: what is sharded.
            decision: strategies and layouts.
            memory_bytes: bytes that a rank may hold; None for no limit.
        """
        return ShardingAnswer(decision, evaluate(setting, decision, memory_bytes=memory_bytes))


class ShardingSearch(Protocol):
    """A search over layouts."""

    def __call__(self, setting: Setting, *, memory_bytes: float | None = None) -> ShardingAnswer:
        """Choose the strategies and layouts with the least time within the memory of a rank.

        A search that cannot trade time for memory (Tofu) chooses as ever; the judge says where that does not fit.

        Raises:
            InfeasibleError: no decision of the search's space was found that fits.
        """
        ...


def fastest_choices(
    sizes: Sequence[int],
    times: Sequence[Factor],
    held: Sequence[Factor],
    memory_bytes: float | None,
    what: str,
    close: float = CLOSE,
) -> tuple[int, ...]:
    """The fastest choice of each variable, proven; within memory the fastest that a price on memory finds.

    Args:
        sizes: choices of each variable.
        times: tables of seconds.
        held: tables of bytes, at most one for the same variables.
        memory_bytes: bytes that a rank may hold; None for no limit.
        what: what is chosen, for the error.
        close: relative gap at which the search within memory ends.

    Raises:
        InfeasibleError: no choice was found that fits, or the problem is too large for elimination.
    """
    if memory_bytes is None:
        return minimise(sizes, times)[1]
    choices = least_within(sizes, times, held, memory_bytes, close).choices
    if not choices:
        raise InfeasibleError(
            f"no {what} was found that fits {format_bytes(memory_bytes)} a device",
            hint="use a larger mesh, more recomputation or a smaller micro-batch",
        )
    return choices


SEARCHES: Registry[ShardingSearch] = Registry("planner.sharding.searches", "sharding search")


get, names = SEARCHES.get, SEARCHES.names
"""The search of a name, and the names of all."""

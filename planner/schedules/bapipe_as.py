"""BaPipe's 1F1B-AS: 1F1B on accelerators that compute and transfer at the same time, piece by piece.

Time (m + p - 1)(F + B) when each boundary carries a stage's activations in the time of a forward; (p - i + 1) micro-
batches kept by stage i = 1..p (Zhao et al., 2020). The order is that of 1F1B; transfers cost nothing of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts
from planner.schedules._families import OneForwardOneBackward


@dataclass(frozen=True, slots=True)
class BaPipeAs(OneForwardOneBackward):
    """1F1B with streamed transfers."""

    key = "bapipe-as"
    facts = Facts(
        decides="1F1B, transfers streamed into the computation",
        bubble="(p-1)/(m+p-1)",
        memory="p-i micro-batches at stage i",
        staleness="0",
        source="Zhao et al., 2020 (BaPipe)",
    )

    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Stages from here to the end."""
        return tuple(range(len(replicas), 0, -1))


SCHEDULES.register("bapipe-as", BaPipeAs())

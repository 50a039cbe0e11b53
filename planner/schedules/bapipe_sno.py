"""BaPipe's 1F1B-SNO: 1F1B on accelerators that wait for their transfers.

Time (m + p - 1)(F + B) + (p + m - 2 - ceil((m - 1) / p)) 2 SR for equal stages and a transfer of SR one way; stage
i = 1..p keeps p - i + 1 micro-batches (Zhao et al., 2020). The order is that of 1F1B: its warm-up leaves no time to
transfer in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts
from planner.schedules._families import OneForwardOneBackward


@dataclass(frozen=True, slots=True)
class BaPipeSno(OneForwardOneBackward):
    """1F1B that waits for transfers."""

    key = "bapipe-sno"
    facts = Facts(
        decides="1F1B, transfers not overlapped",
        bubble="(p-1)/(m+p-1) and (p+m-2-ceil((m-1)/p)) 2SR more",
        memory="p-i micro-batches at stage i",
        staleness="0",
        source="Zhao et al., 2020 (BaPipe)",
    )

    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Stages from here to the end."""
        return tuple(range(len(replicas), 0, -1))


def time_s(stages: int, micro_batches: int, forward_s: float, backward_s: float, transfer_s: float) -> float:
    """(m + p - 1)(F + B) + (p + m - 2 - ceil((m - 1) / p)) 2 SR."""
    waits = stages + micro_batches - 2 - -(-(micro_batches - 1) // stages)
    return (micro_batches + stages - 1) * (forward_s + backward_s) + waits * 2 * transfer_s


SCHEDULES.register("bapipe-sno", BaPipeSno())

"""BaPipe's 1F1B-SO: twice the warm-up of 1F1B, so that transfers run beside the computation.

Time (m + p - 1)(F + B) + (p - 1) 2 SR for equal stages and a transfer of SR one way, up to half of F + B. Stage
i = 1..p keeps 2 (p - i) + 1 micro-batches; the published bound is 2 (p - i + 1) (Zhao et al., 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts
from planner.schedules._families import OneForwardOneBackward


@dataclass(frozen=True, slots=True)
class BaPipeSo(OneForwardOneBackward):
    """1F1B with a double warm-up."""

    key = "bapipe-so"
    facts = Facts(
        decides="1F1B with a double warm-up, transfers overlapped",
        bubble="(p-1)/(m+p-1) and (p-1) 2SR more",
        memory="2(p-i)-1 micro-batches at stage i",
        staleness="0",
        source="Zhao et al., 2020 (BaPipe)",
    )

    def warm_up(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Twice the stages that follow, and one."""
        return tuple(2 * behind - 1 for behind in range(len(replicas), 0, -1))


def time_s(stages: int, micro_batches: int, forward_s: float, backward_s: float, transfer_s: float) -> float:
    """(m + p - 1)(F + B) + (p - 1) 2 SR."""
    return (micro_batches + stages - 1) * (forward_s + backward_s) + (stages - 1) * 2 * transfer_s


SCHEDULES.register("bapipe-so", BaPipeSo())

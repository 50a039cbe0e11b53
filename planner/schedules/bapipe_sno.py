"""BaPipe's 1F1B-SNO: 1F1B on accelerators that wait for their transfers.

Time (m + p - 1)(F + B) + (p + m - 2 - ceil((m - 1) / p)) 2 SR for equal stages and a transfer of SR one way; stage
i = 1..p keeps p - i + 1 micro-batches (Zhao et al., 2020). The order is that of 1F1B: its warm-up leaves no time to
transfer in.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Defaults, Facts, dealt, finish
from planner.schedules._lines import one_forward_one_backward
from planner.schedules.types import Action, Pipeline


@dataclass(frozen=True, slots=True)
class BaPipeSno(Defaults):
    """1F1B that waits for transfers."""

    key = "bapipe-sno"
    facts = Facts(
        decides="1F1B, transfers not overlapped",
        bubble="(p-1)/(m+p-1) and (p+m-2-ceil((m-1)/p)) 2SR more",
        memory="p-i micro-batches at stage i",
        staleness="0",
        source="Zhao et al., 2020 (BaPipe)",
    )

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """Stages from here to the end, at most m."""
        own = pipeline.micro_batches // pipeline.replicas[0]
        return tuple(min(own, pipeline.stages - i) for i in range(pipeline.stages))

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas, for each of them."""
        return dealt(self, pipeline, self._line)

    def _line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Warm-up, alternation, drain, SYNC, UPDATE."""
        kept = self.in_flight(pipeline)
        own = range(pipeline.micro_batches)
        return tuple((*one_forward_one_backward(i, own, kept[i]), *finish((i,))) for i in range(pipeline.stages))


def time_s(stages: int, micro_batches: int, forward_s: float, backward_s: float, transfer_s: float) -> float:
    """(m + p - 1)(F + B) + (p + m - 2 - ceil((m - 1) / p)) 2 SR."""
    waits = stages + micro_batches - 2 - -(-(micro_batches - 1) // stages)
    return (micro_batches + stages - 1) * (forward_s + backward_s) + waits * 2 * transfer_s


SCHEDULES.register("bapipe-sno", BaPipeSno())

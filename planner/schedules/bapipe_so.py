"""BaPipe's 1F1B-SO: twice the warm-up of 1F1B, so that transfers run beside the computation.

Time (m + p - 1)(F + B) + (p - 1) 2 SR for equal stages and a transfer of SR one way, up to half of F + B. Stage
i = 1..p keeps 2 (p - i) + 1 micro-batches; the published bound is 2 (p - i + 1) (Zhao et al., 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Defaults, Facts, dealt, finish
from planner.schedules._lines import one_forward_one_backward
from planner.schedules.types import Action, Pipeline


@dataclass(frozen=True, slots=True)
class BaPipeSo(Defaults):
    """1F1B with a double warm-up."""

    key = "bapipe-so"
    facts = Facts(
        decides="1F1B with a double warm-up, transfers overlapped",
        bubble="(p-1)/(m+p-1) and (p-1) 2SR more",
        memory="2(p-i)-1 micro-batches at stage i",
        staleness="0",
        source="Zhao et al., 2020 (BaPipe)",
    )

    def in_flight(self, pipeline: Pipeline) -> tuple[int, ...]:
        """2 (p - i) - 1 for i = 0..p-1, at most m."""
        own = pipeline.micro_batches // pipeline.replicas[0]
        return tuple(min(own, 2 * (pipeline.stages - i) - 1) for i in range(pipeline.stages))

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas, for each of them."""
        return dealt(self, pipeline, self._line)

    def _line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Warm-up, alternation, drain, SYNC, UPDATE."""
        kept = self.in_flight(pipeline)
        own = range(pipeline.micro_batches)
        return tuple((*one_forward_one_backward(i, own, kept[i]), *finish((i,))) for i in range(pipeline.stages))


def time_s(stages: int, micro_batches: int, forward_s: float, backward_s: float, transfer_s: float) -> float:
    """(m + p - 1)(F + B) + (p - 1) 2 SR."""
    return (micro_batches + stages - 1) * (forward_s + backward_s) + (stages - 1) * 2 * transfer_s


SCHEDULES.register("bapipe-so", BaPipeSo())

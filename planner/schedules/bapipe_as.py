"""BaPipe's 1F1B-AS: 1F1B on accelerators that compute and transfer at the same time, piece by piece.

Time (m + p - 1)(F + B) when each boundary carries a stage's activations in the time of a forward; (p - i + 1) micro-
batches kept by stage i = 1..p (Zhao et al., 2020). The order is that of 1F1B; transfers cost nothing of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Defaults, Facts, dealt, finish
from planner.schedules._lines import one_forward_one_backward
from planner.schedules.types import Action, Pipeline


@dataclass(frozen=True, slots=True)
class BaPipeAs(Defaults):
    """1F1B with streamed transfers."""

    key = "bapipe-as"
    facts = Facts(
        decides="1F1B, transfers streamed into the computation",
        bubble="(p-1)/(m+p-1)",
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


SCHEDULES.register("bapipe-as", BaPipeAs())

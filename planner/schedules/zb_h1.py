"""ZB-H1: the backward in two parts, the memory of 1F1B, a third of its bubble.

Cost above the ideal (p-1)(F+B-W) for equal stages (Qi et al., ICLR 2024), counted from each worker's first start to
its last end: the next iteration begins where the drain leaves room. F, B and W are forward, input gradient and weight
gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Defaults, Facts, finish
from planner.schedules._zero_bubble import split_backward_order
from planner.schedules.types import Action, Pipeline


@dataclass(frozen=True, slots=True)
class ZeroBubbleH1(Defaults):
    """Split backward within p micro-batches.

    Attributes:
        limit: micro-batches that a worker keeps; 0: as many as there are workers.
    """

    limit: int = 0

    key = "zb-h1"
    spans = True
    facts = Facts(
        decides="splits the backward, weight gradients fill gaps; limit",
        bubble="(p-1)(F+B-W) above the ideal, by worker's span",
        memory="at most p micro-batches",
        staleness="0",
        source="Qi et al., ICLR 2024",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """A limit below one micro-batch."""
        return "" if self.limit >= 0 else f"a limit of {self.limit} micro-batches keeps none"

    def line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Forwards, input and weight gradients, SYNC, UPDATE."""
        orders = split_backward_order(pipeline.stages, pipeline.micro_batches, self.limit or pipeline.stages)
        return tuple((*order, *finish((stage,))) for stage, order in enumerate(orders))


SCHEDULES.register("zb-h1", ZeroBubbleH1())

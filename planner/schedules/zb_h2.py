"""ZB-H2: the backward in two parts and forwards so far ahead that no worker ever waits.

Cost above the ideal (p-1)(F+B-2W) for equal stages, none when all parts take equally long, with up to 2p - 1
micro-batches kept (Qi et al., ICLR 2024), counted from each worker's first start to its last end.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Defaults, Facts, dealt, finish
from planner.schedules._zero_bubble import split_backward_order
from planner.schedules.types import Action, Pipeline


@dataclass(frozen=True, slots=True)
class ZeroBubbleH2(Defaults):
    """Split backward within 2p - 1 micro-batches.

    Attributes:
        limit: micro-batches that a worker keeps; 0: 2p - 1.
    """

    limit: int = 0

    key = "zb-h2"
    spans = True
    facts = Facts(
        decides="splits the backward, warms up twice as far; limit",
        bubble="(p-1)(F+B-2W) above the ideal, by worker's span",
        memory="at most 2p-1 micro-batches",
        staleness="0",
        source="Qi et al., ICLR 2024",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """A limit below one micro-batch."""
        return "" if self.limit >= 0 else f"a limit of {self.limit} micro-batches keeps none"

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas, for each of them."""
        return dealt(self, pipeline, self._line)

    def _line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """Forwards, input and weight gradients, SYNC, UPDATE."""
        limit = self.limit or 2 * pipeline.stages - 1
        orders = split_backward_order(pipeline.stages, pipeline.micro_batches, limit)
        return tuple((*order, *finish((stage,))) for stage, order in enumerate(orders))


SCHEDULES.register("zb-h2", ZeroBubbleH2())

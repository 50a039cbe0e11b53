"""ZB-H2: the backward in two parts and forwards so far ahead that no worker ever waits.

Cost above the ideal (p-1)(F+B-2W) for equal stages, none when all parts take equally long, with up to 2p - 1
micro-batches kept (Qi et al., ICLR 2024), counted from each worker's first start to its last end.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._defaults import Facts
from planner.schedules._families import SplitBackward
from planner.schedules.types import Pipeline


@dataclass(frozen=True, slots=True)
class ZeroBubbleH2(SplitBackward):
    """Split backward within 2p - 1 micro-batches.

    Attributes:
        limit: micro-batches that a worker keeps; 0: 2p - 1.
    """

    limit: int = 0

    key = "zb-h2"
    facts = Facts(
        decides="splits the backward, warms up twice as far; limit",
        bubble="(p-1)(F+B-2W) above the ideal, by worker's span",
        memory="at most 2p-1 micro-batches",
        staleness="0",
        source="Qi et al., ICLR 2024",
    )

    def most(self, stages: int) -> int:
        """The limit, 2p - 1 without one."""
        return self.limit or 2 * stages - 1

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """(p - 1)(F + B - 2W), B the input gradient."""
        return (pipeline.stages - 1) * max(forward_s + backward_s - 3 * weight_s, 0.0)


SCHEDULES.register("zb-h2", ZeroBubbleH2())

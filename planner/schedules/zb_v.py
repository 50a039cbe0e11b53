"""ZB-V: two chunks a worker in a V, no bubble within the memory of 1F1B.

With equal times for forward, input gradient and weight gradient no worker waits between its first start and its last
end, and each keeps the activations of at most 2p chunks, p stages' worth (Qi et al., ICLR 2024). Activations cross
workers twice as often. The order repeats a block in which the passes move four and two slots a worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._building_block import Block, even_block
from planner.schedules._defaults import Facts
from planner.schedules._families import FoldedBlock
from planner.schedules.types import Pipeline


@dataclass(frozen=True, slots=True)
class ZeroBubbleV(FoldedBlock):
    """Two chunks a worker, split backward."""

    key = "zb-v"
    facts = Facts(
        decides="V of two chunks a worker, split backward",
        bubble="0 for F=B=W, by worker's span",
        memory="2p chunks (p stages' worth)",
        staleness="0",
        source="Qi et al., ICLR 2024",
    )

    def limit(self, workers: int) -> int:
        """2p chunks: as much as 1F1B keeps."""
        return 2 * workers

    def block(self, workers: int) -> Block:
        """Lifespans of both chunks together 12p slots: 2p chunks."""
        return even_block(workers, (4, 2, 4, 2))

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """None, for F = B = W."""
        return 0.0


SCHEDULES.register("zb-v", ZeroBubbleV())

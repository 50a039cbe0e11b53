"""ZB-V: two chunks a worker in a V, no bubble within the memory of 1F1B.

With equal times for forward, input gradient and weight gradient no worker waits between its first start and its last
end, and each keeps the activations of at most 2p chunks, p stages' worth (Qi et al., ICLR 2024). Activations cross
workers twice as often. The order repeats a block in which the passes move four and two slots a worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._building_block import Block, block_order, even_block
from planner.schedules._defaults import Defaults, Facts, dealt, finish
from planner.schedules.types import Action, ActivationUnit, Pipeline


@dataclass(frozen=True, slots=True)
class ZeroBubbleV(Defaults):
    """Two chunks a worker, split backward."""

    key = "zb-v"
    unit = ActivationUnit.CHUNK
    spans = True
    facts = Facts(
        decides="V of two chunks a worker, split backward",
        bubble="0 for F=B=W, by worker's span",
        memory="2p chunks (p stages' worth)",
        staleness="0",
        source="Qi et al., ICLR 2024",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """Stages that do not make two chunks on each worker."""
        return (
            f"{self.key} needs two stages on each worker, not {pipeline.stages} in all" if pipeline.stages % 2 else ""
        )

    def limit(self, workers: int) -> int:
        """2p chunks: as much as 1F1B keeps."""
        return 2 * workers

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas, for each of them."""
        return dealt(self, pipeline, self._line)

    def _line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The repeated block with its gaps filled, SYNC, UPDATE."""
        workers = pipeline.stages // 2
        orders = block_order(_block(workers), pipeline.micro_batches, self.limit(workers))
        return tuple((*order, *finish((worker, pipeline.stages - 1 - worker))) for worker, order in enumerate(orders))


def _block(workers: int) -> Block:
    """Lifespans of both chunks together 12p slots: 2p chunks."""
    return even_block(workers, (4, 2, 4, 2))


SCHEDULES.register("zb-v", ZeroBubbleV())

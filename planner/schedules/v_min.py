"""V-min: two chunks a worker in a V, a third of the memory of 1F1B.

Each worker keeps the activations of at most 2 floor((p+4)/3) chunks (Qi et al., NeurIPS 2024). The order repeats a
block in which all passes move one slot a worker: the shortest way there and back, so no order keeps less.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._building_block import Block, block_order
from planner.schedules._defaults import Defaults, Facts, dealt, finish
from planner.schedules.types import Action, ActivationUnit, Pipeline


@dataclass(frozen=True, slots=True)
class VMin(Defaults):
    """Two chunks a worker, least memory."""

    key = "v-min"
    unit = ActivationUnit.CHUNK
    spans = True
    facts = Facts(
        decides="V of two chunks a worker, split backward, least memory",
        bubble="4p-5 (p a multiple of 3: 4p-7) half-stage units above 6m, F=B=W, p>2",
        memory="2 floor((p+4)/3) chunks",
        staleness="0",
        source="Qi et al., NeurIPS 2024",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """Stages that do not make two chunks on each worker."""
        return (
            f"{self.key} needs two stages on each worker, not {pipeline.stages} in all" if pipeline.stages % 2 else ""
        )

    def limit(self, workers: int) -> int:
        """A third of what 1F1B keeps, and a bit."""
        return 2 * ((workers + 4) // 3)

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas, for each of them."""
        return dealt(self, pipeline, self._line)

    def _line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The repeated block with its gaps filled, SYNC, UPDATE."""
        workers = pipeline.stages // 2
        orders = block_order(_block(workers), pipeline.micro_batches, self.limit(workers))
        return tuple((*order, *finish((worker, pipeline.stages - 1 - worker))) for worker, order in enumerate(orders))


def _block(workers: int) -> Block:
    """All passes one slot a worker; where three divides the workers the backwards begin 2 slots later to keep clear."""
    gap = 2 if workers % 3 == 0 else 0
    return tuple((i, 2 * workers - i - 1, 2 * workers + gap + i, 4 * workers + gap - i - 1) for i in range(workers))


SCHEDULES.register("v-min", VMin())

"""V-half: two chunks a worker in a V, half the memory of 1F1B.

Each worker keeps the activations of at most 2 floor((p+2)/2) chunks, about half of what 1F1B keeps, with a smaller
bubble than 1F1B (Qi et al., NeurIPS 2024). The order repeats a block in which the passes move two and one slots a
worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._building_block import Block, block_order
from planner.schedules._defaults import Defaults, Facts, dealt, finish
from planner.schedules.types import Action, ActivationUnit, Pipeline


@dataclass(frozen=True, slots=True)
class VHalf(Defaults):
    """Two chunks a worker, half the memory."""

    key = "v-half"
    unit = ActivationUnit.CHUNK
    spans = True
    facts = Facts(
        decides="V of two chunks a worker, split backward, half the memory",
        bubble="3p-7 (p odd: 3p-4) half-stage units above 6m, F=B=W, p>2",
        memory="2 floor((p+2)/2) chunks",
        staleness="0",
        source="Qi et al., NeurIPS 2024",
    )

    def refuses(self, pipeline: Pipeline) -> str:
        """Stages that do not make two chunks on each worker."""
        return (
            f"{self.key} needs two stages on each worker, not {pipeline.stages} in all" if pipeline.stages % 2 else ""
        )

    def limit(self, workers: int) -> int:
        """Half of what 1F1B keeps, and a bit."""
        return 2 * ((workers + 2) // 2)

    def order(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The orders of single replicas, for each of them."""
        return dealt(self, pipeline, self._line)

    def _line(self, pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
        """The repeated block with its gaps filled, SYNC, UPDATE."""
        workers = pipeline.stages // 2
        orders = block_order(_block(workers), pipeline.micro_batches, self.limit(workers))
        return tuple((*order, *finish((worker, pipeline.stages - 1 - worker))) for worker, order in enumerate(orders))


def _block(workers: int) -> Block:
    """Passes of 2, 1, 2 and 1 slots a worker; for an even number the backwards begin 3 slots later to keep clear."""
    gap = 3 if workers % 2 == 0 else 0
    return tuple(
        (2 * i, 3 * workers - i - 2, 3 * workers + gap + 2 * i - 1, 6 * workers + gap - i - 2) for i in range(workers)
    )


SCHEDULES.register("v-half", VHalf())

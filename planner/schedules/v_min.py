"""V-min: two chunks a worker in a V, a third of the memory of 1F1B.

Each worker keeps the activations of at most 2 floor((p+4)/3) chunks (Qi et al., NeurIPS 2024). The order repeats a
block in which all passes move one slot a worker: the shortest way there and back, so no order keeps less.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._building_block import Block
from planner.schedules._defaults import Facts
from planner.schedules._families import FoldedBlock
from planner.schedules.types import Pipeline


@dataclass(frozen=True, slots=True)
class VMin(FoldedBlock):
    """Two chunks a worker, least memory."""

    key = "v-min"
    facts = Facts(
        decides="V of two chunks a worker, split backward, least memory",
        bubble="4p-5 (p a multiple of 3: 4p-7) half-stage units above 6m, F=B=W, p>2",
        memory="2 floor((p+4)/3) chunks",
        staleness="0",
        source="Qi et al., NeurIPS 2024",
    )

    def limit(self, workers: int) -> int:
        """A third of what 1F1B keeps, and a bit."""
        return 2 * ((workers + 4) // 3)

    def block(self, workers: int) -> Block:
        """All passes one slot a worker; where three divides the workers the backwards begin 2 slots later."""
        gap = 2 if workers % 3 == 0 else 0
        return tuple((i, 2 * workers - i - 1, 2 * workers + gap + i, 4 * workers + gap - i - 1) for i in range(workers))

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """4p - 5 forwards of a chunk (p a multiple of 3: 4p - 7), for F = B = W and p > 2."""
        workers = pipeline.stages // 2
        return max(4 * workers - (5 if workers % 3 else 7), 0) * forward_s


SCHEDULES.register("v-min", VMin())

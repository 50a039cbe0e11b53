"""V-half: two chunks a worker in a V, half the memory of 1F1B.

Each worker keeps the activations of at most 2 floor((p+2)/2) chunks, about half of what 1F1B keeps, with a smaller
bubble than 1F1B (Qi et al., NeurIPS 2024). The order repeats a block in which the passes move two and one slots a
worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schedules import SCHEDULES
from planner.schedules._building_block import Block
from planner.schedules._defaults import Facts
from planner.schedules._families import FoldedBlock
from planner.schedules.types import Pipeline


@dataclass(frozen=True, slots=True)
class VHalf(FoldedBlock):
    """Two chunks a worker, half the memory."""

    key = "v-half"
    facts = Facts(
        decides="V of two chunks a worker, split backward, half the memory",
        bubble="3p-7 (p odd: 3p-4) half-stage units above 6m, F=B=W, p>2",
        memory="2 floor((p+2)/2) chunks",
        staleness="0",
        source="Qi et al., NeurIPS 2024",
    )

    def limit(self, workers: int) -> int:
        """Half of what 1F1B keeps, and a bit."""
        return 2 * ((workers + 2) // 2)

    def block(self, workers: int) -> Block:
        """Passes of 2, 1, 2 and 1 slots a worker; for an even number the backwards begin 3 slots later."""
        gap = 3 if workers % 2 == 0 else 0
        return tuple(
            (2 * i, 3 * workers - i - 2, 3 * workers + gap + 2 * i - 1, 6 * workers + gap - i - 2)
            for i in range(workers)
        )

    def wait_s(self, pipeline: Pipeline, forward_s: float, backward_s: float, weight_s: float) -> float:
        """3p - 7 forwards of a chunk (p odd: 3p - 4), for F = B = W and p > 2."""
        workers = pipeline.stages // 2
        return max(3 * workers - (4 if workers % 2 else 7), 0) * forward_s


SCHEDULES.register("v-half", VHalf())

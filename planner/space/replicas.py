"""The judge's part about replicas: what the ranks of a stage exchange with their likes, and what each of them holds.

Both are read off the recipe of the ZeRO stage (`planner.exchange.recipe_of`): what it runs in a pass is run for each
block, and hidden behind the fraction `overlap` of that pass; what it shards is sharded over replicas of the stage.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import Precision, optimizer_state_bytes
from planner.exchange import ExchangeStep, Group, Phase, Recipe, kept_bytes, parts_of, recipe_of, step_s
from planner.hardware.types import Cluster
from planner.space.types import MemoryBytes


@dataclass(frozen=True)
class Replicas:
    """All replicas of one stage.

    Attributes:
        cluster: the machine.
        groups: int64 [copies, replicas, ranks] their ranks. Equal ranks exchange among themselves, all at once.
        concurrent: groups of replicas at work at the same time on the same links.
        precision: number formats.
        zero: ZeRO stage.
    """

    cluster: Cluster
    groups: np.ndarray
    concurrent: int
    precision: Precision
    zero: int

    @functools.cached_property
    def recipe(self) -> Recipe:
        """What is exchanged and held in shards."""
        return recipe_of(self.zero)

    @property
    def shards(self) -> int:
        """Parts into which the optimizer state and its update are cut."""
        return self._parts(self.recipe.optimizer)

    def end_s(self, elements: float) -> float:
        """Seconds to synchronise a stage's gradients, or weights, at the end of an iteration."""
        return self._phase_s(Phase.END, [elements])

    def pass_s(self, elements: Sequence[float]) -> tuple[float, float]:
        """Seconds of exchanges in one forward and in one backward pass through blocks of so many elements."""
        return self._phase_s(Phase.FORWARD, elements), self._phase_s(Phase.BACKWARD, elements)

    def memory(
        self,
        elements: float,
        largest: float,
        optimizer: str,
        activations: float,
        others: tuple[float, float],
        *,
        versions: int = 1,
        buffers: int = 0,
    ) -> MemoryBytes:
        """Bytes of one rank.

        Args:
            elements: trainable elements of the stage.
            largest: of one of its blocks.
            optimizer: its name.
            activations: bytes.
            others: workspace and reserve, in bytes.
            versions: of the weights.
            buffers: as large as the weights, beside the optimizer's state.
        """
        state_bytes = optimizer_state_bytes(optimizer, self.precision)
        kept = kept_bytes(self.recipe, self.precision, state_bytes, self._parts, elements, largest)
        return MemoryBytes(
            weights=versions * float(kept.weights),
            gradients=float(kept.gradients),
            optimizer=float(kept.optimizer) + buffers * elements * self.precision.weight_bytes,
            activations=activations,
            workspace=others[0] + float(kept.gathered + kept.transient),
            reserve=others[1],
        )

    def _parts(self, group: Group | None) -> int:
        return parts_of(self.cluster, self.groups[..., 0].ravel(), group)

    def _phase_s(self, phase: Phase, elements: Sequence[float]) -> float:
        return sum((sum(self._step_s(step, n) for n in elements) for step in self.recipe.during(phase)), 0.0)

    def _step_s(self, step: ExchangeStep, elements: float) -> float:
        """Ranks of a replica are neighbours, so the first and the last of them say how far apart equal ranks lie."""
        payload_bytes = elements * step.payload(self.precision)
        ends = {0, self.groups.shape[-1] - 1}
        return max(
            step_s(self.cluster, step, self.groups[..., e].ravel(), payload_bytes, self.concurrent) for e in ends
        )

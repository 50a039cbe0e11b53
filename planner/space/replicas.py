"""The judge's part about replicas: what the ranks of a stage exchange with their likes, and what each of them holds.

ZeRO (Rajbhandari et al., SC 2020) shards over all replicas of a stage: with stage 1 the optimizer state, with 2 the
gradients too, with 3 the weights as well. Stage 2 scatters the gradients of a block after each of its backward passes,
stage 3 also gathers its weights before each pass. Behind the fraction `overlap` of a pass these exchanges are hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import Precision, optimizer_state_bytes
from planner.hardware.collectives import collective_s
from planner.hardware.types import Cluster, Collective
from planner.space.types import MemoryBytes

GATHERED = 2
"""Blocks whose weights are whole at a time under ZeRO-3: the one at work and the next."""


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

    @property
    def shards(self) -> int:
        """Parts into which ZeRO cuts what it shards."""
        return int(self.groups[..., 0].size) if self.zero else 1

    def end_s(self, elements: float) -> float:
        """Seconds to synchronise a stage's gradients, or weights, at the end of an iteration."""
        gradients, weights = elements * self.precision.gradient_bytes, elements * self.precision.weight_bytes
        if self.zero == 0:
            return self._seconds(Collective.ALL_REDUCE, gradients)
        if self.zero == 1:
            return self._seconds(Collective.REDUCE_SCATTER, gradients) + self._seconds(Collective.ALL_GATHER, weights)
        return self._seconds(Collective.ALL_GATHER, weights) if self.zero == 2 else 0.0

    def pass_s(self, elements: Sequence[float]) -> tuple[float, float]:
        """Seconds of exchanges in one forward and in one backward pass through blocks of so many elements."""
        if self.zero < 2:
            return 0.0, 0.0
        scatter_s = sum(self._seconds(Collective.REDUCE_SCATTER, n * self.precision.gradient_bytes) for n in elements)
        if self.zero == 2:
            return 0.0, scatter_s
        gather_s = sum(self._seconds(Collective.ALL_GATHER, n * self.precision.weight_bytes) for n in elements)
        return gather_s, gather_s + scatter_s

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
        parts, chosen = self.shards, self.precision
        whole = 0.0
        if parts > 1 and self.zero >= 2:
            whole += largest * chosen.gradient_bytes
        if parts > 1 and self.zero >= 3:
            whole += GATHERED * largest * chosen.weight_bytes
        return MemoryBytes(
            weights=versions * elements * chosen.weight_bytes / (parts if self.zero >= 3 else 1),
            gradients=elements * chosen.gradient_bytes / (parts if self.zero >= 2 else 1),
            optimizer=elements * (optimizer_state_bytes(optimizer, chosen) / parts + buffers * chosen.weight_bytes),
            activations=activations,
            workspace=others[0] + whole,
            reserve=others[1],
        )

    def _seconds(self, kind: Collective, payload_bytes: float) -> float:
        """Ranks of a replica are neighbours, so the first and the last of them say how far apart equal ranks lie."""
        if self.groups[..., 0].size < 2 or not payload_bytes:
            return 0.0
        ends = {0, self.groups.shape[-1] - 1}
        return max(
            collective_s(self.cluster, kind, self.groups[..., e].ravel(), payload_bytes, self.concurrent) for e in ends
        )

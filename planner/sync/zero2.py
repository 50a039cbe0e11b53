"""ZeRO stage 2: optimizer state and gradients in shards.

2(n-1)/n M a step of one micro-batch (Rajbhandari et al., SC 2020). A rank has no room for whole gradients, so every
micro-batch scatters its own: m micro-batches move (m+1)(n-1)/n M.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.sync import SCHEMES
from planner.sync._defaults import MEGABYTE, Defaults, require
from planner.sync._sharded import draft_sharded, play_gathered_once, settle_sharded, sharded_memory
from planner.sync.buckets import pack
from planner.sync.fabric import Fabric
from planner.sync.types import Draft, Exchange, Facts, MemoryFactors, Step


@dataclass(frozen=True, slots=True)
class ShardedGradients(Defaults):
    """ZeRO-2.

    Attributes:
        bucket_bytes: gradients and weights that travel together.
        overlap_gather: weights are gathered while the next forward runs.
    """

    bucket_bytes: float = 25 * MEGABYTE
    overlap_gather: bool = False

    key = "zero2"
    per_tensor = False
    facts = Facts(
        decides="buckets; whether the gather overlaps with the next forward",
        time="(n-1)/n M/B to scatter each micro-batch, as much to gather once",
        traffic="2(n-1)/n M; (m+1)(n-1)/n M for m micro-batches",
        memory="optimizer state and gradients 1/n",
        source="Rajbhandari et al., ZeRO, SC 2020",
    )

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Gradients and optimizer state in 1/N parts; the largest bucket of gradients whole while it is scattered."""
        whole = max((b.payload_bytes for b in pack(step, self.bucket_bytes)), default=0.0)
        return sharded_memory(fabric, 2, whole)

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """One gather, a scatter for each micro-batch."""
        return draft_sharded(fabric, step, self.key, self.bucket_bytes, gathers=1, scatters=step.micro_batches)

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """Scatters in every backward, gathers before the first forward."""
        require(self, fabric)
        draft = self.draft(fabric, step)
        played = play_gathered_once(fabric, step, self.bucket_bytes, self.overlap_gather, every_scatter=True)
        return settle_sharded(self, fabric, step, draft, played)


SCHEMES.register("zero2", ShardedGradients())

"""ZeRO stage 2: optimizer state and gradients in shards.

2(n-1)/n M a step of one micro-batch (Rajbhandari et al., SC 2020). A rank has no room for whole gradients, so every
micro-batch scatters its own: m micro-batches move (m+1)(n-1)/n M.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.sync import SCHEMES
from planner.sync._sharded import GatheredOnce, sharded_memory
from planner.sync.buckets import pack
from planner.sync.fabric import Fabric
from planner.sync.types import Facts, MemoryFactors, Step


@dataclass(frozen=True, slots=True)
class ShardedGradients(GatheredOnce):
    """ZeRO-2."""

    key = "zero2"
    every_scatter = True
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


SCHEMES.register("zero2", ShardedGradients())

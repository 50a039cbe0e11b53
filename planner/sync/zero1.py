"""ZeRO stage 1: the optimizer state in shards. Gradients are scattered, each rank updates its shard, weights gathered.

Bytes are those of an all-reduce, 2(n-1)/n M (Rajbhandari et al., SC 2020). Gradients accumulate whole and travel once a
step; the gather follows the update, so it is exposed unless the next forward waits for it unit by unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.sync import SCHEMES
from planner.sync._defaults import MEGABYTE, Defaults, require
from planner.sync._sharded import draft_sharded, play_gathered_once, settle_sharded, sharded_memory
from planner.sync.fabric import Fabric
from planner.sync.types import Draft, Exchange, Facts, MemoryFactors, Step


@dataclass(frozen=True, slots=True)
class ShardedOptimizer(Defaults):
    """ZeRO-1.

    Attributes:
        bucket_bytes: gradients and weights that travel together.
        overlap_gather: weights are gathered while the next forward runs.
    """

    bucket_bytes: float = 25 * MEGABYTE
    overlap_gather: bool = False

    key = "zero1"
    per_tensor = False
    facts = Facts(
        decides="buckets; whether the gather overlaps with the next forward",
        time="(n-1)/n M/B to scatter, as much to gather",
        traffic="2(n-1)/n M",
        memory="optimizer state 1/n",
        source="Rajbhandari et al., ZeRO, SC 2020",
    )

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """Optimizer state in 1/N parts."""
        return sharded_memory(fabric, 1)

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """One gather, one scatter."""
        return draft_sharded(fabric, step, self.key, self.bucket_bytes, gathers=1, scatters=1)

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """Scatters after the last micro-batch's backward, gathers before the first forward."""
        require(self, fabric)
        draft = self.draft(fabric, step)
        played = play_gathered_once(fabric, step, self.bucket_bytes, self.overlap_gather, every_scatter=False)
        return settle_sharded(self, fabric, step, draft, played)


SCHEMES.register("zero1", ShardedOptimizer())

"""ZeRO stage 3, FSDP: weights, gradients and optimizer state in shards; weights are gathered unit by unit when needed.

3(n-1)/n M a step of one micro-batch (Rajbhandari et al., SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023): gathered in
the forward, again in the backward, and gradients scattered, for every micro-batch. Units are gathered `prefetch` ahead
of the computation, for the memory of as many more units.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import UsageError
from planner.sync import SCHEMES
from planner.sync._defaults import MEGABYTE, Defaults, require
from planner.sync._sharded import draft_sharded, play_sharded, settle_sharded, sharded_memory, works_of
from planner.sync.buckets import pack
from planner.sync.fabric import Fabric
from planner.sync.types import Draft, Exchange, Facts, MemoryFactors, Step


@dataclass(frozen=True, slots=True)
class ShardedWeights(Defaults):
    """ZeRO-3.

    Attributes:
        bucket_bytes: size of a unit, the variables that are gathered together.
        prefetch: units gathered ahead; 0 gathers a unit when the one before it is done.
        keep_gathered: weights stay gathered from the forward to the backward.
    """

    bucket_bytes: float = 100 * MEGABYTE
    prefetch: int = 1
    keep_gathered: bool = False

    key = "zero3"
    per_tensor = False
    facts = Facts(
        decides="units, prefetch, whether weights stay gathered until the backward",
        time="(n-1)/n M/B for each of two gathers and a scatter",
        traffic="3(n-1)/n M a micro-batch",
        memory="all 1/n, and the gathered units",
        source="Rajbhandari et al., SC 2020; Zhao et al., FSDP, VLDB 2023",
    )

    def memory(self, fabric: Fabric, step: Step) -> MemoryFactors:
        """All in 1/N parts; gathered units and the gradients of one beside them, or all weights when they stay."""
        units = pack(step, self.bucket_bytes)
        weights = sorted((u.pulled_bytes for u in units), reverse=True)
        held = sum(weights) if self.keep_gathered else sum(weights[: 1 + self.prefetch])
        return sharded_memory(fabric, 3, held + max((u.payload_bytes for u in units), default=0.0))

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """One or two gathers and one scatter for each micro-batch."""
        gathers = step.micro_batches * (1 if self.keep_gathered else 2)
        return draft_sharded(fabric, step, self.key, self.bucket_bytes, gathers, scatters=step.micro_batches)

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """Gathers ahead of each unit's computation, scatters behind its backward.

        Raises:
            UsageError: the fabric cannot run the scheme, or a negative prefetch.
        """
        require(self, fabric)
        if self.prefetch < 0:
            raise UsageError(f"prefetch is {self.prefetch}", where=self.name, hint="use 0 or more")
        gathers = (True, True, not self.keep_gathered)
        works = works_of(fabric, step, self.bucket_bytes, gathers=gathers, every_scatter=True)
        played = play_sharded(list(works), self.prefetch)
        return settle_sharded(self, fabric, step, self.draft(fabric, step), played)


SCHEMES.register("zero3", ShardedWeights())

"""Ring all-reduce: everyone passes shards to the next, once around to add and once around to spread.

2(n-1)/n M through every port, each direction, in 2(n-1) steps (Patarasuk and Yuan, JPDC 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.sync import SCHEMES
from planner.sync._collectives import draft_all_reduce
from planner.sync._defaults import MEGABYTE, Defaults, positive
from planner.sync.fabric import Fabric
from planner.sync.types import Draft, Facts, Step


@dataclass(frozen=True, slots=True)
class Ring(Defaults):
    """One ring over all ranks.

    Attributes:
        bucket_bytes: gradients that travel together; 0 sends each by itself.
        efficiency: what the transport reaches of the hardware profile's achievable bandwidth.
    """

    bucket_bytes: float = 25 * MEGABYTE
    efficiency: float = 1.0

    key = "ring"
    facts = Facts(
        decides="buckets of 25 MB in order of arrival",
        time="2(n-1) latency + 2(n-1)/n M/B",
        traffic="2(n-1)/n M",
        memory="all of it",
        source="Patarasuk and Yuan, JPDC 2009",
    )

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """Buckets one after the other; O(variables + ranks * levels)."""
        positive(self, "efficiency")
        return draft_all_reduce(fabric, step, self.bucket_bytes, "ring", self.efficiency)


SCHEMES.register("ring", Ring())

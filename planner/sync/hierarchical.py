"""Hierarchical all-reduce: scatter inside each machine, all-reduce the shards across, gather inside.

With g ranks a machine and m machines, 2(g-1)/g M pass a device's port inside and 2(m-1)/m M a machine's, less than in
one ring over all, and start-up is that of 2(g-1) steps inside and 2(m-1) across. Every machine needs as many ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.hardware import Collective
from planner.sync import SCHEMES
from planner.sync._collectives import affine, draft_all_reduce
from planner.sync._defaults import MEGABYTE, Defaults, positive
from planner.sync.fabric import Fabric
from planner.sync.types import Draft, Facts, Step


@dataclass(frozen=True, slots=True)
class Hierarchical(Defaults):
    """Rings level by level.

    Attributes:
        bucket_bytes: gradients that travel together; 0 sends each by itself.
        efficiency: what the transport reaches of the hardware profile's achievable bandwidth.
    """

    bucket_bytes: float = 25 * MEGABYTE
    efficiency: float = 1.0

    key = "hierarchical"
    facts = Facts(
        decides="buckets of 25 MB in order of arrival; levels of the topology",
        time="2(g-1) latency + 2(g-1)/g M/B inside, then 2(m-1) latency + 2(m-1)/m M/B across",
        traffic="2(m-1)/m M a machine, 2(g-1)/g M a device inside",
        memory="all of it",
        source="Jia et al., 2018 (arXiv 1807.11205)",
    )

    def supports(self, fabric: Fabric) -> str:
        """As many ranks in every machine."""
        if affine(fabric, Collective.ALL_REDUCE, "hierarchical") is None:
            return "a hierarchical all-reduce needs the same number of ranks in every part of the topology"
        return ""

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """Buckets one after the other; O(variables + ranks * levels)."""
        positive(self, "efficiency")
        return draft_all_reduce(fabric, step, self.bucket_bytes, "hierarchical", self.efficiency)


SCHEMES.register("hierarchical", Hierarchical())

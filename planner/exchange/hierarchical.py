"""Hierarchical all-reduce: scatter inside each machine, all-reduce the shards across, gather inside.

With g ranks a machine and m machines, 2(g-1)/g M pass a device's port inside and 2(m-1)/m M a machine's, less than in
one ring over all, and start-up is that of 2(g-1) steps inside and 2(m-1) across. Every machine needs as many ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange._collectives import OneAlgorithm, affine
from planner.exchange.fabric import Fabric
from planner.exchange.types import Facts


@dataclass(frozen=True, slots=True)
class Hierarchical(OneAlgorithm):
    """Rings level by level."""

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
        if affine(fabric, self.recipe.steps[0], self.key) is None:
            return "a hierarchical all-reduce needs the same number of ranks in every part of the topology"
        return ""


SCHEMES.register("hierarchical", Hierarchical())

"""All-reduce by whatever algorithm is cheapest for each bucket, as collective libraries choose by size."""

from __future__ import annotations

from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange._collectives import draft_recipe
from planner.exchange._defaults import MEGABYTE, Defaults
from planner.exchange.fabric import Fabric
from planner.exchange.types import Draft, Facts, Step


@dataclass(frozen=True, slots=True)
class AllReduce(Defaults):
    """The cheapest of ring, tree and hierarchical, bucket by bucket.

    Attributes:
        bucket_bytes: gradients that travel together; 0 sends each by itself.
    """

    bucket_bytes: float = 25 * MEGABYTE

    key = "all-reduce"
    zero = 0
    facts = Facts(
        decides="buckets of 25 MB; ring, tree or hierarchical for each",
        time="the least of the three",
        traffic="2(n-1)/n M to 2 M",
        memory="all of it",
        source="Li et al., PyTorch Distributed, VLDB 2020",
    )

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """Buckets one after the other; O(variables + ranks * levels)."""
        return draft_recipe(fabric, step, self.recipe, self.bucket_bytes)


SCHEMES.register("all-reduce", AllReduce())

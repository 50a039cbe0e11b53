"""Tree all-reduce: sums go up a tree and results down it, in two trees that share the work.

The payload passes every port once up and once down; start-up grows with log(n) (Sanders, Speck and Traeff, 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.sync import SCHEMES
from planner.sync._collectives import draft_all_reduce
from planner.sync._defaults import MEGABYTE, Defaults, positive
from planner.sync.fabric import Fabric
from planner.sync.types import Draft, Facts, Step


@dataclass(frozen=True, slots=True)
class Tree(Defaults):
    """Two binary trees over all ranks, along the levels of the topology.

    Attributes:
        bucket_bytes: gradients that travel together; 0 sends each by itself.
        efficiency: what the transport reaches of the hardware profile's achievable bandwidth.
    """

    bucket_bytes: float = 25 * MEGABYTE
    efficiency: float = 1.0

    key = "tree"
    facts = Facts(
        decides="buckets of 25 MB in order of arrival",
        time="2 log2(n) latency + 2 M/B",
        traffic="at most 2 M",
        memory="all of it",
        source="Sanders, Speck and Traeff, Parallel Computing 2009",
    )

    def draft(self, fabric: Fabric, step: Step) -> Draft:
        """Buckets one after the other; O(variables + ranks * levels)."""
        positive(self, "efficiency")
        return draft_all_reduce(fabric, step, self.bucket_bytes, "tree", self.efficiency)


SCHEMES.register("tree", Tree())

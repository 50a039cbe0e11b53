"""All-reduces of gradients: by one algorithm, or by the cheapest for each bucket.

- ring: every rank passes shards to the next, once around to add and once around to spread: 2(n-1)/n M through every
  port, each direction, in 2(n-1) steps (Patarasuk and Yuan, JPDC 2009);
- tree: sums go up a tree and results down it, in two trees that share the work; the payload passes every port once up
  and down, start-up grows with log(n) (Sanders, Speck and Traeff, 2009);
- hierarchical: scatter inside each machine, all-reduce the shards across, gather inside. With g ranks a machine and m
  machines, 2(g-1)/g M pass a device's port inside and 2(m-1)/m M a machine's, less than in one ring over all ranks;
  start-up is that of 2(g-1) steps inside and 2(m-1) across. Every machine needs the same number of ranks;
- all-reduce: the cheapest for each bucket, as collective libraries choose by size.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange.collectives import affine, plan_recipe
from planner.exchange.fabric import Fabric
from planner.exchange.scheme import MEGABYTE, MessagePlan, Scheme
from planner.exchange.types import Step


@dataclass(frozen=True, slots=True)
class OneAlgorithm(Scheme):
    """An all-reduce of each bucket by one algorithm.

    Attributes:
        key: the algorithm: one ring over all ranks, two binary trees along the levels of the topology, or a ring on
            each level.
        bucket_bytes: size of a bucket of gradients; 0 sends each gradient by itself.
        efficiency: the fraction of the hardware profile's achievable bandwidth that the transport reaches.
    """

    key: str
    bucket_bytes: float = 25 * MEGABYTE
    efficiency: float = 1.0

    def supports(self, fabric: Fabric) -> str:
        """Refuses ranks that the algorithm does not serve."""
        if affine(fabric, self.recipe.steps[0], self.key) is None:
            return f"a {self.key} all-reduce needs the same number of ranks in every part of the topology"
        return ""

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """One message a bucket; O(variables + ranks * levels)."""
        return plan_recipe(fabric, step, self.recipe, self.bucket_bytes, algorithm=self.key, efficiency=self.efficiency)


SCHEMES.register("ring", OneAlgorithm("ring"))
SCHEMES.register("tree", OneAlgorithm("tree"))
SCHEMES.register("hierarchical", OneAlgorithm("hierarchical"))


@dataclass(frozen=True, slots=True)
class AllReduce(Scheme):
    """The cheapest of ring, tree and hierarchical, bucket by bucket.

    Attributes:
        bucket_bytes: size of a bucket of gradients; 0 sends each gradient by itself.
    """

    bucket_bytes: float = 25 * MEGABYTE

    key = "all-reduce"
    zero = 0

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """One message a bucket; O(variables + ranks * levels)."""
        return plan_recipe(fabric, step, self.recipe, self.bucket_bytes)


SCHEMES.register("all-reduce", AllReduce())

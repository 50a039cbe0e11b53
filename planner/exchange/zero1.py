"""ZeRO stage 1: the optimizer state in shards. Gradients are scattered, each rank updates its shard, weights gathered.

Bytes are those of an all-reduce, 2(n-1)/n M (Rajbhandari et al., SC 2020). Gradients accumulate whole and travel once a
step; the gather follows the update, so it is exposed unless the next forward waits for it unit by unit.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange._sharded import GatheredOnce
from planner.exchange.recipe import Content, ExchangeStep, Group, Recipe
from planner.exchange.types import Facts
from planner.hardware import Collective


@dataclass(frozen=True, slots=True)
class ShardedOptimizer(GatheredOnce):
    """ZeRO-1."""

    key = "zero1"
    zero = 1
    recipe = Recipe(
        (
            ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS),
            ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS),
        ),
        optimizer=Group.REPLICAS,
    )
    facts = Facts(
        decides="buckets; whether the gather overlaps with the next forward",
        time="(n-1)/n M/B to scatter, as much to gather",
        traffic="2(n-1)/n M",
        memory="optimizer state 1/n",
        source="Rajbhandari et al., ZeRO, SC 2020",
    )


SCHEMES.register("zero1", ShardedOptimizer())

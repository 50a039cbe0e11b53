"""ZeRO stage 2: optimizer state and gradients in shards.

2(n-1)/n M a step of one micro-batch (Rajbhandari et al., SC 2020). A rank has no room for whole gradients, so every
micro-batch scatters its own: m micro-batches move (m+1)(n-1)/n M.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.exchange import SCHEMES
from planner.exchange._sharded import GatheredOnce
from planner.exchange.recipe import Content, ExchangeStep, Group, Phase, Recipe
from planner.exchange.types import Facts
from planner.hardware import Collective


@dataclass(frozen=True, slots=True)
class ShardedGradients(GatheredOnce):
    """ZeRO-2."""

    key = "zero2"
    zero = 2
    recipe = Recipe(
        (
            ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS, Phase.BACKWARD),
            ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS),
        ),
        gradients=Group.REPLICAS,
        optimizer=Group.REPLICAS,
    )
    facts = Facts(
        decides="buckets; whether the gather overlaps with the next forward",
        time="(n-1)/n M/B to scatter each micro-batch, as much to gather once",
        traffic="2(n-1)/n M; (m+1)(n-1)/n M for m micro-batches",
        memory="optimizer state and gradients 1/n",
        source="Rajbhandari et al., ZeRO, SC 2020",
    )


SCHEMES.register("zero2", ShardedGradients())

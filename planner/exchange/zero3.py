"""ZeRO stage 3, FSDP: weights, gradients and optimizer state in shards; weights are gathered unit by unit when needed.

3(n-1)/n M a step of one micro-batch (Rajbhandari et al., SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023): gathered in
the forward, again in the backward, and gradients scattered, for every micro-batch. Units are gathered `prefetch` ahead
of the computation, for the memory of as many more units.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.errors import UsageError
from planner.exchange import SCHEMES
from planner.exchange._defaults import MEGABYTE
from planner.exchange._sharded import Sharded, price_sharded
from planner.exchange.fabric import Fabric
from planner.exchange.recipe import Content, ExchangeStep, Group, Phase, Recipe
from planner.exchange.types import Exchange, Facts, Step
from planner.hardware import Collective

_GATHER = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.FORWARD)
_GATHER_AGAIN = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.BACKWARD)
_SCATTER = ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS, Phase.BACKWARD)


@dataclass(frozen=True, slots=True)
class ShardedWeights(Sharded):
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
    zero = 3
    facts = Facts(
        decides="units, prefetch, whether weights stay gathered until the backward",
        time="(n-1)/n M/B for each of two gathers and a scatter",
        traffic="3(n-1)/n M a micro-batch",
        memory="all 1/n, and the gathered units",
        source="Rajbhandari et al., SC 2020; Zhao et al., FSDP, VLDB 2023",
    )

    @property
    def recipe(self) -> Recipe:
        """Everything in shards; one or two gathers and one scatter for each micro-batch."""
        return Recipe(
            (_GATHER, _SCATTER) if self.keep_gathered else (_GATHER, _GATHER_AGAIN, _SCATTER),
            weights=Group.REPLICAS,
            gradients=Group.REPLICAS,
            optimizer=Group.REPLICAS,
            gathered_units=0 if self.keep_gathered else 1 + self.prefetch,
        )

    def price(self, fabric: Fabric, step: Step) -> Exchange:
        """Gathers ahead of each unit's computation, scatters behind its backward.

        Raises:
            UsageError: the fabric cannot run the scheme, or a negative prefetch.
        """
        if self.prefetch < 0:
            raise UsageError(f"prefetch is {self.prefetch}", where=self.name, hint="use 0 or more")
        return price_sharded(self, fabric, step, self.bucket_bytes, self.prefetch)


SCHEMES.register("zero3", ShardedWeights())

"""ZeRO: model state in shards over the ranks, gathered and scattered while the step runs.

ZeRO-1 shards the optimizer state. Gradients are scattered, each rank updates its shard, weights are gathered. The bytes
are those of an all-reduce, 2(n-1)/n M (Rajbhandari et al., SC 2020). Gradients accumulate in full and travel once a
step.

ZeRO-2 shards optimizer state and gradients: 2(n-1)/n M in a step of one micro-batch (Rajbhandari et al., SC 2020). A
rank has no room for full gradients, so every micro-batch scatters its own: m micro-batches move (m+1)(n-1)/n M.

ZeRO-3 (FSDP) shards weights, gradients and optimizer state; weights are gathered unit by unit when needed: 3(n-1)/n M
in a step of one micro-batch (Rajbhandari et al., SC 2020; Zhao et al., PyTorch FSDP, VLDB 2023). Every micro-batch
gathers weights in the forward and again in the backward, and scatters gradients. A unit is gathered while the one
before it computes, which takes the memory of two.

Gathers and scatters run within the passes, so they are priced where passes are: jobs choose a stage by its number.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.exchange import SCHEMES
from planner.exchange.collectives import plan_recipe
from planner.exchange.fabric import Fabric
from planner.exchange.recipe import Content, ExchangeStep, Group, Phase, Recipe
from planner.exchange.scheme import MEGABYTE, MessagePlan, Scheme
from planner.exchange.types import Step
from planner.hardware import Collective


@dataclass(frozen=True, slots=True)
class Sharded(Scheme):
    """A stage of ZeRO.

    Attributes:
        key: its name.
        zero: its number.
        recipe: what it scatters and gathers when, and what it shards.
    """

    key: str
    zero: int = field()
    recipe: Recipe = field()

    per_tensor = False

    def supports(self, fabric: Fabric) -> str:
        """Refuses every fabric: a stage of ZeRO is no exchange beside the step."""
        return f"ZeRO gathers and scatters within the step: choose it by its stage, --zero {self.zero}"

    def plan_messages(self, fabric: Fabric, step: Step) -> MessagePlan:
        """One message for 25 MB, with the traffic of all gathers and scatters of a step."""
        return plan_recipe(fabric, step, self.recipe, 25 * MEGABYTE)


_ALL = Group.REPLICAS
_SCATTER_ONCE = ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS)
_SCATTER = ExchangeStep(Collective.REDUCE_SCATTER, Content.GRADIENTS, Phase.BACKWARD)
_GATHER_ONCE = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS)
_GATHER = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.FORWARD)
_GATHER_AGAIN = ExchangeStep(Collective.ALL_GATHER, Content.WEIGHTS, Phase.BACKWARD)

SCHEMES.register("zero1", Sharded("zero1", 1, Recipe((_SCATTER_ONCE, _GATHER_ONCE), optimizer=_ALL)))
SCHEMES.register("zero2", Sharded("zero2", 2, Recipe((_SCATTER, _GATHER_ONCE), gradients=_ALL, optimizer=_ALL)))
SCHEMES.register("zero3", Sharded("zero3", 3, Recipe((_GATHER, _GATHER_AGAIN, _SCATTER), _ALL, _ALL, _ALL)))

"""A plan's configuration with the costs of the ways in which its stages share operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from planner.graph import Graph
from planner.plans.rebuild import rebuild
from planner.plans.types import Plan
from planner.sharding.boundary import Boundaries, Boundary
from planner.sharding.problem import Choice
from planner.space.configuration import Configuration
from planner.space.pricer import Pricer
from planner.space.types import BlockCosts


def priced_configuration(plan: Plan, pricer: Pricer) -> tuple[Configuration, dict[int, BlockCosts]]:
    """A plan's configuration, its shardings numbered as the pricer numbers them, and their costs.

    Raises:
        UsageError: something about a sharding is not said, or cannot lie as it is said to.
        InfeasibleError: a split is not legal.
        HardwareError: a mesh does not fit the cluster.
    """
    size = plan.micro_batches.size
    priced = _price_shardings(plan, pricer.graph_at(size), pricer)
    numbers = (0, *(costs.sharding for costs in priced))
    stages = tuple(dataclasses.replace(s, sharding=numbers[s.sharding]) for s in plan.configuration.stages)
    shelf = {costs.sharding: costs for costs in priced}
    if any(stage.sharding == 0 for stage in stages):
        shelf[0] = pricer.costs(size)
    return dataclasses.replace(plan.configuration, stages=stages), shelf


def _price_shardings(plan: Plan, graph: Graph, pricer: Pricer) -> list[BlockCosts]:
    """The plan's shardings in order, priced by what they say of operators and tensors."""
    found: list[BlockCosts] = []
    for rebuilt in rebuild(plan, graph, None):
        sharding = rebuilt.sharding
        decisions: list[dict[str, Choice] | None] = [None] * len(plan.block_table)
        own = {id(entry): rebuilt.decision(entry) for entry in sharding.blocks}
        for stage in (stage for stage in plan.stages if stage.sharding == sharding.name):
            for block in range(*stage.blocks):
                known = plan.sharded_block(stage.index, block)
                if known is not None:
                    entry, names = known
                    decisions[block] = {_named(name, names): choice for name, choice in own[id(entry)].items()}
        boundary: Boundaries = tuple(map(Boundary, sharding.boundaries))
        mesh = tuple(axis.size for axis in sharding.axes)
        found.append(pricer.decided(plan.micro_batches.size, mesh, boundary, decisions))
    return found


def _named(name: str, names: Mapping[str, str]) -> str:
    """What a variable of an entry's first block is called in another block."""
    return f"op:{names[name[3:]]}" if name.startswith("op:") else names[name]

"""The decision that a plan file says, as the planner has it: stages, replicas, recomputation, shardings."""

from __future__ import annotations

from collections.abc import Mapping

from planner.errors import UsageError
from planner.graph import Graph
from planner.plan import Plan
from planner.plan.rebuild import rebuild
from planner.play import Transfers
from planner.schedules import get
from planner.sharding import StageSharding
from planner.sharding.boundary import Boundaries, Boundary
from planner.sharding.problem import Choice
from planner.space.pricer import Pricer
from planner.space.types import BlockCosts, Configuration, StageChoice


def is_searched(plan: Plan) -> bool:
    """Whether a plan is an answer of the own search: with a closed form, and a bound for all plans of a space."""
    return plan.system is None and not plan.schedule.given


def is_judged(plan: Plan) -> bool:
    """Whether the stages of a plan were priced by the judge: of the own search, and a configuration of the user's."""
    return plan.system is None and plan.schedule.given in ("", "configuration")


def has_closed_form(plan: Plan) -> bool:
    """Whether the iteration time of a plan is the closed form of its stages' terms, rather than what playing it takes;
    not where no schedule has its name."""
    try:
        return is_judged(plan) and get(plan.schedule.name).closed_form
    except UsageError:
        return False


def decision_of(plan: Plan, numbers: Mapping[str, int]) -> Configuration:
    """The decision behind a plan of the own search.

    Args:
        plan: the plan; its stages, replicas and micro-batches come out (`check_structure`).
        numbers: of its shardings, by name.
    """
    copies, first = plan.copies, plan.stages[0]
    several = any(len(plan.stages_of(group[0])) > 1 for stage in plan.stages for group in stage.replicas)
    stages = tuple(
        StageChoice(
            *stage.blocks,
            1 if several else len(stage.replicas) // copies,
            stage.recompute,
            stage.group_ranks,
            numbers.get(stage.sharding, 0),
        )
        for stage in plan.stages
    )
    count, size = plan.micro_batches.count // copies, plan.micro_batches.size
    width = plan.world_size // copies
    line = [group[0] for group in first.replicas[:2]]
    neighbours = copies > 1 and len(line) > 1 and line[1] == line[0] + first.group_ranks < width
    return Configuration(
        stages, copies, size, count, plan.schedule.name, first.zero, width,
        adjacent=neighbours, transfers=Transfers(plan.schedule.transfers),
    )  # fmt: skip


def price_shardings(plan: Plan, graph: Graph, pricer: Pricer) -> tuple[dict[str, BlockCosts], dict[int, StageSharding]]:
    """The plan's shardings priced by what they say of operators and tensors.

    Returns:
        Costs by name, and what belongs to each by its number.

    Raises:
        UsageError: something is not said, or cannot lie as it is said to.
        InfeasibleError: a split is not legal.
        HardwareError: the mesh does not fit the cluster.
    """
    costs: dict[str, BlockCosts] = {}
    known: dict[int, StageSharding] = {}
    size, blocks = plan.micro_batches.size, len(plan.block_table)
    for rebuilt in rebuild(plan, graph, None):
        sharding = rebuilt.sharding
        decisions: list[dict[str, Choice] | None] = [None] * blocks
        own = {id(entry): rebuilt.decision(entry) for entry in sharding.blocks}
        for stage in (stage for stage in plan.stages if stage.sharding == sharding.name):
            for block in range(*stage.blocks):
                found = plan.sharded_block(stage.index, block)
                if found is not None:
                    entry, names = found
                    decisions[block] = {_named(name, names): choice for name, choice in own[id(entry)].items()}
        boundary: Boundaries = tuple(map(Boundary, sharding.boundaries))
        mesh = tuple(axis.size for axis in sharding.axes)
        priced = pricer.decided(size, mesh, boundary, decisions)
        entry_of = pricer.entry(size, priced.sharding)
        costs[sharding.name] = priced
        known[priced.sharding] = StageSharding(entry_of.inner, entry_of.sharded)
    return costs, known


def _named(name: str, names: Mapping[str, str]) -> str:
    """What a variable of an entry's first block is called in another block."""
    return f"op:{names[name[3:]]}" if name.startswith("op:") else names[name]

"""The collectives of a stage: among its replicas, and with the other holders of its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from planner.costs.precision import Precision
from planner.exchange import Group, Phase, groups_of, recipe_of
from planner.hardware.types import Collective
from planner.plans.figures import StageCollective
from planner.plans.records import SharedParameter, Stage
from planner.space.types import Configuration

_PASS_OF: dict[Phase, Literal["", "forward", "backward"]] = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.END: "",
}


def stage_collectives(stage: Stage, chosen: Precision, node_size: int) -> tuple[StageCollective, ...]:
    """The collectives among a stage's replicas, by the recipe of its ZeRO stage; none for a single rank.

    Collectives among ranks of one replica that hold the same weights come first. `node_size` is the number of devices
    of a machine, for recipes with steps inside machines and across them.
    """
    recipe = recipe_of(stage.zero)
    collectives = [
        StageCollective(
            step.collective.value,
            step.content.value,
            math.ceil(replicas.parameters * step.payload(chosen)),
            replicas.ranks,
            len(stage.ranks) // replicas.ranks,
            _PASS_OF[step.phase],
        )
        for replicas in stage.rank_replicas
        for step in recipe.among_inner
    ]
    if len(stage.replicas) < 2 or not stage.parameters:
        return tuple(collectives)
    for step in recipe.steps:
        groups = replica_groups(stage, step.group, node_size)
        count, ranks = groups.shape
        payload = stage.shard_parameters * step.payload(chosen) / step.shares(groups)
        if ranks > 1:
            parallel_groups, phase = count * stage.group_ranks, _PASS_OF[step.phase]
            kind, size = step.collective.value, math.ceil(payload)
            collectives.append(StageCollective(kind, step.content.value, size, ranks, parallel_groups, phase))
    return tuple(collectives)


def replica_groups(stage: Stage, group: Group, node_size: int) -> np.ndarray:
    """First ranks of the replicas that exchange with each other, a group a row."""
    firsts = np.sort(np.asarray([ranks[0] for ranks in stage.replicas], dtype=np.int64))
    return groups_of(firsts // node_size, firsts, group)


def tied_collectives(
    stage: Stage, decision: Configuration, shared: Sequence[SharedParameter]
) -> tuple[StageCollective, ...]:
    """The collectives of a stage with the other holders of its parameters, one for each set of holders.

    A group has the replicas of all holders whose numbers are equal modulo the greatest common divisor of their counts;
    where replicas have several ranks, equal ranks of them. `shared` says the bytes of one rank. Copies that are trained
    apart exchange nothing.
    """
    payload: dict[tuple[int, ...], int] = {}
    for entry in shared:
        if stage.index in entry.stages and entry.reduction == "sum":
            payload[entry.stages] = payload.get(entry.stages, 0) + entry.bytes
    collectives = []
    for holders, size in payload.items():
        counts = [decision.stages[k].replicas for k in holders]
        groups = math.gcd(*counts)
        ranks, groups = sum(counts) // groups, groups * decision.copies * stage.group_ranks
        collectives.append(StageCollective(Collective.ALL_REDUCE.value, "tied gradients", size, ranks, groups))
    return tuple(collectives)

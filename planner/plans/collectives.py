"""Who exchanges what: collectives of a stage, and gradients by an exchange scheme, for the file and in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from planner.costs.precision import Precision
from planner.exchange import Exchange, Phase, RankGroup, Step, groups_of, recipe_of
from planner.hardware.types import Collective
from planner.plans.figures import StageCollective
from planner.plans.records import ExchangeSection, FusedMessage, SharedParameter, Stage, TensorExchange
from planner.plans.words import significant
from planner.space.types import Configuration
from planner.sums import float_sum
from planner.units import format_bytes, format_seconds

MAX_SHOWN_SHARES = 8
"""Shares of servers that a line lists at most."""


ExchangeWords = tuple[str, Mapping[str, str], tuple[str, ...]]
"""A gradient exchange in words: what is appended to the plan's summary (", all-reduce and ps"; "" on one rank), what a
training backend must know, by topic, and notes on times and what the price leaves out."""


def exchange_words(exchange: Exchange, ranks: int, state_bytes: float, host_s: float) -> ExchangeWords:
    """Describe a gradient exchange.

    Args:
        exchange: the exchange.
        ranks: number of ranks that take part.
        state_bytes: weights and optimizer state of the whole model.
        host_s: seconds for rows in host memory, network time not included.
    """
    kinds = sorted(set(exchange.methods.values()))
    methods = (", ".join(kinds[:-1]) + " and " if len(kinds) > 1 else "") + (kinds[-1] if kinds else "no exchange")
    notes = [f"exchange {format_seconds(exchange.seconds)}, {format_seconds(exchange.exposed_s)} not hidden"]
    notes += exchange.notes
    if server_share := exchange.memory.server_optimizer:
        notes.append(
            f"the fullest server holds {format_bytes(state_bytes * server_share)} in host memory, whose size profiles"
            f" do not say; rows in host memory and on the way to the devices take {format_seconds(host_s)}"
        )
    return f", {methods}" if ranks > 1 else "", _servers(exchange), tuple(notes)


def _servers(exchange: Exchange) -> dict[str, str]:
    """One line on how variables are placed on servers; empty without servers."""
    if not exchange.placements:
        return {}
    shares = {tuple(round(s, 4) for s in shares) for shares in exchange.placements.values()}
    if len(shares) == 1:
        return {
            "servers": "every variable in shares " + ", ".join(f"{s:g}" for s in next(iter(shares))[:MAX_SHOWN_SHARES])
        }
    return {"servers": f"{len(exchange.placements)} variables in pieces, each piece on one machine"}


def exchange_section(exchange: Exchange, step: Step) -> ExchangeSection:
    """The plan section of an exchange of a step's gradients; tensors with the same method and shares share an entry."""
    gradient_bytes = {v.name: v.gradient_bytes for v in step.variables}
    shares = {name: tuple(significant(share) for share in own) for name, own in exchange.placements.items()}
    groups: dict[tuple[str, tuple[float, ...]], list[str]] = {}
    for name, method in exchange.methods.items():
        groups.setdefault((method, shares.get(name, ())), []).append(name)
    fused = any(len(message.variables) > 1 for message, _ in exchange.transfers)
    messages = tuple(FusedMessage(message.variables, round(message.payload_bytes)) for message, _ in exchange.transfers)
    return ExchangeSection(
        scheme=exchange.scheme,
        seconds=significant(exchange.seconds),
        exposed_s=significant(exchange.exposed_s),
        tensors=tuple(
            TensorExchange(tuple(names), method, round(float_sum(gradient_bytes[n] for n in names)), server_shares)
            for (method, server_shares), names in groups.items()
        ),
        links=exchange.traffic.by_level(),
        messages=messages if fused else (),
        notes=exchange.notes,
    )


def all_collectives(
    stages: Sequence[Stage],
    decision: Configuration,
    shared: Sequence[SharedParameter],
    chosen: Precision,
    node_size: int,
) -> list[tuple[StageCollective, ...]]:
    """By stage, its collectives among replicas and with other holders of its parameters; arguments as of these."""
    return [
        (*stage_collectives(stage, chosen, node_size), *tied_collectives(stage, decision, shared)) for stage in stages
    ]


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
    recipe = recipe_of(stage.zero, stage.shard_over)
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


def replica_groups(stage: Stage, group: RankGroup, node_size: int) -> np.ndarray:
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

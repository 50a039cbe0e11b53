"""How groups of ranks share the work, in figures: kinds of blocks, costliest collectives, who holds which experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.plans.shardings import Sharding
from planner.plans.types import Plan
from planner.plans.words import module_ranges

MOST_EXCHANGES = 8
"""Costliest collectives that are shown of a sharding."""


@dataclass(frozen=True, slots=True)
class SharedBlockView:
    """Blocks that are sharded alike; figures are of one of them, one rank and micro-batch.

    Attributes:
        modules: what they are, for people.
        blocks: how many.
        compute_s: forward and backward work.
        communication_s: communication in forward and backward.
        step_s: communication once an update.
        sent_bytes: bytes that a rank sends in forward and backward.
        parameters: trained elements that a rank holds.
        kept_bytes: kept for backward.
    """

    modules: tuple[str, ...]
    blocks: int
    compute_s: float
    communication_s: float
    step_s: float
    sent_bytes: float
    parameters: float
    kept_bytes: float


@dataclass(frozen=True, slots=True)
class ExchangeView:
    """A collective of some blocks.

    Attributes:
        of: the tensor or operator, in the first of them.
        blocks: how many run it.
        reason: why.
        phase: forward, backward or step.
        kind: which collective.
        axes: along which mesh axes.
        level: outermost links that it crosses.
        payload_bytes: of one.
        times: how many follow each other.
        seconds: what they take in one block.
    """

    of: str
    blocks: int
    reason: str
    phase: str
    kind: str
    axes: tuple[str, ...]
    level: str
    payload_bytes: float
    times: float
    seconds: float


@dataclass(frozen=True, slots=True)
class DealtView:
    """Experts, rows or columns of weights that are dealt alike.

    Attributes:
        what: which.
        weight: the first of the weights.
        weights: how many weights.
        count: how many there are of each.
        each: how many a rank holds at the most.
        axes: along which mesh axes.
    """

    what: str
    weight: str
    weights: int
    count: int
    each: int
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """A sharding that stages have.

    Attributes:
        name: as in the plan.
        ranks: of a group.
        axes: name and size of each mesh axis, outermost first.
        boundaries: how tensors between blocks lie, by axis.
        stages: numbers of the stages.
        blocks: by kind of block.
        exchanges: costliest collectives over all blocks first.
        more_exchanges: how many further ones there are.
        dealt: experts, rows and columns.
    """

    name: str
    ranks: int
    axes: tuple[tuple[str, int], ...]
    boundaries: tuple[str, ...]
    stages: tuple[int, ...]
    blocks: tuple[SharedBlockView, ...]
    exchanges: tuple[ExchangeView, ...]
    more_exchanges: int
    dealt: tuple[DealtView, ...]


def group_views(plan: Plan) -> tuple[GroupView, ...]:
    """Every sharding of a plan; O(blocks + collectives)."""
    return tuple(_group(plan, sharding) for sharding in plan.shardings)


def _group(plan: Plan, sharding: Sharding) -> GroupView:
    exchanges = _exchanges(sharding)
    return GroupView(
        name=sharding.name,
        ranks=sharding.ranks,
        axes=tuple((axis.name, axis.size) for axis in sharding.axes),
        boundaries=tuple(sharding.boundaries),
        stages=tuple(stage.index for stage in plan.stages if stage.sharding == sharding.name),
        blocks=tuple(_blocks(plan, sharding)),
        exchanges=tuple(exchanges[:MOST_EXCHANGES]),
        more_exchanges=max(0, len(exchanges) - MOST_EXCHANGES),
        dealt=_dealt(sharding),
    )


def _dealt(sharding: Sharding) -> tuple[DealtView, ...]:
    found: dict[tuple[str, int, int, tuple[str, ...]], list[str]] = {}
    for entry in sharding.blocks:
        for h in entry.holdings:
            found.setdefault((h.what, h.count, h.each, h.axes), []).extend([h.weight] * len(entry.members()))
    return tuple(
        DealtView(what, weights[0], len(weights), count, each, axes)
        for (what, count, each, axes), weights in found.items()
    )


def _blocks(plan: Plan, sharding: Sharding) -> Sequence[SharedBlockView]:
    found = []
    for entry in sharding.blocks:
        figures, names = entry.figures, [plan.block_table[block].name for block, _ in entry.members()]
        found.append(
            SharedBlockView(
                modules=module_ranges(names),
                blocks=len(names),
                compute_s=figures.forward_s + figures.backward_s - figures.communication_s,
                communication_s=figures.communication_s,
                step_s=figures.step_s,
                sent_bytes=figures.sent_bytes,
                parameters=figures.parameters,
                kept_bytes=figures.saved_bytes,
            )
        )
    return found


def _exchanges(sharding: Sharding) -> list[ExchangeView]:
    """Collectives of all entries, those that take most over all blocks first."""
    found = [
        ExchangeView(
            c.of, len(entry.members()), c.reason, c.phase, c.kind, c.axes, c.level, c.payload_bytes, c.times, c.seconds
        )
        for entry in sharding.blocks
        for c in entry.collectives
    ]
    return sorted(found, key=lambda e: (-e.seconds * e.blocks, e.of, e.phase))

"""What a recipe costs on a group of ranks, read off its steps: seconds, bytes, memory. Nothing here knows a scheme.

Payloads are whole: of all gradients or weights that the ranks have in common. Concurrent groups are as many of the same
shape as exchange at the same time on the same links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from planner.errors import UsageError
from planner.exchange.recipe import ElementBytes, ExchangeStep, Group, Phase, Recipe
from planner.hardware import Cluster, Terms, collective_s, collective_terms, moved_bytes

Count = TypeVar("Count", float, np.ndarray)


def recipes() -> dict[int, Recipe]:
    """The recipes that jobs, decisions and plans can choose, by the number that they are chosen by: the ZeRO stage."""
    from planner.exchange import SCHEMES

    return {scheme.zero: scheme.recipe for _, scheme in SCHEMES.items() if scheme.zero is not None}


def recipe_of(zero: int) -> Recipe:
    """The recipe of a ZeRO stage.

    Raises:
        UsageError: no scheme has that number.
    """
    known = recipes()
    if zero not in known:
        raise UsageError(f"there is no ZeRO stage {zero}", hint=f"use one of {', '.join(map(str, sorted(known)))}")
    return known[zero]


def groups_of(machine: np.ndarray, ranks: np.ndarray, group: Group) -> np.ndarray:
    """The ranks that take part in a step with each other, one group a row, all of them at work at once.

    Args:
        machine: machine of each rank, aligned with `ranks`.
        ranks: all ranks that exchange, ascending.
        group: who of them.

    Raises:
        UsageError: servers, which are no ranks.
    """
    if group is Group.SERVERS:
        raise UsageError("parameter servers are no ranks of a stage", hint="use a scheme of collectives")
    if group is Group.REPLICAS:
        return ranks[None]
    held = np.unique(machine, return_counts=True)[1]
    inside = ranks.reshape(-1, int(held[0]) if (held == held[0]).all() else 1)
    return inside if group is Group.INSIDE else inside.T


def parts_of(cluster: Cluster, ranks: Sequence[int] | np.ndarray, group: Group | None) -> int:
    """Parts into which a group of these ranks cuts what it shards; 1 where nothing is sharded."""
    if group is None or group is Group.REPLICAS:
        return 1 if group is None else len(ranks)
    return int(_groups(cluster, ranks, group).shape[1])


def _groups(cluster: Cluster, ranks: Sequence[int] | np.ndarray, group: Group) -> np.ndarray:
    members = np.sort(np.asarray(ranks, dtype=np.int64))
    return groups_of(members // (cluster.node_size or 1), members, group)


def _laid(cluster: Cluster, step: ExchangeStep, ranks: Sequence[int] | np.ndarray) -> tuple[np.ndarray, int]:
    """Ranks of one of a step's groups, and how many share out the payload (across machines, one for each shard)."""
    if step.group is Group.REPLICAS:
        return np.asarray(ranks), 1
    groups = _groups(cluster, ranks, step.group)
    return groups[0], step.shares(groups)


def step_terms(cluster: Cluster, step: ExchangeStep, ranks: Sequence[int] | np.ndarray, concurrent: int = 1) -> Terms:
    """Affine cost of a step for payloads of any size."""
    members, shares = _laid(cluster, step, ranks)
    terms = collective_terms(cluster, step.collective, members, concurrent * shares)
    return terms if shares == 1 else Terms(terms.latency_s, terms.s_per_byte / shares)


def step_s(
    cluster: Cluster,
    step: ExchangeStep,
    ranks: Sequence[int] | np.ndarray,
    payload_bytes: float,
    concurrent: int = 1,
) -> float:
    """Seconds of a step; none for a single rank or an empty payload."""
    if len(ranks) < 2 or not payload_bytes:
        return 0.0
    members, shares = _laid(cluster, step, ranks)
    return collective_s(cluster, step.collective, members, payload_bytes / shares, concurrent * shares)


def phase_s(
    cluster: Cluster,
    recipe: Recipe,
    phase: Phase,
    ranks: Sequence[int] | np.ndarray,
    sizes: ElementBytes,
    elements: float = 1.0,
    concurrent: int = 1,
) -> float:
    """Seconds of all steps of one phase, one after the other, for some elements of `sizes` bytes each."""
    return sum(step_s(cluster, s, ranks, elements * s.payload(sizes), concurrent) for s in recipe.during(phase))


def sent_bytes(
    recipe: Recipe,
    sizes: ElementBytes,
    parts: Callable[[Group], int],
    elements: float = 1.0,
    passes: float = 1.0,
) -> float:
    """Bytes that a rank sends in an iteration.

    Args:
        recipe: what is exchanged.
        sizes: bytes of an element's gradient, and of its weight.
        parts: ranks of each group.
        elements: of the model part.
        passes: forward and backward passes of an iteration.
    """
    total = 0.0
    for step in recipe.steps:
        shares = parts(Group.INSIDE) if step.group is Group.ACROSS else 1
        moved = moved_bytes(step.collective, elements * step.payload(sizes), parts(step.group)) / shares
        total += moved * (1.0 if step.phase is Phase.END else passes)
    return total


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of a model's state that a rank keeps; floats, or arrays where the shards are.

    Attributes:
        weights, gradients, optimizer: between the passes.
        gathered: of weights that stay gathered.
        transient: of the units that are whole while they are at work.
    """

    weights: float | np.ndarray
    gradients: float | np.ndarray
    optimizer: float | np.ndarray
    gathered: float | np.ndarray
    transient: float | np.ndarray


def kept_bytes(
    recipe: Recipe,
    sizes: ElementBytes,
    state_bytes: float,
    parts: Callable[[Group | None], Count],
    elements: float = 1.0,
    largest: float = 1.0,
    spare_bytes: float = 0.0,
    copy_bytes: float = 0.0,
) -> Kept:
    """Bytes of a model's state that a rank keeps.

    Args:
        recipe: who holds what in shards.
        sizes: bytes of an element.
        state_bytes: bytes of optimizer state, an element.
        parts: parts into which a group cuts what it shards, 1 for None.
        elements: of the model part.
        largest: of its largest unit.
        spare_bytes: bytes of gradients, an element, that are kept whole beside those of `sizes`.
        copy_bytes: bytes of copies of the weights, an element: of all that a rank has between the passes, or of the
            units that are gathered.
    """
    weights, gradients = parts(recipe.weights), parts(recipe.gradients)
    held = sizes.weight_bytes + copy_bytes
    whole = largest * sizes.gradient_bytes * (np.asarray(gradients) > 1)
    if recipe.gathered_units:
        whole = whole + recipe.gathered_units * largest * held * (np.asarray(weights) > 1)
    stays = 0 if recipe.gathered_units else elements * held * (np.asarray(weights) > 1)
    return Kept(
        weights=elements * (sizes.weight_bytes / weights + copy_bytes * (np.asarray(weights) == 1)),
        gradients=elements * (sizes.gradient_bytes / gradients + spare_bytes),
        optimizer=elements * state_bytes / parts(recipe.optimizer),
        gathered=stays,
        transient=whole,
    )

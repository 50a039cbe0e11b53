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
from planner.hardware import Cluster, Terms, collective_s, collective_terms, moved_bytes
from planner.sync.recipe import ElementBytes, ExchangeStep, Group, Phase, Recipe

Count = TypeVar("Count", int, np.ndarray)
_ANYWHERE = (Phase.FORWARD, Phase.BACKWARD, Phase.END)


def recipe_of(zero: int) -> Recipe:
    """The recipe of the scheme that jobs, decisions and plans choose by a number, their ZeRO stage.

    Raises:
        UsageError: no scheme has that number.
    """
    from planner.sync import SCHEMES

    for _, scheme in SCHEMES.items():
        if scheme.zero == zero:
            return scheme.recipe
    raise UsageError(f"there is no ZeRO stage {zero}", hint=f"use one of {', '.join(map(str, zero_stages()))}")


def zero_stages() -> tuple[int, ...]:
    """All numbers by which a scheme can be chosen (`recipe_of`), ascending."""
    from planner.sync import SCHEMES

    return tuple(sorted(scheme.zero for _, scheme in SCHEMES.items() if scheme.zero is not None))


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
    return 1 if group is None else _groups(cluster, ranks, group).shape[1]


def _groups(cluster: Cluster, ranks: Sequence[int] | np.ndarray, group: Group) -> np.ndarray:
    members = np.sort(np.asarray(ranks, dtype=np.int64))
    return groups_of(members // (cluster.node_size or 1), members, group)


def _laid(cluster: Cluster, step: ExchangeStep, ranks: Sequence[int] | np.ndarray) -> tuple[np.ndarray, int]:
    """Ranks of one of a step's groups, and how many share out the payload (across machines, one for each shard)."""
    if step.group is Group.REPLICAS:
        return np.asarray(ranks), 1
    groups = _groups(cluster, ranks, step.group)
    return groups[0], len(groups) if step.group is Group.ACROSS else 1


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
    concurrent: int = 1,
) -> float:
    """Seconds of all steps of one phase, one after the other, `sizes` being the bytes of the whole payload."""
    return sum(step_s(cluster, s, ranks, s.payload(sizes), concurrent) for s in recipe.during(phase))


def sent_bytes(
    recipe: Recipe,
    sizes: ElementBytes,
    parts: Callable[[Group], int],
    micro_batches: int = 1,
    phases: Sequence[Phase] = _ANYWHERE,
) -> float:
    """Bytes that a rank sends in an iteration.

    Args:
        recipe: what is exchanged.
        sizes: bytes of all gradients, and of all weights.
        parts: ranks of each group.
        micro_batches: passes of an iteration in which the steps of forward and backward run.
        phases: whose steps count.
    """
    total = 0.0
    for step in recipe.during(*phases):
        shares = parts(Group.INSIDE) if step.group is Group.ACROSS else 1
        moved = moved_bytes(step.collective, step.payload(sizes), parts(step.group)) / shares
        total += moved * (1 if step.phase is Phase.END else micro_batches)
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
) -> Kept:
    """What a rank keeps of some elements.

    Args:
        recipe: who holds what in shards.
        sizes: bytes of an element.
        state_bytes: bytes of optimizer state, an element.
        parts: parts into which a group cuts what it shards, 1 for None.
        elements: of the model part.
        largest: of its largest unit.
    """
    weights, gradients = parts(recipe.weights), parts(recipe.gradients)
    whole = largest * sizes.gradient_bytes * (np.asarray(gradients) > 1)
    if recipe.gathered_units:
        whole = whole + recipe.gathered_units * largest * sizes.weight_bytes * (np.asarray(weights) > 1)
    stays = 0 if recipe.gathered_units else elements * sizes.weight_bytes * (np.asarray(weights) > 1)
    return Kept(
        weights=elements * sizes.weight_bytes / weights,
        gradients=elements * sizes.gradient_bytes / gradients,
        optimizer=elements * state_bytes / parts(recipe.optimizer),
        gathered=stays,
        transient=whole,
    )

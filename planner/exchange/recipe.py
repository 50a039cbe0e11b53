"""What an exchange is, said once as data: which collective moves what, when and among whom, and what is kept in shards.

A scheme states its recipe in its own file. Seconds, bytes, memory, a plan's collectives and closed forms are read off
the recipe by the functions of this module, which know no scheme. Payloads are whole: of all gradients or weights that
the ranks have in common. Concurrent groups are as many of the same shape as exchange at the same time on the same
links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

import numpy as np

from planner.errors import UsageError
from planner.hardware import Cluster, Collective, Terms, collective_s, collective_terms, moved_bytes


class Content(StrEnum):
    """What a step moves."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"


class Phase(StrEnum):
    """When a step runs: in every forward or backward pass, unit by unit, or once an iteration, around the update."""

    FORWARD = "forward"
    BACKWARD = "backward"
    END = "end"


class Group(StrEnum):
    """Who takes part in a step, or holds the shards of something.

    REPLICAS are all replicas of a stage. INSIDE are those of one machine, ACROSS those of all machines that hold the
    same shard of what is sharded inside; where machines hold unequal numbers of replicas, each is alone inside.
    SERVERS are parameter servers, which hold the shards that ranks scatter to and gather from.
    """

    REPLICAS = "replicas"
    INSIDE = "inside"
    ACROSS = "across"
    SERVERS = "servers"


class ElementBytes(Protocol):
    """Bytes of gradients and of weights: of one element (a `Precision`), or of all of a bucket."""

    @property
    def gradient_bytes(self) -> float:
        """Of gradients, in the format in which they travel."""
        ...

    @property
    def weight_bytes(self) -> float:
        """Of weights."""
        ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of gradients and of weights, as the protocol has them."""

    gradient_bytes: float
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """One collective of a recipe; its payload is all of the content, for ACROSS the shard that a rank holds."""

    collective: Collective
    content: Content
    phase: Phase = Phase.END
    group: Group = Group.REPLICAS

    @property
    def way(self) -> tuple[Collective, Group]:
        """What its cost depends on beside the payload."""
        return self.collective, self.group

    def payload(self, sizes: ElementBytes) -> float:
        """Bytes of the content."""
        return sizes.gradient_bytes if self.content is Content.GRADIENTS else sizes.weight_bytes

    def shares(self, groups: np.ndarray) -> int:
        """How many of a step's groups (`groups_of`) share out the payload: across machines one for each shard."""
        return len(groups) if self.group is Group.ACROSS else 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps of an exchange, in order, and who holds the model's state in shards.

    Attributes:
        steps: what is run; those of one phase follow each other.
        weights: over whom weights are sharded between the passes; None where every rank holds all of them.
        gradients: the same of gradients, while they accumulate; those of one unit are whole before they are scattered.
        optimizer: the same of the optimizer state, and of its update.
        gathered_units: units whose weights are whole at a time where weights are sharded: the one at work and those
            gathered ahead of it; 0 where all stay gathered.
    """

    steps: tuple[ExchangeStep, ...]
    weights: Group | None = None
    gradients: Group | None = None
    optimizer: Group | None = None
    gathered_units: int = 2

    @property
    def held(self) -> tuple[Group | None, Group | None, Group | None]:
        """Over whom weights, gradients and optimizer state are sharded."""
        return self.weights, self.gradients, self.optimizer

    @property
    def among_inner(self) -> tuple[ExchangeStep, ...]:
        """The steps that ranks of one replica run that hold the same, before those across machines or replicas."""
        return tuple(step for step in self.steps if step.group is not Group.ACROSS)

    def during(self, *phases: Phase) -> tuple[ExchangeStep, ...]:
        """The steps of some phases, in order."""
        return tuple(step for step in self.steps if step.phase in phases)


SUMMED = Recipe((ExchangeStep(Collective.ALL_REDUCE, Content.GRADIENTS),))
"""Gradients summed on every rank, once an iteration."""


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

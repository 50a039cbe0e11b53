"""Recipe of an exchange: which collectives move gradients or weights, when, among which ranks, and who shards what.

A scheme states its recipe in its own file. Seconds, bytes, memory, the collectives of a plan and closed forms are read
off the recipe by the functions of this module, which depend on no scheme. A payload is the full size of the gradients
or weights that the ranks have in common. `concurrent` counts groups of the same shape that exchange at the same time on
the same links.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, TypeVar

import numpy as np

from planner.errors import UsageError
from planner.hardware import Cluster, Collective, Terms, collective_s, collective_terms, moved_bytes
from planner.sums import float_sum


class Content(StrEnum):
    """Data that a step moves."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"


class Phase(StrEnum):
    """When a step runs: unit by unit in every forward or backward pass, or once an iteration, around the update."""

    FORWARD = "forward"
    BACKWARD = "backward"
    END = "end"


class Group(StrEnum):
    """Which ranks take part in a step, or hold the shards of some state.

    REPLICAS: all replicas of a stage. INSIDE: the replicas of one machine. ACROSS: the replicas, one of each machine,
    that hold the same shard of what is sharded INSIDE. Where machines hold unequal numbers of replicas, each replica is
    a group of its own for INSIDE. SERVERS: parameter servers, which hold the shards that ranks scatter to and gather
    from.
    """

    REPLICAS = "replicas"
    INSIDE = "inside"
    ACROSS = "across"
    SERVERS = "servers"


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Groups of so many replicas that follow each other, whatever machines they are on, as `Group.INSIDE`.

    Attributes:
        replicas: of a group.
        across: the groups that hold the same shard of what is sharded over such neighbours, as `Group.ACROSS`.
    """

    replicas: int
    across: bool = False


RankGroup = Group | Neighbours
"""Which ranks take part in a step: by a name, or by their number."""


def is_across(group: RankGroup) -> bool:
    """True for groups with one rank of each set that shards something: they divide its payload among them."""
    return group.across if isinstance(group, Neighbours) else group is Group.ACROSS


class ElementBytes(Protocol):
    """Bytes of gradients and of weights: of one element (a `Precision`), or of all of a bucket."""

    @property
    def gradient_bytes(self) -> float:
        """Bytes of gradients, in the format in which they travel."""
        ...

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights."""
        ...


@dataclass(frozen=True, slots=True)
class PayloadBytes:
    """Bytes of gradients and of weights; an `ElementBytes`."""

    gradient_bytes: float
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class ExchangeStep:
    """One collective of a recipe; its payload is the full content, for ACROSS the shard that a rank holds."""

    collective: Collective
    content: Content
    phase: Phase = Phase.END
    group: RankGroup = Group.REPLICAS

    @property
    def way(self) -> tuple[Collective, RankGroup]:
        """Collective and group, on which the cost of a byte depends."""
        return self.collective, self.group

    def payload(self, sizes: ElementBytes) -> float:
        """Bytes of the content."""
        return sizes.gradient_bytes if self.content is Content.GRADIENTS else sizes.weight_bytes

    def shares(self, groups: np.ndarray) -> int:
        """Number of groups (`groups_of`) that divide the payload among them: for ACROSS one group a shard, else 1."""
        return len(groups) if is_across(self.group) else 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """The steps of an exchange, in order, and which group shards the model state.

    Attributes:
        steps: the collectives; those of one phase run one after the other.
        weights: the group over which weights are sharded between the passes; None where every rank holds all of them.
        gradients: the group over which gradients are sharded while they accumulate; the gradients of one unit are
            complete on a rank before they are scattered.
        optimizer: the group over which the optimizer state and its update are sharded.
    """

    steps: tuple[ExchangeStep, ...]
    weights: RankGroup | None = None
    gradients: RankGroup | None = None
    optimizer: RankGroup | None = None

    @property
    def held(self) -> tuple[RankGroup | None, RankGroup | None, RankGroup | None]:
        """The groups over which weights, gradients and optimizer state are sharded."""
        return self.weights, self.gradients, self.optimizer

    @property
    def among_inner(self) -> tuple[ExchangeStep, ...]:
        """The steps without those ACROSS machines."""
        return tuple(step for step in self.steps if not is_across(step.group))

    def during(self, *phases: Phase) -> tuple[ExchangeStep, ...]:
        """The steps of some phases, in order."""
        return tuple(step for step in self.steps if step.phase in phases)


SUMMED = Recipe((ExchangeStep(Collective.ALL_REDUCE, Content.GRADIENTS),))
"""One all-reduce of the gradients an iteration."""


GATHERED_UNITS = 2
"""Units whose weights are gathered at a time, where weights are sharded: the one at work and the next."""

Count = TypeVar("Count", float, np.ndarray)


def recipes() -> dict[int, Recipe]:
    """The recipes that jobs, decisions and plans can choose, by ZeRO stage."""
    from planner.exchange import SCHEMES

    return {scheme.zero: scheme.recipe for _, scheme in SCHEMES.items() if scheme.zero is not None}


@functools.cache
def recipe_of(zero: int, over: int = 0) -> Recipe:
    """The recipe of a ZeRO stage.

    Args:
        zero: the stage.
        over: neighbouring replicas that hold the shards of a whole; 0 for all replicas.

    Raises:
        UsageError: no scheme has that number.
    """
    known = recipes()
    if zero not in known:
        raise UsageError(f"there is no ZeRO stage {zero}", hint=f"use one of {', '.join(map(str, sorted(known)))}")
    return sharded_over(known[zero], over) if over else known[zero]


def sharded_over(recipe: Recipe, over: int) -> Recipe:
    """A recipe whose state is sharded over `over` neighbouring replicas, and equal in all such groups (HSDP).

    What was scattered or gathered over all replicas is so over neighbours; each shard of the gradients is summed over
    the groups once an iteration, as none is complete before (Zhao et al., PyTorch FSDP, VLDB 2023, hybrid sharding;
    Megatron Core, `--num-distributed-optimizer-instances`).
    """
    near, far = Neighbours(over), Neighbours(over, across=True)

    def held(group: RankGroup | None) -> RankGroup | None:
        return near if group is Group.REPLICAS else group

    sharding = any(group is Group.REPLICAS for group in recipe.held)
    if not sharding:
        return recipe
    steps: list[ExchangeStep] = []
    for step in recipe.steps:
        steps.append(replace(step, group=near) if step.group is Group.REPLICAS else step)
        if step.collective is Collective.REDUCE_SCATTER:
            steps.append(ExchangeStep(Collective.ALL_REDUCE, step.content, Phase.END, far))
    return replace(
        recipe,
        steps=tuple(steps),
        weights=held(recipe.weights),
        gradients=held(recipe.gradients),
        optimizer=held(recipe.optimizer),
    )


def groups_of(machine: np.ndarray, ranks: np.ndarray, group: RankGroup) -> np.ndarray:
    """The groups of ranks that run a step at the same time, int64 [groups, ranks of a group].

    Args:
        machine: machine of each rank, aligned with `ranks`.
        ranks: all ranks that exchange, ascending.
        group: which of them form a group.

    Raises:
        UsageError: the group is SERVERS, which are no ranks, or neighbours do not divide the ranks.
    """
    if isinstance(group, Neighbours):
        if len(ranks) % group.replicas:
            hint = "shard over a number that divides them"
            raise UsageError(f"groups of {group.replicas} do not divide {len(ranks)} replicas", hint=hint)
        near = ranks.reshape(-1, group.replicas)
        return near.T if group.across else near
    if group is Group.SERVERS:
        raise UsageError("parameter servers are no ranks of a stage", hint="use a scheme of collectives")
    if group is Group.REPLICAS:
        return ranks[None]
    held = np.unique(machine, return_counts=True)[1]
    inside = ranks.reshape(-1, int(held[0]) if (held == held[0]).all() else 1)
    return inside if group is Group.INSIDE else inside.T


def parts_of(cluster: Cluster, ranks: Sequence[int] | np.ndarray, group: RankGroup | None) -> int:
    """Number of shards into which a group of these ranks cuts some state; 1 for None."""
    if group is None or group is Group.REPLICAS:
        return 1 if group is None else len(ranks)
    return int(_groups(cluster, ranks, group).shape[1])


def rank_part(cluster: Cluster, ranks: Sequence[int] | np.ndarray, group: RankGroup | None) -> float:
    """The part of something that each rank keeps when `group` shards it; 0 of what servers hold."""
    return 0.0 if group is Group.SERVERS else 1 / parts_of(cluster, ranks, group)


def _groups(cluster: Cluster, ranks: Sequence[int] | np.ndarray, group: RankGroup) -> np.ndarray:
    members = np.sort(np.asarray(ranks, dtype=np.int64))
    return groups_of(members // (cluster.node_size or 1), members, group)


def _first_group(cluster: Cluster, step: ExchangeStep, ranks: Sequence[int] | np.ndarray) -> tuple[np.ndarray, int]:
    """The ranks of one group of a step, and the number of groups that divide the payload (`ExchangeStep.shares`)."""
    if step.group is Group.REPLICAS:
        return np.asarray(ranks), 1
    groups = _groups(cluster, ranks, step.group)
    return groups[0], step.shares(groups)


def step_terms(cluster: Cluster, step: ExchangeStep, ranks: Sequence[int] | np.ndarray, concurrent: int = 1) -> Terms:
    """Affine cost of a step, for payloads of any size."""
    members, shares = _first_group(cluster, step, ranks)
    terms = collective_terms(cluster, step.collective, members, concurrent * shares)
    return terms if shares == 1 else Terms(terms.latency_s, terms.s_per_byte / shares)


def step_s(
    cluster: Cluster,
    step: ExchangeStep,
    ranks: Sequence[int] | np.ndarray,
    payload_bytes: float,
    concurrent: int = 1,
) -> float:
    """Seconds of a step; 0 for a single rank or an empty payload."""
    if len(ranks) < 2 or not payload_bytes:
        return 0.0
    members, shares = _first_group(cluster, step, ranks)
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
    """Seconds of all steps of one phase, one after the other, for `elements` elements of `sizes` bytes each."""
    return float_sum(step_s(cluster, s, ranks, elements * s.payload(sizes), concurrent) for s in recipe.during(phase))


def sent_bytes(
    recipe: Recipe,
    sizes: ElementBytes,
    parts: Callable[[RankGroup], int],
    elements: float = 1.0,
    passes: float = 1.0,
) -> float:
    """Bytes that a rank sends in an iteration.

    Args:
        recipe: the steps.
        sizes: bytes of the gradient and of the weight of an element.
        parts: number of ranks of each group.
        elements: elements of the model part.
        passes: forward and backward passes of an iteration.
    """
    total = 0.0
    for step in recipe.steps:
        shares = parts(_sharers(step.group)) if is_across(step.group) else 1
        moved = moved_bytes(step.collective, elements * step.payload(sizes), parts(step.group)) / shares
        total += moved * (1.0 if step.phase is Phase.END else passes)
    return total


def _sharers(group: RankGroup) -> RankGroup:
    """The groups that shard what ranks across them hold alike."""
    return Neighbours(group.replicas) if isinstance(group, Neighbours) else Group.INSIDE


@dataclass(frozen=True, slots=True)
class ModelStateBytes:
    """Bytes of model state that a rank keeps; arrays where the numbers of shards are arrays.

    Attributes:
        weights, gradients, optimizer: state between the passes.
        transient: gathered weights and unscattered gradients of the units at work.
    """

    weights: float | np.ndarray
    gradients: float | np.ndarray
    optimizer: float | np.ndarray
    transient: float | np.ndarray


def kept_bytes(
    recipe: Recipe,
    sizes: ElementBytes,
    state_bytes: float,
    parts: Callable[[RankGroup | None], Count],
    elements: float = 1.0,
    largest: float = 1.0,
    spare_bytes: float = 0.0,
    copy_bytes: float = 0.0,
) -> ModelStateBytes:
    """Bytes of model state that a rank keeps.

    Args:
        recipe: which group shards what.
        sizes: bytes of the gradient and of the weight of an element.
        state_bytes: bytes of optimizer state of an element.
        parts: number of shards into which a group cuts some state, 1 for None.
        elements: elements of the model part.
        largest: elements of its largest unit.
        spare_bytes: bytes of unsharded gradients of an element, kept beside those of `sizes`.
        copy_bytes: bytes of further copies of the weight of an element: of the weights that are not sharded, or of the
            gathered units.
    """
    weights, gradients = parts(recipe.weights), parts(recipe.gradients)
    gathered_bytes = sizes.weight_bytes + copy_bytes
    transient = largest * sizes.gradient_bytes * (np.asarray(gradients) > 1)
    transient = transient + GATHERED_UNITS * largest * gathered_bytes * (np.asarray(weights) > 1)
    return ModelStateBytes(
        weights=elements * (sizes.weight_bytes / weights + copy_bytes * (np.asarray(weights) == 1)),
        gradients=elements * (sizes.gradient_bytes / gradients + spare_bytes),
        optimizer=elements * state_bytes / parts(recipe.optimizer),
        transient=transient,
    )

"""What an exchange is, said once as data: which collective moves what, when and among whom, and what is kept in shards.

A scheme states its recipe in its own file. Seconds, bytes by link, memory, a plan's collectives and closed forms are
readings of it (`planner.exchange.readings`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from planner.hardware import Collective


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

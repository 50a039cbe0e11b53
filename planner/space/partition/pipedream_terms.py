"""Terms that PipeDream's partition problems share: costs, cuts, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from planner.space.partition.pipedream_layers import Layers


class StageCost(StrEnum):
    """How computation and weight exchange of a stage add up."""

    PAPER = "paper"
    """The longer of the two."""
    RELEASED = "released"
    """Their sum, with the bytes of a parameter server."""


class BoundaryBytes(StrEnum):
    """What crosses a cut."""

    LIVE = "live"
    """Results that a layer behind the cut reads, each once."""
    RELEASED = "released"
    """The released code's: results of the last layers before the cut, and of each layer before one of them that has a
    reader which is not before that same one (counted even when every reader lies before the cut)."""


class Frontiers(StrEnum):
    """Where the graph may be cut."""

    ALL = "all"
    """Anywhere: before the cut lies any set of layers that holds the producers of all it reads."""
    FIRST_SOURCE = "first-source"
    """The released code's, which walks the graph from its first source: each of the last layers before a cut depends on
    that source, or on something that one of those which do depends on as well. Other sources run where first read."""


class StashRule(StrEnum):
    """What a replica keeps in memory, with n units on the stages behind it and r its own."""

    STASHED = "stashed"
    """y (weights + activations kept + input received) + optimizer, y = ceil((n + r) / r) minibatches in flight, the one
    at work included; a version of the weights for each."""
    RELEASED = "released"
    """The released code's: ceil(n / r) (weights + activations), nothing for the last stage. On levels above the first a
    whole stage counts as one device's."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A limit on what one device keeps.

    Attributes:
        device_bytes: memory of a device; infinite when it does not matter.
        rule: what is counted.
        optimizer_per_weight: bytes of gradients and optimizer state per byte of weights (2: gradient and momentum),
            under `StashRule.STASHED`.
    """

    device_bytes: float = math.inf
    rule: StashRule = StashRule.STASHED
    optimizer_per_weight: float = 2.0

    def in_flight(self, behind: int, replicas: int) -> int:
        """Minibatches whose activations and weights a replica keeps, with `behind` devices on later stages."""
        return math.ceil((behind + (replicas if self.rule is StashRule.STASHED else 0)) / replicas)

    def needed(self, weight_bytes: float, saved_bytes: float, received_bytes: float, in_flight: int) -> float:
        """Bytes that a replica keeps for so many minibatches."""
        if self.rule is StashRule.RELEASED:
            return in_flight * (weight_bytes + saved_bytes)
        return in_flight * (weight_bytes + saved_bytes + received_bytes) + self.optimizer_per_weight * weight_bytes


NO_LIMIT = Memory()
"""Memory does not matter."""


class CutJudge:
    """Bytes at a cut, from the definition."""

    def __init__(self, layers: Layers, boundary: BoundaryBytes) -> None:
        self.layers = layers
        self.boundary = boundary
        before, self.readers = layers.neighbours()
        self.ancestors: list[set[int]] = []
        for direct in before:
            self.ancestors.append(set(direct).union(*(self.ancestors[i] for i in direct)))
        self.first = next(i for i, direct in enumerate(before) if not direct)

    def last(self, before: frozenset[int]) -> list[int]:
        """Layers before the cut that no other layer before it reads."""
        return [i for i in sorted(before) if not any(reader in before for reader in self.readers[i])]

    def from_first_source(self, before: frozenset[int]) -> bool:
        """Whether a walk from the first source comes to this cut."""
        last = self.last(before)
        reached = [i for i in last if i == self.first or self.first in self.ancestors[i]]
        known = set().union(*(self.ancestors[i] for i in reached))
        return bool(reached) and all(i in reached or self.ancestors[i] & known for i in last)

    def cut_bytes(self, before: frozenset[int]) -> float:
        """Bytes that cross the cut behind a set of layers, one way."""
        if self.boundary is BoundaryBytes.LIVE:
            crossing = {i for i in before if any(reader not in before for reader in self.readers[i])}
        else:
            last = self.last(before)
            crossing = set(last)
            for end in last:
                inside = self.ancestors[end] | {end}
                crossing |= {i for i in self.ancestors[end] if any(r not in inside for r in self.readers[i])}
        return math.fsum(self.layers.output_bytes[sorted(crossing)])

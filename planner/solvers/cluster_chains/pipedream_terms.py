"""Terms of PipeDream's partition problems: layer graph, cost rules, bytes at cuts, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Flag, auto

import numpy as np

from planner.errors import ModelError
from planner.solvers.cluster_chains.verdict import Bytes


@dataclass(frozen=True, eq=False)
class LayerDag:
    """A DAG of n layers, numbered in topological order. Numbers only.

    Attributes:
        compute_s: float64 [n] forward and backward time of one minibatch on one device.
        weight_bytes: float64 [n] trained weights.
        output_bytes: float64 [n] bytes that a cut behind the layer carries forward, and again backward.
        saved_bytes: float64 [n] activations that the layer is the first to keep for the backward pass.
        edges: int64 [m, 2] (producer, consumer), producer < consumer, each once.
    """

    compute_s: np.ndarray
    weight_bytes: np.ndarray
    output_bytes: np.ndarray
    saved_bytes: np.ndarray
    edges: np.ndarray

    def __post_init__(self) -> None:
        count = len(self.compute_s)
        for name in ("weight_bytes", "output_bytes", "saved_bytes"):
            if getattr(self, name).shape != (count,):
                raise ModelError(f"{name} has not one figure for each of {count} layers", where=name)
        figures = (self.compute_s, self.weight_bytes, self.output_bytes, self.saved_bytes)
        if any(not np.isfinite(v).all() or (v < 0).any() for v in figures):
            raise ModelError("a layer has a negative or infinite time or size", hint="check the profile")
        if len(self.edges) and not (self.edges[:, 0] < self.edges[:, 1]).all():
            raise ModelError("layers are not in topological order", where="edges", hint="sort them first")

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.compute_s)

    def neighbours(self) -> tuple[list[list[int]], list[list[int]]]:
        """Producers and consumers of each layer."""
        before: list[list[int]] = [[] for _ in range(self.count)]
        after: list[list[int]] = [[] for _ in range(self.count)]
        for a, b in self.edges.tolist():
            before[b].append(a)
            after[a].append(b)
        return before, after


def chain_layers(
    compute_s: list[float],
    weight_bytes: list[float],
    output_bytes: list[float],
    saved_bytes: list[float] | None = None,
) -> LayerDag:
    """A chain of layers; `saved_bytes` are the output bytes by default."""
    count = len(compute_s)
    edges = np.array([(i, i + 1) for i in range(count - 1)], dtype=np.int64).reshape(-1, 2)
    outputs = np.array(output_bytes, dtype=np.float64)
    saved = outputs if saved_bytes is None else np.array(saved_bytes, dtype=np.float64)
    weights = np.array(weight_bytes, dtype=np.float64)
    return LayerDag(np.array(compute_s, dtype=np.float64), weights, outputs, saved, edges)


class Released(Flag):
    """What is as in the released code, where that differs from the paper."""

    NOTHING = 0
    COST = auto()
    """Computation and weight exchange add up, and the exchange moves the bytes of a parameter server; else the longer
    of the two counts."""
    CUT_BYTES = auto()
    """Across a cut go the results of the last layers before it, and of each ancestor of such a layer that has a reader
    which is neither that layer nor its ancestor (even if all its readers lie before the cut); else the results that a
    layer behind the cut reads, each once."""
    CUTS = auto()
    """Allowed are cuts that a walk from the first source reaches: each last layer before a cut depends on that source,
    or shares an ancestor with a last layer that does; else any set of layers that holds all its producers."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A limit on what one device keeps. A replica's stage has r replicas and the later stages n units.

    It keeps y (weights + kept activations + received input) + optimizer, with y = ceil((n + r) / r) minibatches in
    flight (the present one included), each with its own version of the weights.

    Attributes:
        device_bytes: memory of a device; infinite for no limit.
        optimizer_per_weight: bytes of gradients and optimizer state per byte of weights (2: gradient and momentum).
    """

    device_bytes: float = math.inf
    optimizer_per_weight: float = 2.0

    def in_flight(self, behind: int, replicas: int) -> int:
        """Minibatches that a replica keeps activations and weights of, with `behind` devices on later stages."""
        return math.ceil((behind + replicas) / replicas)

    def needed(self, weight_bytes: Bytes, saved_bytes: Bytes, received_bytes: Bytes, in_flight: int) -> Bytes:
        """Bytes that a replica keeps for so many minibatches in flight."""
        kept: Bytes = in_flight * (weight_bytes + saved_bytes + received_bytes)
        return kept + self.optimizer_per_weight * weight_bytes

    def kept_bytes(
        self, layers: LayerDag, members: Sequence[int], behind: int, replicas: int, received_bytes: float
    ) -> float:
        """Bytes that a replica of a stage keeps.

        Args:
            layers: the network.
            members: layers of the stage.
            behind: devices on later stages.
            replicas: of the stage.
            received_bytes: input of the stage.
        """
        weights, saved = (math.fsum(v[list(members)]) for v in (layers.weight_bytes, layers.saved_bytes))
        return self.needed(weights, saved, received_bytes, self.in_flight(behind, replicas))


NO_LIMIT = Memory()
"""No memory limit."""


class CutJudge:
    """Bytes and validity of cuts, straight from the definitions."""

    def __init__(self, layers: LayerDag, released: Released) -> None:
        self.layers = layers
        self.released = released
        before, self.readers = layers.neighbours()
        self.ancestors: list[set[int]] = []
        for direct in before:
            self.ancestors.append(set(direct).union(*(self.ancestors[i] for i in direct)))
        self.first = next(i for i, direct in enumerate(before) if not direct)

    def last(self, before: frozenset[int]) -> list[int]:
        """Layers before the cut that no other layer before the cut reads."""
        return [i for i in sorted(before) if not any(reader in before for reader in self.readers[i])]

    def from_first_source(self, before: frozenset[int]) -> bool:
        """True if `Released.CUTS` allows this cut."""
        last = self.last(before)
        reached = [i for i in last if i == self.first or self.first in self.ancestors[i]]
        ancestors = set().union(*(self.ancestors[i] for i in reached))
        return bool(reached) and all(i in reached or self.ancestors[i] & ancestors for i in last)

    def cut_bytes(self, before: frozenset[int]) -> float:
        """Bytes that cross the cut behind a set of layers, one way."""
        if Released.CUT_BYTES not in self.released:
            crossing = {i for i in before if any(reader not in before for reader in self.readers[i])}
        else:
            last = self.last(before)
            crossing = set(last)
            for end in last:
                inside = self.ancestors[end] | {end}
                crossing |= {i for i in self.ancestors[end] if any(r not in inside for r in self.readers[i])}
        return math.fsum(self.layers.output_bytes[sorted(crossing)])

"""HetPipe's virtual worker: unlike devices lined up as one pipeline, order and cuts chosen together.

k devices of several types run k stages of a chain, with Nm mini-batches in the pipeline at a time. Stage q = 1..k
keeps the activations (and, if stashed, the weights) of min(Nm, max(k, Nm) - q + 1) of them: k - q + 1 when Nm = k. The
objective is the slowest stage; the stage behind a cut pays its transfers both ways, at the speed between the two types:

    T_q = sum of the stage's layers on its type + 2 * bytes in / bandwidth[type before, type]

Source: Park et al., "HetPipe" (USENIX ATC 2020), sections 4 and 7.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from planner.errors import UsageError
from planner.space.partition import Verdict, covers_chain, even_boundaries, malformed, over_memory
from planner.space.types import Violation


def in_flight(stage: int, stages: int, concurrent: int) -> int:
    """Mini-batches that stage `stage` (0 is the first) of `stages` keeps when `concurrent` are in the pipeline."""
    return min(concurrent, max(stages, concurrent) - stage)


@dataclass(frozen=True, slots=True)
class HetPipeDecision:
    """Who runs what.

    Attributes:
        boundaries: 0, ..., n: stage i runs the layers `boundaries[i]` to `boundaries[i + 1] - 1`.
        types: device type of each stage.
    """

    boundaries: tuple[int, ...]
    types: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class HetPipeProblem:
    """A chain of n layers on one virtual worker with t types of devices. Numbers only.

    Attributes:
        compute_s: float64 [t, n] forward and backward of one mini-batch.
        weight_bytes: float64 [n].
        saved_bytes: float64 [n] activations kept of one mini-batch.
        boundary_bytes: float64 [n + 1] what crosses before layer p, one way.
        counts: devices of each type; all of them are used, unless `use_all` is false.
        memory_bytes: float64 [t].
        bandwidth_byte_per_s: float64 [t, t] of the link from a device of one type to one of another.
        concurrent: Nm, mini-batches in the pipeline at a time.
        stash_weights: weights are kept once for each mini-batch in flight, else once.
        optimizer_per_weight: gradients and optimizer state, bytes per byte of weights.
        use_all: whether every device runs a stage.
    """

    unit: ClassVar[str] = "s"
    """Seconds a mini-batch."""

    compute_s: np.ndarray
    weight_bytes: np.ndarray
    saved_bytes: np.ndarray
    boundary_bytes: np.ndarray
    counts: tuple[int, ...]
    memory_bytes: np.ndarray
    bandwidth_byte_per_s: np.ndarray
    concurrent: int = 1
    stash_weights: bool = True
    optimizer_per_weight: float = 0.0
    use_all: bool = True

    def __post_init__(self) -> None:
        kinds, layers = len(self.counts), len(self.weight_bytes)
        if not layers or sum(self.counts) < 1 or min(self.counts) < 0 or self.concurrent < 1:
            raise UsageError("nothing to decide: no layer, no device or no mini-batch", where="counts")
        shapes = (self.compute_s.shape, self.memory_bytes.shape, self.bandwidth_byte_per_s.shape)
        if shapes != ((kinds, layers), (kinds,), (kinds, kinds)):
            raise UsageError("tables do not agree on types and layers", where="compute_s")
        if self.saved_bytes.shape != (layers,) or self.boundary_bytes.shape != (layers + 1,):
            raise UsageError("sizes do not agree on the layers", where="saved_bytes")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.weight_bytes)

    def judge(self, decision: HetPipeDecision) -> Verdict:
        """Recompute objective and violations; O(layers)."""
        marks, types = decision.boundaries, decision.types
        if not covers_chain(marks, self.layers):
            return malformed("coverage", "the stages do not hold all layers in order")
        if len(types) != len(marks) - 1 or not set(types) <= set(range(len(self.counts))):
            return malformed("devices", "the stages do not have one type of device each")
        faults, times = [], []
        used = Counter(types)
        if any(used[kind] > have for kind, have in enumerate(self.counts)):
            faults.append(Violation("devices", -1, "more devices of a type than there are"))
        elif self.use_all and len(types) < sum(self.counts):
            faults.append(Violation("devices", -1, "a device runs no stage", len(types), sum(self.counts)))
        for stage, (start, stop) in enumerate(itertools.pairwise(marks)):
            kind = types[stage]
            time = math.fsum(self.compute_s[kind, start:stop])
            if stage:
                time += 2 * float(self.boundary_bytes[start]) / float(self.bandwidth_byte_per_s[types[stage - 1], kind])
            times.append(time)
            faults += self._memory(stage, len(types), kind, start, stop)
        return Verdict(max(times), tuple(faults), tuple(times))

    def _memory(self, stage: int, stages: int, kind: int, start: int, stop: int) -> tuple[Violation, ...]:
        kept = in_flight(stage, stages, self.concurrent)
        versions = (kept if self.stash_weights else 1) + self.optimizer_per_weight
        needed = versions * math.fsum(self.weight_bytes[start:stop]) + kept * math.fsum(self.saved_bytes[start:stop])
        have = float(self.memory_bytes[kind])
        return over_memory(stage, needed, have, f"stage {stage} keeps {needed:.0f} of {have:.0f} bytes")

    def trivial(self) -> tuple[tuple[str, HetPipeDecision], ...]:
        """The same number of layers on every device, types as listed; all on one device of the first type."""
        devices = [kind for kind, count in enumerate(self.counts) for _ in range(count)][: self.layers]
        return (
            ("even-split", HetPipeDecision(even_boundaries(self.layers, len(devices)), tuple(devices))),
            ("one-device", HetPipeDecision((0, self.layers), (devices[0],))),
        )


def uniform_links(kinds: int, bandwidth_byte_per_s: float) -> np.ndarray:
    """The same bandwidth between all types, float64 [t, t]."""
    return np.full((kinds, kinds), bandwidth_byte_per_s)

"""Galvatron's inner search: a strategy for every layer under a device's memory (Miao et al., VLDB 2023).

Each layer of a chain runs by one of S strategies (a mix of tensor and data parallelism, sharded states, recompute),
which sets its time and its memory on every device. Where neighbouring layers differ, tensors change their layout:

    time   = sum of time[l, s_l] + sum over all l but the first of switch[l, s_{l-1}, s_l]
    memory = sum of fixed[l, s_l] <= memory of a device
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from planner.errors import JobError
from planner.solvers.cluster_chains.verdict import PartitionVerdict, malformed, over_memory
from planner.space.types import Violation

LayerDecision = tuple[int, ...]
"""The strategy of every layer."""


@dataclass(frozen=True, eq=False)
class LayerChoice:
    """An instance, numbers only. L layers, S strategies.

    Attributes:
        time_s: [L, S] time of a layer; infinite where it cannot run so.
        fixed_bytes: [L, S] memory of a layer on a device.
        switch_s: [L, S, S] time to go from the strategy of layer l - 1 (row) to that of layer l (column); that of the
            first layer is not read. [S, S] when all layers agree.
        memory_bytes: memory of a device.
    """

    unit: ClassVar[str] = "s"
    """Unit of the objective."""

    time_s: np.ndarray
    fixed_bytes: np.ndarray
    switch_s: np.ndarray
    memory_bytes: float

    def __post_init__(self) -> None:
        layers, count = self.time_s.shape
        if layers < 1 or count < 1:
            raise JobError("a layer-wise problem needs a layer and a strategy")
        if self.fixed_bytes.shape != (layers, count):
            raise JobError(f"memory must have shape {(layers, count)}, not {self.fixed_bytes.shape}")
        if self.switch_s.shape not in ((count, count), (layers, count, count)):
            raise JobError(f"switches must have shape {(count, count)} or {(layers, count, count)}")
        if not all(np.all(table >= 0) for table in (self.time_s, self.switch_s, self.fixed_bytes)):
            raise JobError("times, switches and memory must not be negative")

    @property
    def layers(self) -> int:
        """L."""
        return int(self.time_s.shape[0])

    @property
    def strategies(self) -> int:
        """S."""
        return int(self.time_s.shape[1])

    def switch_before(self, layer: int) -> np.ndarray:
        """[S, S] time to change the layout between layer - 1 and layer."""
        table: np.ndarray = self.switch_s if self.switch_s.ndim == 2 else self.switch_s[layer]
        return table

    def judge(self, decision: LayerDecision) -> PartitionVerdict:
        """Time of a decision and every limit it breaks."""
        if len(decision) != self.layers:
            return malformed("coverage", f"names {len(decision)} strategies for {self.layers} layers")
        wrong = [layer for layer, s in enumerate(decision) if not 0 <= s < self.strategies]
        if wrong:
            return malformed("option", f"layer {wrong[0]} has no strategy {decision[wrong[0]]}", wrong[0])
        seconds, needed = 0.0, 0.0
        for layer, s in enumerate(decision):
            seconds += float(self.time_s[layer, s])
            if layer:
                seconds += float(self.switch_before(layer)[decision[layer - 1], s])
            needed += float(self.fixed_bytes[layer, s])
        message = f"needs {needed:.0f} bytes of {self.memory_bytes:.0f}"
        violations = list(over_memory(0, needed, self.memory_bytes, message))
        if not np.isfinite(seconds):
            violations.append(Violation("option", 0, "a layer cannot run by its strategy"))
        return PartitionVerdict(seconds, tuple(violations), (seconds,))

    def trivial(self) -> tuple[tuple[str, LayerDecision], ...]:
        """The same strategy for every layer, for each strategy."""
        return tuple((f"all strategy {s}", (s,) * self.layers) for s in range(self.strategies))

"""Layer-wise strategies under one device's memory: a choice for every layer, and a price for changing between layers.

Layers form a chain. Each runs by one of S strategies (a mix of tensor and data parallelism, sharded states, recompute),
which sets its time and its memory on every device; where neighbouring layers differ, tensors are laid out anew:

    time   = sum of time[l, s_l] + sum over l > 0 of switch[l, s_{l-1}, s_l]
    memory = sum of memory[l, s_l] <= capacity

This is the inner search of Galvatron (Miao et al., VLDB 2023), there a table over every unit of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.errors import JobError
from planner.memory import fits
from planner.space.partition.types import Verdict
from planner.space.types import Violation


@dataclass(frozen=True, slots=True)
class LayerwiseDecision:
    """The strategy of every layer."""

    strategies: tuple[int, ...]


@dataclass(frozen=True)
class LayerwiseProblem:
    """An instance, numbers only. L layers, S strategies.

    Attributes:
        time_s: [L, S] time of a layer; infinite where a layer cannot run so.
        memory_bytes: [L, S] memory of a layer on a device.
        switch_s: [L, S, S] time to go from the strategy of layer l - 1 (row) to that of layer l (column); that of the
            first layer is not read. [S, S] when all layers agree.
        capacity_bytes: memory of a device.
        strategy_names: [S] for messages.
    """

    time_s: np.ndarray
    memory_bytes: np.ndarray
    switch_s: np.ndarray
    capacity_bytes: float
    strategy_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        layers, count = self.time_s.shape
        if layers < 1 or count < 1:
            raise JobError("a layer-wise problem needs a layer and a strategy")
        if self.memory_bytes.shape != (layers, count):
            raise JobError(f"memory must have shape {(layers, count)}, not {self.memory_bytes.shape}")
        if self.switch_s.shape not in ((count, count), (layers, count, count)):
            raise JobError(f"switches must have shape {(count, count)} or {(layers, count, count)}")
        if not np.all(self.time_s >= 0) or not np.all(self.switch_s >= 0) or not np.all(self.memory_bytes >= 0):
            raise JobError("times, switches and memory must not be negative")

    @property
    def unit(self) -> str:
        """Unit of the objective."""
        return "s"

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

    def judge(self, decision: LayerwiseDecision) -> Verdict:
        """Time of a decision and every limit it breaks; the parts are the layers' times, switches included."""
        chosen = decision.strategies
        if len(chosen) != self.layers:
            message = f"names {len(chosen)} strategies for {self.layers} layers"
            return Verdict(float("inf"), (Violation("coverage", -1, message),))
        wrong = [layer for layer, s in enumerate(chosen) if not 0 <= s < self.strategies]
        if wrong:
            message = f"layer {wrong[0]} has no strategy {chosen[wrong[0]]}"
            return Verdict(float("inf"), (Violation("option", wrong[0], message),))
        parts, needed = [], 0.0
        for layer, s in enumerate(chosen):
            seconds = float(self.time_s[layer, s])
            if layer > 0:
                seconds += float(self.switch_before(layer)[chosen[layer - 1], s])
            parts.append(seconds)
            needed += float(self.memory_bytes[layer, s])
        violations = [
            Violation("option", layer, f"layer {layer} cannot run by strategy {chosen[layer]}")
            for layer, seconds in enumerate(parts)
            if not np.isfinite(seconds)
        ]
        if not fits(needed, self.capacity_bytes):
            message = f"needs {needed:.0f} bytes of {self.capacity_bytes:.0f}"
            violations.append(Violation("memory", -1, message, needed, self.capacity_bytes))
        return Verdict(sum(parts), tuple(violations), tuple(parts))

    def trivial(self) -> tuple[tuple[str, LayerwiseDecision], ...]:
        """The same strategy for every layer, for each strategy."""
        names = self.strategy_names or tuple(f"strategy {s}" for s in range(self.strategies))
        return tuple((f"all {names[s]}", LayerwiseDecision((s,) * self.layers)) for s in range(self.strategies))

"""Layer-wise strategies, and where to cut: a choice for every layer under a device's memory (`LayerChoice`).

Layers form a chain, cut into a given number of stages on as many groups of devices of one size. Each layer runs by one
of S strategies (a mix of tensor and data parallelism, sharded states, recompute), which sets its time and its memory on
every device; where neighbouring layers of a stage differ, tensors are laid out anew:

    stage time     = boundary before it + sum of time[l, s_l] + sum over its l but the first of switch[l, s_{l-1}, s_l]
    iteration time = sum of stage times + (M - 1) * longest stage time
    in flight      = min(stages from this one to the last, M)
    stage memory   = sum of fixed[l, s_l] + in flight * activation[l, s_l] <= memory of a device

With one stage this is the inner search of Galvatron (Miao et al., VLDB 2023), there a table over every unit of memory;
Galvatron cuts evenly and then chooses strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from planner.errors import JobError
from planner.space.partition.verdict import Verdict, malformed, over_memory
from planner.space.types import Violation


@dataclass(frozen=True, slots=True)
class LayerDecision:
    """The strategy of every layer, and the first layer of every stage."""

    strategies: tuple[int, ...]
    starts: tuple[int, ...] = (0,)


@dataclass(frozen=True, eq=False)
class LayerChoice:
    """An instance, numbers only. L layers, S strategies.

    Attributes:
        time_s: [L, S] time of a layer for one micro-batch; infinite where it cannot run so.
        fixed_bytes: [L, S] memory of a layer on a device whatever is in flight.
        switch_s: [L, S, S] time to go from the strategy of layer l - 1 (row) to that of layer l (column); that of the
            first layer is not read. [S, S] when all layers agree.
        memory_bytes: memory of a device.
        activation_bytes: [L, S] memory of a layer for every micro-batch in flight; None for none.
        boundary_s: [L] time to receive the input of layer l where it begins a stage; the first is not read. None for
            none.
        stages: how many stages.
        micro_batches: M.
        strategy_names: [S] for messages.
    """

    unit: ClassVar[str] = "s"
    """Unit of the objective."""

    time_s: np.ndarray
    fixed_bytes: np.ndarray
    switch_s: np.ndarray
    memory_bytes: float
    activation_bytes: np.ndarray | None = None
    boundary_s: np.ndarray | None = None
    stages: int = 1
    micro_batches: int = 1
    strategy_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        layers, count = self.time_s.shape
        if layers < 1 or count < 1:
            raise JobError("a layer-wise problem needs a layer and a strategy")
        if any(
            table is not None and table.shape != (layers, count) for table in (self.fixed_bytes, self.activation_bytes)
        ):
            raise JobError(f"memory must have shape {(layers, count)}, not {self.fixed_bytes.shape}")
        if self.switch_s.shape not in ((count, count), (layers, count, count)):
            raise JobError(f"switches must have shape {(count, count)} or {(layers, count, count)}")
        if not np.all(self.time_s >= 0) or not np.all(self.switch_s >= 0) or not np.all(self.kept_bytes(1) >= 0):
            raise JobError("times, switches and memory must not be negative")
        if self.boundary_s is not None and self.boundary_s.shape != (layers,):
            raise JobError(f"boundaries must have shape {(layers,)}, not {self.boundary_s.shape}")
        if not 1 <= self.stages <= layers or self.micro_batches < 1:
            raise JobError(f"{layers} layers need 1 to {layers} stages and a micro-batch at least")

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

    def boundary_before(self, layer: int) -> float:
        """Time to receive the input of a layer that begins a stage."""
        return float(self.boundary_s[layer]) if layer and self.boundary_s is not None else 0.0

    def kept_bytes(self, in_flight: int) -> np.ndarray:
        """[L, S] memory of a layer with so many micro-batches in flight."""
        return (
            self.fixed_bytes if self.activation_bytes is None else self.fixed_bytes + in_flight * self.activation_bytes
        )

    def part(self, first: int, last: int, in_flight: int) -> LayerChoice:
        """The choice of strategies in a stage of layers `first` to `last`, for one micro-batch."""
        rows = slice(first, last + 1)
        switch_s = self.switch_s if self.switch_s.ndim == 2 else self.switch_s[rows]
        return LayerChoice(self.time_s[rows], self.kept_bytes(in_flight)[rows], switch_s, self.memory_bytes)

    def judge(self, decision: LayerDecision) -> Verdict:
        """Iteration time of a decision and every limit it breaks; the parts are the stage times."""
        starts, chosen = decision.starts, decision.strategies
        if (
            len(starts) != self.stages
            or starts[0] != 0
            or list(starts) != sorted({*starts})
            or starts[-1] >= self.layers
        ):
            return malformed("coverage", f"stages begin at {starts}; there are {self.layers} layers")
        if len(chosen) != self.layers:
            return malformed("coverage", f"names {len(chosen)} strategies for {self.layers} layers")
        wrong = [layer for layer, s in enumerate(chosen) if not 0 <= s < self.strategies]
        if wrong:
            return malformed("option", f"layer {wrong[0]} has no strategy {chosen[wrong[0]]}", wrong[0])
        violations, times = [], []
        for position, (first, stop) in enumerate(zip(starts, (*starts[1:], self.layers), strict=True)):
            kept = self.kept_bytes(min(self.stages - position, self.micro_batches))
            seconds, needed = self.boundary_before(first), 0.0
            for layer in range(first, stop):
                s = chosen[layer]
                seconds += float(self.time_s[layer, s])
                if layer > first:
                    seconds += float(self.switch_before(layer)[chosen[layer - 1], s])
                needed += float(kept[layer, s])
            times.append(seconds)
            if not np.isfinite(seconds):
                violations.append(Violation("option", position, "a layer cannot run by its strategy"))
            message = f"needs {needed:.0f} bytes of {self.memory_bytes:.0f}"
            violations += over_memory(position, needed, self.memory_bytes, message)
        total = sum(times) + (self.micro_batches - 1) * max(times)
        return Verdict(total, tuple(violations), tuple(times))

    def trivial(self) -> tuple[tuple[str, LayerDecision], ...]:
        """Even stages, the same strategy for every layer, for each strategy."""
        starts = tuple(self.layers * s // self.stages for s in range(self.stages))
        names = self.strategy_names or tuple(f"strategy {s}" for s in range(self.strategies))
        return tuple((f"all {names[s]}", LayerDecision((s,) * self.layers, starts)) for s in range(self.strategies))

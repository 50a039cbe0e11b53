"""Layer-wise strategies under one device's memory: a choice for every layer, and a price for changing between layers.

Layers form a chain. Each runs by one of S strategies (a mix of tensor and data parallelism, sharded states, recompute),
which sets its time and its memory on every device; where neighbouring layers differ, tensors are laid out anew:

    time   = sum of time[l, s_l] + sum over l > 0 of switch[l, s_{l-1}, s_l]
    memory = sum of memory[l, s_l] <= capacity

This is the inner search of Galvatron (Miao et al., VLDB 2023), there a table over every unit of memory.

Layer-wise strategies and pipeline cuts together: which layers a stage has, and how each of them runs.

Layers form a chain, cut into a given number of stages on as many groups of devices of one size. Each layer runs by one
of S strategies; memory grows with the micro-batches a stage keeps:

    stage time     = boundary before it + sum of time[l, s_l] + switches between its layers
    iteration time = sum of stage times + (M - 1) * longest stage time
    in flight      = min(stages from this one to the last, M)
    stage memory   = sum of fixed[l, s_l] + in flight * activation[l, s_l] <= capacity

With one stage this is `LayerwiseProblem`. Galvatron (Miao et al., VLDB 2023) cuts evenly and then chooses strategies.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from planner.errors import JobError
from planner.space.partition import Verdict, malformed, over_memory
from planner.space.types import Violation


def switch_table(switch_s: np.ndarray, layer: int) -> np.ndarray:
    """[S, S] time to change the layout between layer - 1 and layer, from the table of all layers or of each."""
    table: np.ndarray = switch_s if switch_s.ndim == 2 else switch_s[layer]
    return table


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

    unit: ClassVar[str] = "s"
    """Unit of the objective."""

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
    def layers(self) -> int:
        """L."""
        return int(self.time_s.shape[0])

    @property
    def strategies(self) -> int:
        """S."""
        return int(self.time_s.shape[1])

    def switch_before(self, layer: int) -> np.ndarray:
        """[S, S] time to change the layout between layer - 1 and layer."""
        return switch_table(self.switch_s, layer)

    def judge(self, decision: LayerwiseDecision) -> Verdict:
        """Time of a decision and every limit it breaks; the parts are the layers' times, switches included."""
        chosen = decision.strategies
        if len(chosen) != self.layers:
            return malformed("coverage", f"names {len(chosen)} strategies for {self.layers} layers")
        wrong = [layer for layer, s in enumerate(chosen) if not 0 <= s < self.strategies]
        if wrong:
            return malformed("option", f"layer {wrong[0]} has no strategy {chosen[wrong[0]]}", wrong[0])
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
        message = f"needs {needed:.0f} bytes of {self.capacity_bytes:.0f}"
        violations += over_memory(-1, needed, self.capacity_bytes, message)
        return Verdict(sum(parts), tuple(violations), tuple(parts))

    def trivial(self) -> tuple[tuple[str, LayerwiseDecision], ...]:
        """The same strategy for every layer, for each strategy."""
        names = self.strategy_names or tuple(f"strategy {s}" for s in range(self.strategies))
        return tuple((f"all {names[s]}", LayerwiseDecision((s,) * self.layers)) for s in range(self.strategies))


@dataclass(frozen=True, slots=True)
class LayerwisePipelineDecision:
    """First layer of every stage, and the strategy of every layer."""

    starts: tuple[int, ...]
    strategies: tuple[int, ...]


@dataclass(frozen=True)
class LayerwisePipelineProblem:
    """An instance, numbers only. L layers, S strategies.

    Attributes:
        time_s: [L, S] time of a layer for one micro-batch; infinite where it cannot run so.
        fixed_bytes: [L, S] memory of a layer whatever is in flight.
        activation_bytes: [L, S] memory of a layer for every micro-batch in flight.
        switch_s: [L, S, S] or [S, S] time to change from the strategy of the layer before (see `LayerwiseProblem`).
        boundary_s: [L] time to receive the input of layer l where it begins a stage; the first is not read.
        stages: how many stages.
        micro_batches: M.
        capacity_bytes: memory of a device.
    """

    unit: ClassVar[str] = "s"
    """Unit of the objective."""

    time_s: np.ndarray
    fixed_bytes: np.ndarray
    activation_bytes: np.ndarray
    switch_s: np.ndarray
    boundary_s: np.ndarray
    stages: int
    micro_batches: int
    capacity_bytes: float

    def __post_init__(self) -> None:
        if self.fixed_bytes.shape != self.time_s.shape or self.activation_bytes.shape != self.time_s.shape:
            raise JobError(f"memory must have the times' shape {self.time_s.shape}")
        if self.boundary_s.shape != (self.layers,):
            raise JobError(f"boundaries must have shape {(self.layers,)}, not {self.boundary_s.shape}")
        if not 1 <= self.stages <= self.layers or self.micro_batches < 1:
            raise JobError(f"{self.layers} layers need 1 to {self.layers} stages and a micro-batch at least")
        self.part(0, self.layers - 1, 1)  # refuses what a layer-wise problem refuses

    @property
    def layers(self) -> int:
        """L."""
        return int(self.time_s.shape[0])

    def in_flight(self, position: int) -> int:
        """Micro-batches that a stage keeps."""
        return min(self.stages - position, self.micro_batches)

    def part(self, first: int, last: int, in_flight: int) -> LayerwiseProblem:
        """The choice of strategies in a stage of layers `first` to `last`."""
        rows = slice(first, last + 1)
        return LayerwiseProblem(
            self.time_s[rows],
            self.fixed_bytes[rows] + in_flight * self.activation_bytes[rows],
            self.switch_s if self.switch_s.ndim == 2 else self.switch_s[rows],
            self.capacity_bytes,
        )

    def judge(self, decision: LayerwisePipelineDecision) -> Verdict:
        """Iteration time of a decision and every limit it breaks; the parts are the stage times."""
        starts, chosen = decision.starts, decision.strategies
        ascending = all(a < b for a, b in itertools.pairwise(starts))
        if len(starts) != self.stages or starts[0] != 0 or not ascending or starts[-1] >= self.layers:
            return malformed("coverage", f"{self.stages} stages must begin at ascending layers, the first at 0")
        if len(chosen) != self.layers or not all(0 <= s < self.time_s.shape[1] for s in chosen):
            return malformed("option", "every layer needs one of its strategies")
        violations, times = [], []
        for position, (first, stop) in enumerate(zip(starts, (*starts[1:], self.layers), strict=True)):
            seconds = float(self.boundary_s[first]) if first else 0.0
            needed = 0.0
            for layer in range(first, stop):
                s = chosen[layer]
                seconds += float(self.time_s[layer, s])
                if layer > first:
                    seconds += float(switch_table(self.switch_s, layer)[chosen[layer - 1], s])
                kept = self.in_flight(position) * float(self.activation_bytes[layer, s])
                needed += float(self.fixed_bytes[layer, s]) + kept
            times.append(seconds)
            if not np.isfinite(seconds):
                violations.append(Violation("option", position, "a layer cannot run by its strategy"))
            message = f"needs {needed:.0f} bytes of {self.capacity_bytes:.0f}"
            violations += over_memory(position, needed, self.capacity_bytes, message)
        total = sum(times) + (self.micro_batches - 1) * max(times)
        return Verdict(total, tuple(violations), tuple(times))

    def trivial(self) -> tuple[tuple[str, LayerwisePipelineDecision], ...]:
        """Even stages, the same strategy for every layer, for each strategy."""
        starts = tuple(self.layers * s // self.stages for s in range(self.stages))
        return tuple(
            (f"even stages, strategy {s}", LayerwisePipelineDecision(starts, (s,) * self.layers))
            for s in range(self.time_s.shape[1])
        )

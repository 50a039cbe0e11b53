"""Iteration time of a synchronous pipeline over device meshes: sum of the stage times plus (M - 1) times the longest.

A chain of L layers is cut into stages; every stage runs on a mesh of its own, one of C configurations (a mesh's shape
and how the layers are sharded on it), and meshes are laid in line over D devices, the first stage first. With M
micro-batches (Zheng et al., "Alpa", OSDI 2022, section 5):

    stage time     = time of its layers in its configuration + transfer over the boundary before it
    iteration time = sum of stage times + (M - 1) * longest stage time
    in flight      = min(stages from this one to the last, M)
    memory         = fixed bytes + in flight * activation bytes <= memory of a device

The transfer is the addition to the published cost: it depends on where the boundary lies, since neighbouring meshes
share fast links inside a server and slow ones between servers. `boundary_level` says which level of links a boundary
crosses when the next mesh starts at device p.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from planner.errors import JobError
from planner.space.partition.verdict import Verdict, over_memory
from planner.space.types import Violation


@dataclass(frozen=True, slots=True)
class MeshStage:
    """Layers `first` to `last`, both included, in configuration `config`."""

    first: int
    last: int
    config: int


@dataclass(frozen=True, slots=True)
class IterationDecision:
    """Stages in pipeline order."""

    stages: tuple[MeshStage, ...]


@dataclass(frozen=True)
class IterationProblem:
    """An instance, numbers only. L layers, C configurations, V levels of links.

    Attributes:
        time_s: [L, L, C] `time_s[i, j, c]`: one micro-batch through layers i..j; infinite where it cannot be.
        config_devices: [C] devices of a configuration's mesh.
        devices: D.
        micro_batches: M.
        fixed_bytes: [L, L, C] memory of a device whatever is in flight; None when memory does not limit.
        activation_bytes: [L, L, C] memory of a device for every micro-batch in flight.
        memory_bytes: what a device has.
        boundary_s: [V, L] time to move the input of layer i over links of level v; None when boundaries are free.
        boundary_level: [D] level of the links before device p; read where a stage starts at device p > 0.
        use_all: all devices must be used, as the published search demands; else at most all.
    """

    unit: ClassVar[str] = "s"
    """Unit of the objective."""

    time_s: np.ndarray
    config_devices: np.ndarray
    devices: int
    micro_batches: int
    fixed_bytes: np.ndarray | None = None
    activation_bytes: np.ndarray | None = None
    memory_bytes: float = float("inf")
    boundary_s: np.ndarray | None = None
    boundary_level: np.ndarray | None = None
    use_all: bool = True
    names: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        layers = self.time_s.shape[0]
        shape = (layers, layers, len(self.config_devices))
        tables = (self.time_s, self.fixed_bytes, self.activation_bytes)
        if layers < 1 or any(table is not None and table.shape != shape for table in tables):
            raise JobError(f"stage costs must have shape {shape}", hint="one entry a first layer, last layer, mesh")
        if (self.fixed_bytes is None) != (self.activation_bytes is None):
            raise JobError("fixed and activation bytes go together", hint="give both or none")
        if (self.boundary_s is None) != (self.boundary_level is None):
            raise JobError("boundary times and levels go together", hint="give both or none")
        if self.micro_batches < 1 or self.devices < 1 or len(self.config_devices) < 1 or self.config_devices.min() < 1:
            raise JobError("micro-batches, devices and mesh sizes start at 1")

    @property
    def layers(self) -> int:
        """L."""
        return int(self.time_s.shape[0])

    def judge(self, decision: IterationDecision) -> Verdict:
        """Iteration time of a decision and every limit it breaks; the parts are the stage times."""
        violations = self._coverage(decision)
        if violations:
            return Verdict(float("inf"), tuple(violations))
        start, times = 0, []
        for position, stage in enumerate(decision.stages):
            times.append(self._seconds(stage, start))
            if not np.isfinite(times[-1]):
                message = f"layers {stage.first}..{stage.last} cannot run in configuration {stage.config}"
                violations.append(Violation("option", position, message))
            violations += self._memory(stage, position, min(len(decision.stages) - position, self.micro_batches))
            start += int(self.config_devices[stage.config])
        if start > self.devices or (self.use_all and start < self.devices):
            violations.append(Violation("devices", -1, f"takes {start} devices", start, self.devices))
        total = sum(times) + (self.micro_batches - 1) * max(times)
        return Verdict(total, tuple(violations), tuple(times))

    def _coverage(self, decision: IterationDecision) -> list[Violation]:
        found, reached = [], 0
        for position, stage in enumerate(decision.stages):
            if stage.first != reached or stage.last < stage.first:
                found.append(Violation("coverage", position, f"starts at layer {stage.first}, not at {reached}"))
            if not 0 <= stage.config < len(self.config_devices):
                found.append(Violation("option", position, f"there is no configuration {stage.config}"))
            reached = stage.last + 1
        if reached != self.layers:
            found.append(Violation("coverage", -1, f"ends at layer {reached} of {self.layers}"))
        return found

    def _seconds(self, stage: MeshStage, start: int) -> float:
        seconds = float(self.time_s[stage.first, stage.last, stage.config])
        if stage.first > 0 and self.boundary_s is not None and self.boundary_level is not None:
            level = int(self.boundary_level[min(start, self.devices - 1)])
            seconds += float(self.boundary_s[level, stage.first])
        return seconds

    def _memory(self, stage: MeshStage, position: int, in_flight: int) -> tuple[Violation, ...]:
        if self.fixed_bytes is None or self.activation_bytes is None:
            return ()
        at = stage.first, stage.last, stage.config
        needed = float(self.fixed_bytes[at] + in_flight * self.activation_bytes[at])
        message = f"needs {needed:.0f} bytes with {in_flight} micro-batches in flight"
        return over_memory(position, needed, self.memory_bytes, message)

    def trivial(self) -> tuple[tuple[str, IterationDecision], ...]:
        """One stage on the largest mesh, and even pipelines of equal meshes, each in its fastest configuration."""
        plans = []
        for size in sorted({int(n) for n in self.config_devices}, reverse=True):
            stages = self.devices // size
            if size <= self.devices and stages <= self.layers and (stages * size == self.devices or not self.use_all):
                cuts = [self.layers * s // stages for s in range(stages + 1)]
                meshes = [self._fastest(a, b - 1, size) for a, b in itertools.pairwise(cuts)]
                label = "one stage" if stages == 1 else f"{stages} even stages"
                plans.append((label, IterationDecision(tuple(meshes))))
        return tuple(plans)

    def _fastest(self, first: int, last: int, size: int) -> MeshStage:
        configs = np.flatnonzero(self.config_devices == size)
        return MeshStage(first, last, int(configs[np.argmin(self.time_s[first, last, configs])]))


def boundary_levels(devices: int, group_sizes: tuple[int, ...]) -> np.ndarray:
    """[D] the level of links before each device in line, for groups of devices nested in one another.

    Args:
        devices: D.
        group_sizes: devices under one switch at each level from the inside, the outermost left out: `(8,)` for
            servers of 8 devices gives level 1 before every eighth device and level 0 before the others.
    """
    position = np.arange(devices)
    levels = np.zeros(devices, dtype=np.int64)
    for size in group_sizes:
        levels += position % size == 0
    return levels

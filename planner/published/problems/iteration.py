"""Alpa's problem: iteration time of a synchronous pipeline with M micro-batches (Zheng et al., OSDI 2022, section 5).

A chain of L layers is cut into stages. Each stage runs on a mesh of its own in one of C configurations (mesh shape and
sharding of the layers on it), and the meshes are placed in line on D devices, the first stage first.

    iteration time = sum of stage times + (M - 1) * longest stage time
    in flight      = min(stages from this one to the last, M)
    stage time     = time of its layers in its configuration + transfer over the boundary before it
    memory         = fixed bytes + in flight * activation bytes <= memory of a device

The transfer is an addition to the published cost. It depends on the place of the boundary: neighbouring meshes are
joined by fast links inside a server and by slow ones between servers. `boundary_level` is the level of links that a
boundary crosses if the next mesh starts at device p.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from planner.errors import JobError
from planner.solvers.cluster_chains.verdict import PartitionVerdict, over_memory
from planner.space.types import Violation
from planner.sums import float_sum


@dataclass(frozen=True, slots=True)
class MeshStage:
    """Layers `first` to `last` (inclusive) in configuration `config`."""

    first: int
    last: int
    config: int


IterationDecision = tuple[MeshStage, ...]
"""Stages in pipeline order."""


@dataclass(frozen=True)
class IterationProblem:
    """An instance, numbers only. L layers, C configurations, V levels of links.

    Attributes:
        time_s: [L, L, C] `time_s[i, j, c]`: one micro-batch through layers i..j; infinite where that is impossible.
        config_devices: [C] devices of a configuration's mesh.
        devices: D.
        micro_batches: M.
        fixed_bytes: [L, L, C] memory of a device independent of the micro-batches in flight; None for no limit.
        activation_bytes: [L, L, C] memory of a device for each micro-batch in flight.
        memory_bytes: memory of a device.
        boundary_s: [V, L] time to move the input of layer i over links of level v; None if boundaries are free.
        boundary_level: [D] level of the links before device p; read where a stage starts at device p > 0.
        use_all: whether all devices must be used, as in the published search.
        names: [C] of the configurations, for reports; may be empty.
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

    def judge(self, decision: IterationDecision) -> PartitionVerdict:
        """Iteration time of a decision and every limit it breaks; the parts are the stage times."""
        violations = self._coverage(decision)
        if violations:
            return PartitionVerdict(float("inf"), tuple(violations))
        start, times, kept = 0, [], []
        for position, stage in enumerate(decision):
            times.append(self._seconds(stage, start))
            if not np.isfinite(times[-1]):
                message = f"layers {stage.first}..{stage.last} cannot run in configuration {stage.config}"
                violations.append(Violation("option", position, message))
            if self.fixed_bytes is not None and self.activation_bytes is not None:
                at, in_flight = (
                    (stage.first, stage.last, stage.config),
                    min(len(decision) - position, self.micro_batches),
                )
                kept.append(float(self.fixed_bytes[at] + in_flight * self.activation_bytes[at]))
                message = f"needs {kept[-1]:.0f} bytes with {in_flight} micro-batches in flight"
                violations += over_memory(position, kept[-1], self.memory_bytes, message)
            start += int(self.config_devices[stage.config])
        if start > self.devices or (self.use_all and start < self.devices):
            violations.append(Violation("devices", -1, f"takes {start} devices", start, self.devices))
        total = float_sum(times) + (self.micro_batches - 1) * max(times)
        return PartitionVerdict(total, tuple(violations), tuple(times), tuple(kept))

    def _coverage(self, decision: IterationDecision) -> list[Violation]:
        violations, expected = [], 0
        for position, stage in enumerate(decision):
            if stage.first != expected or stage.last < stage.first:
                violations.append(Violation("coverage", position, f"starts at layer {stage.first}, not at {expected}"))
            if not 0 <= stage.config < len(self.config_devices):
                violations.append(Violation("option", position, f"there is no configuration {stage.config}"))
            expected = stage.last + 1
        if expected != self.layers:
            violations.append(Violation("coverage", -1, f"ends at layer {expected} of {self.layers}"))
        return violations

    def _seconds(self, stage: MeshStage, start: int) -> float:
        seconds = float(self.time_s[stage.first, stage.last, stage.config])
        if stage.first > 0 and self.boundary_s is not None and self.boundary_level is not None:
            level = int(self.boundary_level[min(start, self.devices - 1)])
            seconds += float(self.boundary_s[level, stage.first])
        return seconds

    def trivial(self) -> tuple[tuple[str, IterationDecision], ...]:
        """One stage on the largest mesh, and even stages on equal meshes, each in its fastest configuration."""
        plans = []
        for size in sorted({int(n) for n in self.config_devices}, reverse=True):
            stages = self.devices // size
            if size <= self.devices and stages <= self.layers and (stages * size == self.devices or not self.use_all):
                cuts = [self.layers * s // stages for s in range(stages + 1)]
                meshes = [self._fastest(a, b - 1, size) for a, b in itertools.pairwise(cuts)]
                label = "one stage" if stages == 1 else f"{stages} even stages"
                plans.append((label, tuple(meshes)))
        return tuple(plans)

    def _fastest(self, first: int, last: int, size: int) -> MeshStage:
        configs = np.flatnonzero(self.config_devices == size)
        return MeshStage(first, last, int(configs[np.argmin(self.time_s[first, last, configs])]))


def boundary_levels(devices: int, group_sizes: tuple[int, ...]) -> np.ndarray:
    """[D] the level of links before each device in line, for groups of devices nested in one another.

    Args:
        devices: D.
        group_sizes: devices under one switch at each level, innermost first, without the outermost. `(8,)` for servers
            of 8 devices gives level 1 before every eighth device and level 0 before the others.
    """
    position = np.arange(devices)
    levels = np.zeros(devices, dtype=np.int64)
    for size in group_sizes:
        levels += position % size == 0
    return levels

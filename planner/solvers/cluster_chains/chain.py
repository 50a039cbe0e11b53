"""A chain of layers cut into pipeline stages, with the schedule's cost as data (`ChainStages`).

A `ChainPipeline` has the number of stages, the devices that run them, and the cost of a stage. With C the forward and
backward time of a stage's layers, I, O the times of the transfers before and after it, W its weights and A the
activation bytes of one micro-batch on it:

    slot    = the largest of C + e I, b I and b O
    time    = rounds * largest slot + stops * largest I
    memory  = w W + a A <= memory of the device

`bapipe` and `hetpipe` (`planner.solvers.cluster_chains.chain_schedules`) state two published problems this way.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from planner.errors import UsageError
from planner.solvers.cluster_chains.verdict import (
    Bytes,
    PartitionVerdict,
    covers_chain,
    even_boundaries,
    malformed,
    over_memory,
)
from planner.space.types import Violation


@dataclass(frozen=True, slots=True)
class ChainPipeline:
    """A schedule on a number of stages and devices.

    Attributes:
        schedule: name of the schedule.
        kept: by stage, copies of the weights and of a micro-batch's activations that its device keeps.
        rounds: slots of the slowest stage from one update to the next.
        entering: e, transfers before a stage that add to its slot.
        beside: b, transfers at either end of a stage that its slot cannot be shorter than.
        stops: number of transfers before a stage that add to the time.
        line: by stage, type of the device that runs it. Empty if the problem's devices may stand in any order: then
            only transfers before a stage may count.
    """

    schedule: str
    kept: tuple[tuple[float, float], ...]
    rounds: float
    entering: float = 0.0
    beside: float = 0.0
    stops: float = 0.0
    line: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.kept)

    def kept_bytes(self, stage: int, weight_bytes: Bytes, saved_bytes: Bytes) -> Bytes:
        """Bytes that the device of a stage keeps."""
        weights, saved = self.kept[stage]
        total: Bytes = weights * weight_bytes + saved * saved_bytes
        return total

    def pace_and_pause(self, compute_s: Bytes, entering_s: Bytes, leaving_s: Bytes) -> tuple[Bytes, Bytes]:
        """What a stage's slots and its stops take from one update to the next, seconds."""
        slot_s = compute_s + self.entering * entering_s
        if self.beside:
            slot_s = np.maximum(np.maximum(slot_s, self.beside * entering_s), self.beside * leaving_s)
        return self.rounds * slot_s, self.stops * entering_s


@dataclass(frozen=True, slots=True)
class ChainDecision:
    """A plan.

    Attributes:
        boundaries: 0, ..., n: stage i runs the layers `boundaries[i]` to `boundaries[i + 1] - 1`.
        pipeline: schedule and devices.
        types: device type of each stage, if the pipeline has no `line`.
    """

    boundaries: tuple[int, ...]
    pipeline: ChainPipeline
    types: tuple[int, ...] = ()

    @property
    def line(self) -> tuple[int, ...]:
        """Type of the device of each stage."""
        return self.pipeline.line or self.types


@dataclass(frozen=True, eq=False)
class ChainStages:
    """A chain of n layers priced on t types of devices. Numbers only.

    Attributes:
        compute_s: float64 [t, n] forward and backward of one micro-batch.
        saved_bytes: float64 [n] kept activations of one micro-batch.
        boundary_bytes: float64 [n + 1] input of layer p; the two ends are no transfers.
        weight_bytes: float64 [n].
        memory_bytes: float64 [t] memory of a device.
        bandwidth_byte_per_s: float64 [t, t] of the link from a device of one type to one of another.
        pipelines: the allowed pipelines.
        counts: devices of each type, for pipelines without `line`.
    """

    unit: ClassVar[str] = "s"
    """Seconds from one update to the next."""

    compute_s: np.ndarray
    saved_bytes: np.ndarray
    boundary_bytes: np.ndarray
    weight_bytes: np.ndarray
    memory_bytes: np.ndarray
    bandwidth_byte_per_s: np.ndarray
    pipelines: tuple[ChainPipeline, ...]
    counts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.compute_s.ndim != 2 or not self.compute_s.size:
            raise UsageError("nothing to decide: no layer or no device", where="compute_s")
        kinds, layers = self.compute_s.shape
        wanted = {
            "saved_bytes": (layers,), "boundary_bytes": (layers + 1,), "weight_bytes": (layers,),
            "memory_bytes": (kinds,), "bandwidth_byte_per_s": (kinds, kinds),
        }  # fmt: skip
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise UsageError(f"tables do not agree: {name} has not the shape {shape}", where=name)
        if any(pipeline.beside for pipeline in self.pipelines if not pipeline.line):
            raise UsageError("transfers of devices in any order count where they enter", where="pipelines")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.compute_s.shape[1])

    def judge(self, decision: ChainDecision) -> PartitionVerdict:
        """Objective and broken limits of a plan; O(layers)."""
        marks, pipeline, line = decision.boundaries, decision.pipeline, decision.line
        if not covers_chain(marks, self.layers):
            return malformed("coverage", "the stages do not hold all layers in order")
        if pipeline not in self.pipelines:
            return malformed("option", "no such pipeline")
        if not len(marks) - 1 == len(line) == pipeline.stages:
            return malformed("devices", f"{len(marks) - 1} stages for {pipeline.stages} devices in line")
        if bool(decision.types) == bool(pipeline.line) or not set(decision.types) <= set(range(len(self.counts))):
            return malformed("devices", "types of devices that the problem does not have")
        used = Counter(decision.types)
        violations = [
            Violation("devices", -1, "more devices of a type than there are")
            for kind, available in enumerate(self.counts)
            if used[kind] > available
        ]
        priced = [self._stage(pipeline, line, stage, marks, violations) for stage in range(pipeline.stages)]
        paces = tuple(pace for pace, _ in priced)
        return PartitionVerdict(max(paces) + max(pause for _, pause in priced), tuple(violations), paces)

    def _stage(
        self, pipeline: ChainPipeline, line: Sequence[int], stage: int, marks: Sequence[int], faults: list[Violation]
    ) -> tuple[float, float]:
        """Pace and pause of a stage; adds a violation if it does not fit its device."""
        kind, start, stop = line[stage], marks[stage], marks[stage + 1]
        weights, saved = math.fsum(self.weight_bytes[start:stop]), math.fsum(self.saved_bytes[start:stop])
        needed, have = pipeline.kept_bytes(stage, weights, saved), float(self.memory_bytes[kind])
        faults += over_memory(stage, needed, have, f"stage {stage} keeps {needed:.0f} of {have:.0f} bytes")
        pace, pause = pipeline.pace_and_pause(
            math.fsum(self.compute_s[kind, start:stop]),
            self._cut_s(line, stage, start),
            self._cut_s(line, stage + 1, stop),
        )
        return float(pace), float(pause)

    def _cut_s(self, line: Sequence[int], stage: int, mark: int) -> float:
        """Seconds of the transfer before a stage; 0 at the ends of the chain."""
        if not 0 < stage < len(line):
            return 0.0
        return float(self.boundary_bytes[mark] / self.bandwidth_byte_per_s[line[stage - 1], line[stage]])

    def trivial(self) -> tuple[tuple[str, ChainDecision], ...]:
        """One stage, if that is allowed, and equally many layers on each of the most stages."""
        by_stages = {pipeline.stages: pipeline for pipeline in reversed(self.pipelines)}
        kinds = tuple(kind for kind, count in enumerate(self.counts) for _ in range(count))
        plans = []
        for stages in sorted(by_stages)[:: max(len(by_stages) - 1, 1)]:
            pipeline, label = by_stages[stages], "one-device" if stages == 1 else "even-split"
            types = () if pipeline.line else kinds[:stages]
            plans.append((label, ChainDecision(even_boundaries(self.layers, stages), pipeline, types)))
        return tuple(plans)

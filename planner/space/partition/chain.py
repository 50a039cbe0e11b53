"""A chain of layers cut into pipeline stages, with the schedule's cost as data (`ChainStages`).

A `Pipeline` has the number of stages, the devices that run them, and the cost of a stage. With F, B the forward and
backward times of a stage's layers, I, O the times of the transfers before and after it, W its weights, A the activation
bytes of one micro-batch on it and X the bytes of its input:

    slot    = sum over groups of the largest of the group's terms, each f F + b B + i I + o O
    pace    = rounds * slot, but at least the exchange of gradients where that overlaps the work
    pause   = stops * I, plus the exchange where the pipeline is drained for it
    time    = largest pace + largest pause
    memory  = w W + a A + x X <= memory of the device

`bapipe`, `twobw` and `hetpipe` (`planner.space.partition.chain_schedules`) state three published problems this way.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from planner.errors import UsageError
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Collective
from planner.space.partition.verdict import Bytes, Verdict, covers_chain, even_boundaries, malformed, over_memory
from planner.space.types import Violation


class Term(NamedTuple):
    """Coefficients of a stage's forward and backward time, and of the transfers before and after it."""

    forward: float
    backward: float
    entering: float = 0.0
    leaving: float = 0.0


class Kept(NamedTuple):
    """What a device keeps of its stage: copies of the weights, of a micro-batch's activations, of the stage's input."""

    weights: float
    saved: float
    received: float = 0.0

    def bytes(self, weight_bytes: Bytes, saved_bytes: Bytes, received_bytes: Bytes) -> Bytes:
        """Bytes of all copies."""
        total: Bytes = self.weights * weight_bytes + self.saved * saved_bytes + self.received * received_bytes
        return total


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule on a number of stages and devices.

    Attributes:
        schedule: name of the schedule.
        micro_batch: samples of a micro-batch; 0 if the problem has one size only.
        size: position of the micro-batch size in the problem's tables.
        kept: by stage, what its devices keep.
        slot: groups of terms; the first term of each group is its computation.
        rounds: slots of the slowest stage from one update to the next.
        stops: number of transfers before a stage that add to the time.
        line: by stage, types of the devices that all run it. Empty if the problem's devices may stand in any order, one
            per stage: then only transfers before a stage may count.
        width: devices that exchange the gradients of a stage.
        drained: whether the exchange waits for the end of the work.
        recompute: whether activations are recomputed.
    """

    schedule: str
    micro_batch: int
    size: int
    kept: tuple[Kept, ...]
    slot: tuple[tuple[Term, ...], ...]
    rounds: float
    stops: float = 0.0
    line: tuple[tuple[int, ...], ...] = ()
    width: int = 1
    drained: bool = False
    recompute: bool = False

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.kept)

    def slot_s(self, forward_s: Bytes, backward_s: Bytes, entering_s: Bytes, leaving_s: Bytes) -> Bytes:
        """Seconds of a stage's slot."""
        groups = [
            [t.forward * forward_s + t.backward * backward_s + t.entering * entering_s + t.leaving * leaving_s
             for t in group]
            for group in self.slot
        ]  # fmt: skip
        largest = [group[0] for group in groups]
        for number, group in enumerate(groups):
            for value in group[1:]:
                largest[number] = np.maximum(largest[number], value)
        total: Bytes = sum(largest[1:], start=largest[0])
        return total

    def pace_and_pause(self, slot_s: Bytes, exchange_s: Bytes, entering_s: Bytes) -> tuple[Bytes, Bytes]:
        """Pace and pause of a stage in seconds, as in the module's formulas."""
        pace, pause = self.rounds * slot_s, self.stops * entering_s
        if self.drained:
            return pace, pause + exchange_s
        longer: Bytes = np.maximum(pace, exchange_s)
        return longer, pause


@dataclass(frozen=True, slots=True)
class ChainDecision:
    """A plan.

    Attributes:
        boundaries: 0, ..., n: stage i runs the layers `boundaries[i]` to `boundaries[i + 1] - 1`.
        pipeline: schedule and devices.
        types: device type of each stage, if the pipeline has no `line`.
    """

    boundaries: tuple[int, ...]
    pipeline: Pipeline
    types: tuple[int, ...] = ()

    @property
    def line(self) -> tuple[tuple[int, ...], ...]:
        """Types of the devices of each stage."""
        return self.pipeline.line or tuple((kind,) for kind in self.types)


@dataclass(frozen=True, eq=False)
class ChainStages:
    """A chain of n layers priced for k micro-batch sizes on t types of devices. Numbers only.

    Attributes:
        forward_s: float64 [k, t, n] of one micro-batch.
        backward_s: float64 [k, t, n].
        saved_bytes: float64 [k, n] kept activations of one micro-batch.
        boundary_bytes: float64 [k, n + 1] input of layer p; the two ends are no transfers.
        weight_bytes: float64 [n].
        memory_bytes: float64 [t] memory of a device.
        bandwidth_byte_per_s: float64 [t, t] of the link from a device of one type to one of another.
        pipelines: the allowed pipelines.
        counts: devices of each type, for pipelines without `line`.
        equal: whether stages have the same number of layers.
    """

    unit: ClassVar[str] = "s"
    """Seconds from one update to the next."""

    forward_s: np.ndarray
    backward_s: np.ndarray
    saved_bytes: np.ndarray
    boundary_bytes: np.ndarray
    weight_bytes: np.ndarray
    memory_bytes: np.ndarray
    bandwidth_byte_per_s: np.ndarray
    pipelines: tuple[Pipeline, ...]
    counts: tuple[int, ...] = ()
    equal: bool = False

    def __post_init__(self) -> None:
        if self.forward_s.ndim != 3 or not self.forward_s.size or len(self.weight_bytes) != self.layers:
            raise UsageError("nothing to decide: no size, no layer or no device", where="forward_s")
        sizes, kinds, layers = self.forward_s.shape
        wanted = {
            "backward_s": (sizes, kinds, layers), "saved_bytes": (sizes, layers), "boundary_bytes": (sizes, layers + 1),
            "memory_bytes": (kinds,), "bandwidth_byte_per_s": (kinds, kinds),
        }  # fmt: skip
        for name, shape in wanted.items():
            if getattr(self, name).shape != shape:
                raise UsageError(f"tables do not agree: {name} has not the shape {shape}", where=name)
        if any(term.leaving for p in self.pipelines if not p.line for group in p.slot for term in group):
            raise UsageError("transfers of devices in any order count where they enter", where="pipelines")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.forward_s.shape[2])

    def judge(self, decision: ChainDecision) -> Verdict:
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
        if self.equal and len({b - a for a, b in itertools.pairwise(marks)}) > 1:
            violations.append(Violation("option", -1, "the stages are not equal"))
        priced = [self._stage(pipeline, line, stage, marks, violations) for stage in range(pipeline.stages)]
        paces = tuple(pace for pace, _ in priced)
        return Verdict(max(paces) + max(pause for _, pause in priced), tuple(violations), paces)

    def _stage(
        self,
        pipeline: Pipeline,
        line: Sequence[tuple[int, ...]],
        stage: int,
        marks: Sequence[int],
        faults: list[Violation],
    ) -> tuple[float, float]:
        """Pace and pause of a stage; adds a violation for each device type that it does not fit."""
        size, start, stop = pipeline.size, marks[stage], marks[stage + 1]
        weights, saved = math.fsum(self.weight_bytes[start:stop]), math.fsum(self.saved_bytes[size, start:stop])
        needed = pipeline.kept[stage].bytes(weights, saved, float(self.boundary_bytes[size, start]))
        slots = []
        for kind in line[stage]:
            slots.append(
                pipeline.slot_s(
                    math.fsum(self.forward_s[size, kind, start:stop]),
                    math.fsum(self.backward_s[size, kind, start:stop]),
                    self._cut_s(pipeline, line, stage, start),
                    self._cut_s(pipeline, line, stage + 1, stop),
                )
            )
            have = float(self.memory_bytes[kind])
            faults += over_memory(stage, needed, have, f"stage {stage} keeps {needed:.0f} of {have:.0f} bytes")
        kind = line[stage][0]
        exchange = moved_bytes(Collective.ALL_REDUCE, weights, pipeline.width) / self.bandwidth_byte_per_s[kind, kind]
        pace, pause = pipeline.pace_and_pause(max(slots), exchange, self._cut_s(pipeline, line, stage, start))
        return float(pace), float(pause)

    def _cut_s(self, pipeline: Pipeline, line: Sequence[tuple[int, ...]], stage: int, mark: int) -> float:
        """Seconds of the transfer before a stage; 0 at the ends of the chain."""
        if not 0 < stage < len(line):
            return 0.0
        return float(
            self.boundary_bytes[pipeline.size, mark] / self.bandwidth_byte_per_s[line[stage - 1][0], line[stage][0]]
        )

    def trivial(self) -> tuple[tuple[str, ChainDecision], ...]:
        """One stage on the fewest devices, one on the most, and equally many layers on each of the most stages."""
        first_of_shape: dict[tuple[int, int], Pipeline] = {}
        for pipeline in self.pipelines:
            first_of_shape.setdefault((pipeline.stages, pipeline.width), pipeline)
        kinds = tuple(kind for kind, count in enumerate(self.counts) for _ in range(count))
        plans = []
        for label, shape in (
            ("one-device", min(first_of_shape, default=None)),
            ("data-parallel", max(((n, w) for n, w in first_of_shape if n == 1 < w), default=None)),
            ("even-split", max(((n, w) for n, w in first_of_shape if n > 1), default=None)),
        ):
            if shape is not None:
                pipeline = first_of_shape[shape]
                types = () if pipeline.line else kinds[: pipeline.stages]
                plans.append((label, ChainDecision(even_boundaries(self.layers, pipeline.stages), pipeline, types)))
        return tuple(plans)

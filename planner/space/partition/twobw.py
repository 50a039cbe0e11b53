"""PipeDream-2BW's plans: w parallel pipelines of d stages, micro-batch size, recomputation, weights kept twice.

With m micro-batches of size b in each pipeline (global batch = w b m), per stage i

    micro-batch   t_i = F_i + B_i (+ F_i when recomputed) + (bytes in + bytes out) / bandwidth
    gradients     g_i = 2 (w-1)/w W_i / bandwidth

and per global batch, with t, g the largest t_i, g_i:

    2bw, dream       max over i of max(m t_i, g_i)       no pipeline is ever drained; dream: original PipeDream
    flush, gpipe     (m + d - 1) t + g                   1F1B or all forwards first, then an update by all

Memory of a stage: v W_i + n A_i, or v W_i + A_i + n I_i when recomputed, with v weight versions (2bw 2, dream d, else
1), n micro-batches in flight (gpipe m, else d, or d - i as it really is on stage i = 0..d-1), A_i activations, I_i the
input of the stage's layers. The published planner splits repetitive models into equal stages; here they need not be.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021), sections 3 and 4.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np

from planner.errors import UsageError
from planner.hardware.collectives import moved_bytes
from planner.hardware.types import Collective
from planner.space.partition import Bytes, Verdict, covers_chain, over_memory
from planner.space.types import Violation


class TwoBWSchedule(StrEnum):
    """Order of work and weight versions."""

    TWO_BW = "2bw"
    """1F1B without flush, two weight versions, gradients of m >= d micro-batches added up."""
    DREAM = "dream"
    """The original PipeDream: as many weight versions as stages."""
    FLUSH = "flush"
    """1F1B drained after each global batch."""
    GPIPE = "gpipe"
    """All forwards, then all backwards."""

    def versions(self, depth: int) -> int:
        """Weight versions that the worst stage keeps."""
        return {TwoBWSchedule.TWO_BW: 2, TwoBWSchedule.DREAM: depth}.get(self, 1)

    def in_flight(self, depth: int, micro_batches: int) -> int:
        """Micro-batches whose activations the worst stage keeps."""
        return micro_batches if self is TwoBWSchedule.GPIPE else depth


def stage_bytes(
    schedule: TwoBWSchedule,
    weight_bytes: Bytes,
    saved_bytes: Bytes,
    input_bytes: Bytes,
    depth: int,
    in_flight: int,
    *,
    recompute: bool,
) -> Bytes:
    """Weights and activations that a stage keeps.

    Args:
        schedule: says how many weight versions there are.
        weight_bytes: weights of the stage.
        saved_bytes: activations that one micro-batch keeps on it.
        input_bytes: what is kept of a recomputed micro-batch.
        depth: stages of the pipeline.
        in_flight: micro-batches kept.
        recompute: whether activations are computed again for the backward pass.
    """
    weights: Bytes = schedule.versions(depth) * weight_bytes
    kept: Bytes = weights + saved_bytes + in_flight * input_bytes if recompute else weights + in_flight * saved_bytes
    return kept


@dataclass(frozen=True, slots=True)
class TwoBWDecision:
    """A point of the space.

    Attributes:
        boundaries: 0, ..., n: stage i runs the layers `boundaries[i]` to `boundaries[i + 1] - 1`.
        width: parallel pipelines.
        micro_batch: samples.
        recompute: whether all stages recompute.
        schedule: order of work.
    """

    boundaries: tuple[int, ...]
    width: int
    micro_batch: int
    recompute: bool
    schedule: TwoBWSchedule = TwoBWSchedule.TWO_BW

    @property
    def depth(self) -> int:
        """Number of stages."""
        return len(self.boundaries) - 1


@dataclass(frozen=True, eq=False)
class TwoBWProblem:
    """A chain of n layers, priced for k micro-batch sizes. Numbers only.

    Attributes:
        micro_batches: the k sizes.
        forward_s: float64 [k, n].
        backward_s: float64 [k, n], without recomputation.
        saved_bytes: float64 [k, n] activations kept of one micro-batch.
        boundary_bytes: float64 [k, n + 1] what crosses before layer p (and behind the last), one way.
        weight_bytes: float64 [n].
        devices: at most that many are used.
        global_batch: samples of an update.
        bandwidth_byte_per_s: of all links.
        memory_bytes: of a device.
        schedules: allowed schedules.
        recompute: allowed choices.
        equal: stages have the same number of layers, as in the published planner.
        optimizer_per_weight: gradients and optimizer state, bytes per byte of weights (the published formula has none).
        in_flight_by_stage: stage i keeps d - i micro-batches in flight; else all as many as the first, as published.
    """

    unit: ClassVar[str] = "s"
    """Seconds a global batch."""

    micro_batches: tuple[int, ...]
    forward_s: np.ndarray
    backward_s: np.ndarray
    saved_bytes: np.ndarray
    boundary_bytes: np.ndarray
    weight_bytes: np.ndarray
    devices: int
    global_batch: int
    bandwidth_byte_per_s: float = math.inf
    memory_bytes: float = math.inf
    schedules: tuple[TwoBWSchedule, ...] = (TwoBWSchedule.TWO_BW,)
    recompute: tuple[bool, ...] = (False, True)
    equal: bool = True
    optimizer_per_weight: float = 0.0
    in_flight_by_stage: bool = False

    def __post_init__(self) -> None:
        sizes, count = len(self.micro_batches), len(self.weight_bytes)
        tables = (self.forward_s, self.backward_s, self.saved_bytes)
        if any(t.shape != (sizes, count) for t in tables) or self.boundary_bytes.shape != (sizes, count + 1):
            raise UsageError("tables do not agree on the number of micro-batch sizes and layers", where="forward_s")
        if not sizes or not count or self.devices < 1 or self.global_batch < 1:
            raise UsageError("nothing to decide: no size, no layer, no device or no batch", where="micro_batches")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.weight_bytes)

    def judge(self, decision: TwoBWDecision) -> Verdict:
        """Recompute objective and violations; O(layers)."""
        faults = self._malformed(decision)
        if faults:
            return Verdict(math.inf, tuple(faults))
        size, depth = self.micro_batches.index(decision.micro_batch), decision.depth
        count = self.global_batch // (decision.micro_batch * decision.width)
        if decision.schedule in (TwoBWSchedule.TWO_BW, TwoBWSchedule.DREAM) and count < depth:
            faults.append(Violation("divisibility", -1, f"{count} micro-batches do not fill {depth} stages"))
        micro, gradient = [], []
        for stage, (start, stop) in enumerate(itertools.pairwise(decision.boundaries)):
            forward = math.fsum(self.forward_s[size, start:stop])
            work = forward + math.fsum(self.backward_s[size, start:stop]) + (forward if decision.recompute else 0.0)
            ends = (start if stage else None, stop if stage < depth - 1 else None)
            moved = math.fsum(self.boundary_bytes[size, p] for p in ends if p is not None)
            micro.append(work + moved / self.bandwidth_byte_per_s)
            weights = math.fsum(self.weight_bytes[start:stop])
            gradient.append(moved_bytes(Collective.ALL_REDUCE, weights, decision.width) / self.bandwidth_byte_per_s)
            faults += self._memory(decision, stage, size, count, weights)
        if decision.schedule in (TwoBWSchedule.FLUSH, TwoBWSchedule.GPIPE):
            total = (count + depth - 1) * max(micro) + max(gradient)
            return Verdict(total, tuple(faults), tuple(count * t for t in micro))
        parts = tuple(max(count * t, g) for t, g in zip(micro, gradient, strict=True))
        return Verdict(max(parts), tuple(faults), parts)

    def _malformed(self, decision: TwoBWDecision) -> list[Violation]:
        faults = []
        marks = decision.boundaries
        if not covers_chain(marks, self.layers):
            return [Violation("coverage", -1, "the stages do not hold all layers in order")]
        if self.equal and len({b - a for a, b in itertools.pairwise(marks)}) > 1:
            faults.append(Violation("option", -1, "the stages are not equal"))
        if decision.micro_batch not in self.micro_batches or decision.width < 1:
            faults.append(Violation("option", -1, f"no figures for micro-batches of {decision.micro_batch}"))
        elif self.global_batch % (decision.micro_batch * decision.width):
            faults.append(Violation("divisibility", -1, "micro-batches and pipelines do not divide the global batch"))
        if decision.schedule not in self.schedules or decision.recompute not in self.recompute:
            faults.append(Violation("option", -1, "a schedule or recomputation that is not allowed"))
        used = decision.width * decision.depth
        if used > self.devices:
            faults.append(Violation("devices", -1, f"{used} of {self.devices} devices", used, self.devices))
        return faults

    def _memory(
        self, decision: TwoBWDecision, stage: int, size: int, count: int, weights: float
    ) -> tuple[Violation, ...]:
        start, stop, depth = decision.boundaries[stage], decision.boundaries[stage + 1], decision.depth
        in_flight = decision.schedule.in_flight(depth, count)
        if self.in_flight_by_stage and decision.schedule is not TwoBWSchedule.GPIPE:
            in_flight = min(count, depth - stage)
        saved, entering = math.fsum(self.saved_bytes[size, start:stop]), float(self.boundary_bytes[size, start])
        needed = self.optimizer_per_weight * weights + stage_bytes(
            decision.schedule, weights, saved, entering, depth, in_flight, recompute=decision.recompute
        )
        message = f"stage {stage} keeps {needed:.0f} of {self.memory_bytes:.0f} bytes"
        return over_memory(stage, needed, self.memory_bytes, message)

    def trivial(self) -> tuple[tuple[str, TwoBWDecision], ...]:
        """Data parallelism over all devices, one device; smallest micro-batch, no recomputation."""
        whole, least = (0, self.layers), min(self.micro_batches)
        options = (least, self.recompute[0], self.schedules[0])
        return (
            ("one-device", TwoBWDecision(whole, 1, *options)),
            ("data-parallel", TwoBWDecision(whole, self.devices, *options)),
        )

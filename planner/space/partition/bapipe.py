"""BaPipe's plans: balanced stages of a chain, with the order of work that links and memory allow.

With M micro-batches, N stages on devices in line, F_i, B_i the stage's times, SR the time of a cut's transfer one way:

    1f1b-as    (M + N - 1) slot         slot = largest max(F_i, SR out) + max(B_i, SR in): computing while sending
    fbp-as     (M + 2N - 1) slot        slot = largest of F_i + B_i and 2 SR: forward and backward units in parallel
                                        (M + N - 1 when micro-batches stream in pieces, as the paper has it)
    1f1b-sno   (M + N - 1) slot + (N + M - 2 - ceil((M-1)/N)) 2 SR      slot = largest F_i + B_i: sending stops a device
    1f1b-so    (M + N - 1) slot + (N - 1) 2 SR                          slot = largest of F_i + B_i and SR

SR in the totals being the largest of all cuts. The forms are exact for equal stages and an upper estimate for others. A
device keeps its stage's weights and their gradients, and the features of N - i + 1 micro-batches (i = 1..N), twice as
many for fbp-as and for so, whose warm-up is doubled. Asynchronous devices (FPGAs) run the first two, synchronous ones
(GPUs) the others; plain data parallelism stands beside them.

Source: Zhao et al., "BaPipe: Exploration of Balanced Pipeline Parallelism for DNN Training" (2020).
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
from planner.space.partition import Verdict, covers_chain, even_boundaries, malformed, over_memory
from planner.space.types import Violation


class BaPipeSchedule(StrEnum):
    """Order of work; see the module's text."""

    AS = "1f1b-as"
    FBP_AS = "fbp-as"
    SNO = "1f1b-sno"
    SO = "1f1b-so"
    DATA_PARALLEL = "data-parallel"


ASYNCHRONOUS = (BaPipeSchedule.AS, BaPipeSchedule.FBP_AS)
"""What accelerators that compute and send at once can run."""

SYNCHRONOUS = (BaPipeSchedule.SNO, BaPipeSchedule.SO)
"""What accelerators run that are fed by kernels and copies."""


def pipeline_s(
    schedule: BaPipeSchedule,
    stages: int,
    micro_batches: int,
    slot_s: float,
    transfer_s: float = 0.0,
    *,
    fill_overlap: bool = False,
) -> float:
    """Seconds of a mini-batch.

    Args:
        schedule: a pipelined schedule.
        stages: N.
        micro_batches: M.
        slot_s: the slot of the slowest stage.
        transfer_s: SR; counts for the synchronous schedules only.
        fill_overlap: fbp-as fills as fast as 1f1b-as, micro-batches being passed on in pieces.
    """
    fill = 2 * stages - 1 if schedule is BaPipeSchedule.FBP_AS and not fill_overlap else stages - 1
    total = (micro_batches + fill) * slot_s
    if schedule is BaPipeSchedule.SNO:
        stops = stages + micro_batches - 2 - math.ceil((micro_batches - 1) / stages)
        return total + stops * 2 * transfer_s
    return total + (stages - 1) * 2 * transfer_s if schedule is BaPipeSchedule.SO else total


def features_in_flight(
    schedule: BaPipeSchedule, stage: int, stages: int, micro_batches: int, *, exact: bool = False
) -> int:
    """Micro-batches whose features stage `stage` (0 is the first) keeps.

    Args:
        schedule: order of work.
        stage: which stage.
        stages: how many there are.
        micro_batches: M.
        exact: what 1f1b-so needs in fact (one less) and never more than M; else as published.
    """
    if schedule is BaPipeSchedule.DATA_PARALLEL:
        return 1
    behind = stages - stage
    doubled = schedule in (BaPipeSchedule.SO, BaPipeSchedule.FBP_AS)
    kept = 2 * behind if doubled else behind
    if exact:
        kept = min(micro_batches, kept - 1 if schedule is BaPipeSchedule.SO else kept)
    return kept


@dataclass(frozen=True, slots=True)
class BaPipeDecision:
    """A point of the space.

    Attributes:
        boundaries: 0, ..., n: device i runs the layers `boundaries[i]` to `boundaries[i + 1] - 1`. (0, n) for data
            parallelism.
        schedule: order of work.
        micro_batch: samples.
    """

    boundaries: tuple[int, ...]
    schedule: BaPipeSchedule
    micro_batch: int


@dataclass(frozen=True, eq=False)
class BaPipeProblem:
    """A chain of n layers on D devices in line, priced for k micro-batch sizes. Numbers only.

    Attributes:
        micro_batches: the k sizes.
        forward_s: float64 [k, D, n].
        backward_s: float64 [k, D, n].
        feature_bytes: float64 [k, n] kept of one micro-batch.
        boundary_bytes: float64 [k, n + 1] what crosses before layer p.
        weight_bytes: float64 [n].
        memory_bytes: float64 [D].
        bandwidth_byte_per_s: of the links between neighbours.
        global_batch: samples of a mini-batch.
        schedules: those allowed.
        fill_overlap: see `pipeline_s`.
        exact_features: see `features_in_flight`.
    """

    unit: ClassVar[str] = "s"
    """Seconds a mini-batch."""

    micro_batches: tuple[int, ...]
    forward_s: np.ndarray
    backward_s: np.ndarray
    feature_bytes: np.ndarray
    boundary_bytes: np.ndarray
    weight_bytes: np.ndarray
    memory_bytes: np.ndarray
    bandwidth_byte_per_s: float
    global_batch: int
    schedules: tuple[BaPipeSchedule, ...] = (*SYNCHRONOUS, BaPipeSchedule.DATA_PARALLEL)
    fill_overlap: bool = False
    exact_features: bool = False

    def __post_init__(self) -> None:
        sizes, layers, devices = len(self.micro_batches), len(self.weight_bytes), len(self.memory_bytes)
        shapes = (self.forward_s.shape, self.backward_s.shape)
        if not sizes or not layers or not devices or not self.schedules:
            raise UsageError("nothing to decide: no size, no layer, no device or no schedule", where="micro_batches")
        if shapes != ((sizes, devices, layers),) * 2 or self.feature_bytes.shape != (sizes, layers):
            raise UsageError("tables do not agree on sizes, devices and layers", where="forward_s")
        if self.boundary_bytes.shape != (sizes, layers + 1):
            raise UsageError("boundary_bytes has not one figure before and behind each layer", where="boundary_bytes")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.weight_bytes)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.memory_bytes)

    def judge(self, decision: BaPipeDecision) -> Verdict:
        """Recompute objective and violations; O(layers)."""
        marks, schedule = decision.boundaries, decision.schedule
        if not covers_chain(marks, self.layers):
            return malformed("coverage", "the stages do not hold all layers in order")
        if len(marks) - 1 > self.devices:
            return malformed("devices", f"{len(marks) - 1} stages on {self.devices} devices")
        if decision.micro_batch not in self.micro_batches or schedule not in self.schedules:
            return malformed("option", "a micro-batch size or schedule that is not allowed")
        parallel = self.devices if schedule is BaPipeSchedule.DATA_PARALLEL else 1
        if self.global_batch % (decision.micro_batch * parallel):
            return malformed("divisibility", "micro-batches do not divide the mini-batch")
        count = self.global_batch // (decision.micro_batch * parallel)
        if parallel > 1 or schedule is BaPipeSchedule.DATA_PARALLEL:
            return self._data_parallel(decision, count)
        return self._pipelined(decision, count)

    def _pipelined(self, decision: BaPipeDecision, count: int) -> Verdict:
        schedule, size = decision.schedule, self.micro_batches.index(decision.micro_batch)
        stages = list(itertools.pairwise(decision.boundaries))
        cut_s = [0.0] + [float(self.boundary_bytes[size, stop]) / self.bandwidth_byte_per_s for _, stop in stages]
        cut_s[-1] = 0.0
        slots: list[float] = []
        faults: list[Violation] = []
        for stage, (start, stop) in enumerate(stages):
            forward = math.fsum(self.forward_s[size, stage, start:stop])
            backward = math.fsum(self.backward_s[size, stage, start:stop])
            before, behind = cut_s[stage], cut_s[stage + 1]
            if schedule is BaPipeSchedule.AS:
                slots.append(max(forward, behind) + max(backward, before))
            elif schedule is BaPipeSchedule.FBP_AS:
                slots.append(max(forward + backward, 2 * before, 2 * behind))
            elif schedule is BaPipeSchedule.SO:
                slots.append(max(forward + backward, before, behind))
            else:
                slots.append(forward + backward)
            kept = features_in_flight(schedule, stage, len(stages), count, exact=self.exact_features)
            faults += self._memory(size, stage, start, stop, kept)
        total = pipeline_s(schedule, len(stages), count, max(slots), max(cut_s), fill_overlap=self.fill_overlap)
        return Verdict(total, tuple(faults), tuple(slots))

    def _data_parallel(self, decision: BaPipeDecision, count: int) -> Verdict:
        size = self.micro_batches.index(decision.micro_batch)
        if len(decision.boundaries) != 2:
            return malformed("option", "data parallelism has no stages")
        work = [
            count * (math.fsum(self.forward_s[size, device]) + math.fsum(self.backward_s[size, device]))
            for device in range(self.devices)
        ]
        exchange = (
            moved_bytes(Collective.ALL_REDUCE, math.fsum(self.weight_bytes), self.devices) / self.bandwidth_byte_per_s
        )
        faults = [f for device in range(self.devices) for f in self._memory(size, device, 0, self.layers, 1)]
        return Verdict(max(work) + exchange, tuple(faults), tuple(work))

    def _memory(self, size: int, device: int, start: int, stop: int, kept: int) -> tuple[Violation, ...]:
        weights, features = self.weight_bytes[start:stop], self.feature_bytes[size, start:stop]
        needed, have = 2 * math.fsum(weights) + kept * math.fsum(features), float(self.memory_bytes[device])
        return over_memory(device, needed, have, f"device {device} keeps {needed:.0f} of {have:.0f} bytes")

    def trivial(self) -> tuple[tuple[str, BaPipeDecision], ...]:
        """Data parallelism, one device, and the same number of layers on every device."""
        least, count = min(self.micro_batches), min(self.devices, self.layers)
        pipelined = [s for s in self.schedules if s is not BaPipeSchedule.DATA_PARALLEL]
        first = pipelined[0] if pipelined else self.schedules[0]
        return (
            ("data-parallel", BaPipeDecision((0, self.layers), BaPipeSchedule.DATA_PARALLEL, least)),
            ("one-device", BaPipeDecision((0, self.layers), first, least)),
            ("even-split", BaPipeDecision(even_boundaries(self.layers, count), first, least)),
        )

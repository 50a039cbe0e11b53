"""Published schedules on a chain: BaPipe, PipeDream-2BW and HetPipe as pipelines of a `ChainStages`.

BaPipe, with M micro-batches, N stages on devices in line, SR the time of a cut's transfer one way:

    1f1b-as    (M + N - 1) slot         slot = largest max(F_i, SR out) + max(B_i, SR in): computing while sending
    fbp-as     (M + 2N - 1) slot        slot = largest of F_i + B_i and 2 SR: forward and backward units in parallel
                                        (M + N - 1 if micro-batches are passed on in pieces, as in the paper)
    1f1b-sno   (M + N - 1) slot + (N + M - 2 - ceil((M-1)/N)) 2 SR      slot = largest F_i + B_i: sending stops a device
    1f1b-so    (M + N - 1) slot + (N - 1) 2 SR                          slot = largest of F_i + B_i and SR

where SR in the totals is the largest of all cuts. The formulas are exact for equal stages and upper bounds for others.
A device keeps its stage's weights and gradients, and the features (activations) of N - i + 1 micro-batches (i = 1..N),
twice as many for fbp-as and 1f1b-so, whose warm-up is doubled. Asynchronous devices (FPGAs) run the first two,
synchronous ones (GPUs) the others, and both plain data parallelism.

PipeDream-2BW: w parallel pipelines of d stages, m micro-batches of size b in each (global batch = w b m), g the
exchange of a stage's gradients. The published planner splits repetitive models into equal stages.

    micro-batch   t_i = F_i + B_i (+ F_i when recomputed) + (bytes in + bytes out) / bandwidth
    2bw, dream    max over i of max(m t_i, g_i)       no pipeline is ever drained; dream: original PipeDream
    flush, gpipe  (m + d - 1) t + g                   1F1B or all forwards first, then an update by all

HetPipe's virtual worker: devices of several types form one pipeline with Nm mini-batches in flight; their order and the
cuts are decided together. Stage q = 0..k-1 keeps min(Nm, max(k, Nm) - q) of the mini-batches. The objective is the
slowest stage; the stage after a cut pays its transfers both ways.

Sources: Zhao et al., "BaPipe" (2020); Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (ICML 2021),
sections 3 and 4; Park et al., "HetPipe" (USENIX ATC 2020), sections 4 and 7.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from enum import StrEnum

import numpy as np

from planner.errors import UsageError
from planner.space.partition.chain import ChainStages, Kept, Pipeline, Term


class BaPipeSchedule(StrEnum):
    """Schedule; see the formulas of the module."""

    AS = "1f1b-as"
    FBP_AS = "fbp-as"
    SNO = "1f1b-sno"
    SO = "1f1b-so"
    DATA_PARALLEL = "data-parallel"


ASYNCHRONOUS = (BaPipeSchedule.AS, BaPipeSchedule.FBP_AS)
"""Schedules of accelerators that compute and send at the same time."""

SYNCHRONOUS = (BaPipeSchedule.SNO, BaPipeSchedule.SO)
"""Schedules of accelerators that run kernels and copies."""

_COMPUTATION = Term(1, 1)
_BAPIPE_SLOTS = {
    BaPipeSchedule.AS: ((Term(1, 0), Term(0, 0, leaving=1)), (Term(0, 1), Term(0, 0, entering=1))),
    BaPipeSchedule.FBP_AS: ((_COMPUTATION, Term(0, 0, entering=2), Term(0, 0, leaving=2)),),
    BaPipeSchedule.SO: ((_COMPUTATION, Term(0, 0, entering=1), Term(0, 0, leaving=1)),),
}
"""Slots of schedules in which transfers count; the slot of any other is the computation."""


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
    stages_left = stages - stage
    doubled = schedule in (BaPipeSchedule.SO, BaPipeSchedule.FBP_AS)
    kept = 2 * stages_left if doubled else stages_left
    if exact:
        kept = min(micro_batches, kept - 1 if schedule is BaPipeSchedule.SO else kept)
    return kept


def bapipe(
    micro_batches: tuple[int, ...],
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    feature_bytes: np.ndarray,
    boundary_bytes: np.ndarray,
    weight_bytes: np.ndarray,
    memory_bytes: np.ndarray,
    bandwidth_byte_per_s: float,
    global_batch: int,
    *,
    schedules: tuple[BaPipeSchedule, ...] = (*SYNCHRONOUS, BaPipeSchedule.DATA_PARALLEL),
    fill_overlap: bool = False,
    exact_features: bool = False,
) -> ChainStages:
    """BaPipe's problem on D devices in line, at most one stage each; tables as in `ChainStages`, a type a device.

    Args:
        micro_batches: the k sizes.
        forward_s: float64 [k, D, n].
        backward_s: float64 [k, D, n].
        feature_bytes: float64 [k, n] kept of one micro-batch.
        boundary_bytes: float64 [k, n + 1].
        weight_bytes: float64 [n].
        memory_bytes: float64 [D].
        bandwidth_byte_per_s: of the links between neighbours.
        global_batch: samples of a mini-batch.
        schedules: those allowed.
        fill_overlap: see `pipeline_s`.
        exact_features: see `features_in_flight`.
    """
    devices = len(memory_bytes)

    def straight(schedule: BaPipeSchedule, size: int, stages: int) -> Pipeline:
        count = global_batch // micro_batches[size]
        total_s = functools.partial(pipeline_s, schedule, stages, count, fill_overlap=fill_overlap)
        kept = (features_in_flight(schedule, stage, stages, count, exact=exact_features) for stage in range(stages))
        return Pipeline(
            schedule,
            micro_batches[size],
            size,
            tuple(Kept(2, features) for features in kept),
            _BAPIPE_SLOTS.get(schedule, ((_COMPUTATION,),)),
            rounds=total_s(1.0, 0.0),
            stops=total_s(0.0, 1.0),
            line=tuple((stage,) for stage in range(stages)),
        )

    def parallel(size: int) -> Pipeline:
        count, line = global_batch // (micro_batches[size] * devices), (tuple(range(devices)),)
        return Pipeline(
            BaPipeSchedule.DATA_PARALLEL, micro_batches[size], size, (Kept(2, 1),), ((_COMPUTATION,),), count,
            line=line, width=devices, drained=True,
        )  # fmt: skip

    def pipelines() -> Iterator[Pipeline]:
        for schedule in schedules:
            for size, samples in enumerate(micro_batches):
                if schedule is not BaPipeSchedule.DATA_PARALLEL and global_batch % samples == 0:
                    for stages in range(min(devices, len(weight_bytes)), 0, -1):
                        yield straight(schedule, size, stages)
                elif schedule is BaPipeSchedule.DATA_PARALLEL and global_batch % (samples * devices) == 0:
                    yield parallel(size)

    return ChainStages(
        forward_s, backward_s, feature_bytes, boundary_bytes, weight_bytes, memory_bytes,
        uniform_links(devices, bandwidth_byte_per_s), tuple(pipelines()),
    )  # fmt: skip


class TwoBWSchedule(StrEnum):
    """Schedule and weight versions."""

    TWO_BW = "2bw"
    """1F1B without flush, two weight versions, gradients of m >= d micro-batches added up."""
    DREAM = "dream"
    """The original PipeDream: as many weight versions as stages."""
    FLUSH = "flush"
    """1F1B, drained after each global batch."""
    GPIPE = "gpipe"
    """All forwards, then all backwards."""

    @property
    def drained(self) -> bool:
        """Whether the pipeline is empty at an update."""
        return self in (TwoBWSchedule.FLUSH, TwoBWSchedule.GPIPE)

    def versions(self, depth: int) -> int:
        """Weight versions that the fullest stage keeps."""
        return {TwoBWSchedule.TWO_BW: 2, TwoBWSchedule.DREAM: depth}.get(self, 1)

    def in_flight(self, depth: int, micro_batches: int) -> int:
        """Micro-batches that the fullest stage keeps activations of."""
        return micro_batches if self is TwoBWSchedule.GPIPE else depth


def stage_kept(schedule: TwoBWSchedule, depth: int, in_flight: int, *, recompute: bool) -> Kept:
    """What a stage keeps of its weights and activations.

    Args:
        schedule: decides the number of weight versions.
        depth: stages of the pipeline.
        in_flight: micro-batches in flight.
        recompute: whether activations are recomputed in the backward pass, from the kept stage inputs.
    """
    return Kept(schedule.versions(depth), 1, in_flight) if recompute else Kept(schedule.versions(depth), in_flight)


def twobw(
    micro_batches: tuple[int, ...],
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    saved_bytes: np.ndarray,
    boundary_bytes: np.ndarray,
    weight_bytes: np.ndarray,
    devices: int,
    global_batch: int,
    *,
    bandwidth_byte_per_s: float = math.inf,
    memory_bytes: float = math.inf,
    schedules: tuple[TwoBWSchedule, ...] = (TwoBWSchedule.TWO_BW,),
    recompute: tuple[bool, ...] = (False, True),
    equal: bool = True,
    optimizer_per_weight: float = 0.0,
    in_flight_by_stage: bool = False,
) -> ChainStages:
    """PipeDream-2BW's problem: width, depth, micro-batch, recomputation; tables as in `ChainStages`, one device type.

    Args:
        micro_batches: the k sizes.
        forward_s: float64 [k, n].
        backward_s: float64 [k, n], without recomputation.
        saved_bytes: float64 [k, n] activations kept of one micro-batch.
        boundary_bytes: float64 [k, n + 1].
        weight_bytes: float64 [n].
        devices: upper limit on the devices in use.
        global_batch: samples of an update.
        bandwidth_byte_per_s: of all links.
        memory_bytes: memory of a device.
        schedules: allowed schedules.
        recompute: allowed choices.
        equal: stages have the same number of layers, as in the published planner.
        optimizer_per_weight: bytes of gradients and optimizer state per byte of weights (0 in the published formula).
        in_flight_by_stage: stage i keeps d - i micro-batches; else every stage as many as the first, as published.
    """
    if devices < 1 or global_batch < 1:
        raise UsageError("nothing to decide: no device or no batch", where="devices")

    def kept(schedule: TwoBWSchedule, depth: int, stage: int, count: int, recomputed: bool) -> Kept:
        in_flight = schedule.in_flight(depth, count)
        if in_flight_by_stage and schedule is not TwoBWSchedule.GPIPE:
            in_flight = min(count, depth - stage)
        copies = stage_kept(schedule, depth, in_flight, recompute=recomputed)
        return copies._replace(weights=copies.weights + optimizer_per_weight)

    def pipelines() -> Iterator[Pipeline]:
        layers = len(weight_bytes)
        shapes = [(w, d) for w in range(devices, 0, -1) for d in range(1, min(devices // w, layers) + 1)]
        for schedule in schedules:
            for width, depth in [(w, d) for w, d in shapes if not equal or layers % d == 0]:
                for size, samples in enumerate(micro_batches):
                    count, rest = divmod(global_batch, samples * width)
                    if rest or not count or (count < depth and not schedule.drained):
                        continue
                    for recomputed in recompute:
                        yield Pipeline(
                            schedule, samples, size,
                            tuple(kept(schedule, depth, stage, count, recomputed) for stage in range(depth)),
                            ((Term(2 if recomputed else 1, 1, 1, 1),),),
                            count + depth - 1 if schedule.drained else count,
                            line=((0,),) * depth, width=width, drained=schedule.drained, recompute=recomputed,
                        )  # fmt: skip

    return ChainStages(
        forward_s[:, None], backward_s[:, None], saved_bytes, boundary_bytes, weight_bytes, np.array([memory_bytes]),
        uniform_links(1, bandwidth_byte_per_s), tuple(pipelines()), equal=equal,
    )  # fmt: skip


def in_flight(stage: int, stages: int, concurrent: int) -> int:
    """Mini-batches that stage `stage` (0 is the first) of `stages` keeps if `concurrent` are in the pipeline."""
    return min(concurrent, max(stages, concurrent) - stage)


def hetpipe(
    compute_s: np.ndarray,
    weight_bytes: np.ndarray,
    saved_bytes: np.ndarray,
    boundary_bytes: np.ndarray,
    counts: tuple[int, ...],
    memory_bytes: np.ndarray,
    bandwidth_byte_per_s: np.ndarray,
    *,
    concurrent: int = 1,
    stash_weights: bool = True,
    optimizer_per_weight: float = 0.0,
    use_all: bool = True,
) -> ChainStages:
    """HetPipe's problem of one virtual worker; tables as in `ChainStages`, for mini-batches of one size.

    Args:
        compute_s: float64 [t, n] forward and backward of one mini-batch.
        weight_bytes: float64 [n].
        saved_bytes: float64 [n] activations kept of one mini-batch.
        boundary_bytes: float64 [n + 1].
        counts: devices of each type; see `use_all`.
        memory_bytes: float64 [t].
        bandwidth_byte_per_s: float64 [t, t] from a device of one type to one of another.
        concurrent: Nm, mini-batches in the pipeline at a time.
        stash_weights: one version of the weights is kept for each mini-batch in flight, else one in all.
        optimizer_per_weight: gradients and optimizer state, bytes per byte of weights.
        use_all: whether every device runs a stage.
    """
    devices, layers = sum(counts), len(weight_bytes)
    if devices < 1 or min(counts) < 0 or concurrent < 1:
        raise UsageError("nothing to decide: no device or no mini-batch", where="counts")

    def kept(stage: int, stages: int) -> Kept:
        held = in_flight(stage, stages, concurrent)
        return Kept((held if stash_weights else 1) + optimizer_per_weight, held)

    lengths = [n for n in ([devices] if use_all else range(min(devices, layers), 0, -1)) if n <= layers]
    pipelines = tuple(
        Pipeline("wave", 0, 0, tuple(kept(q, n) for q in range(n)), ((Term(1, 1, entering=2),),), 1.0) for n in lengths
    )
    return ChainStages(
        compute_s[None], np.zeros_like(compute_s)[None], saved_bytes[None], boundary_bytes[None], weight_bytes,
        memory_bytes, bandwidth_byte_per_s, pipelines, counts,
    )  # fmt: skip


def uniform_links(kinds: int, bandwidth_byte_per_s: float) -> np.ndarray:
    """The same bandwidth between all types, float64 [t, t]."""
    return np.full((kinds, kinds), bandwidth_byte_per_s)

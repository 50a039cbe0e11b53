"""Published schedules on a chain: BaPipe and HetPipe as pipelines of a `ChainStages`.

BaPipe, with M micro-batches, N stages on devices in line, SR the time of a cut's transfer one way:

    1f1b-as    (M + N - 1) slot         slot = largest max(F_i, SR out) + max(B_i, SR in): computing while sending
    fbp-as     (M + 2N - 1) slot        slot = largest of F_i + B_i and 2 SR: forward and backward units in parallel
                                        (M + N - 1 if micro-batches are passed on in pieces, as in the paper)
    1f1b-sno   (M + N - 1) slot + (N + M - 2 - ceil((M-1)/N)) 2 SR      slot = largest F_i + B_i: sending stops a device
    1f1b-so    (M + N - 1) slot + (N - 1) 2 SR                          slot = largest of F_i + B_i and SR

where SR in the totals is the largest of all cuts. The formulas are exact for equal stages and upper bounds for others.
A device keeps its stage's weights and gradients, and the features (activations) of N - i + 1 micro-batches (i = 1..N),
twice as many for fbp-as and 1f1b-so, whose warm-up is doubled. Asynchronous devices (FPGAs) run the first two,
synchronous ones (GPUs) the others, which `bapipe` states.

HetPipe's virtual worker: devices of several types form one pipeline with Nm mini-batches in flight; their order and the
cuts are decided together. Stage q = 0..k-1 keeps min(Nm, max(k, Nm) - q) of the mini-batches. The objective is the
slowest stage; the stage after a cut pays its transfers both ways.

Sources: Zhao et al., "BaPipe" (2020); Park et al., "HetPipe" (USENIX ATC 2020), sections 4 and 7.
"""

from __future__ import annotations

import math
from enum import StrEnum

import numpy as np

from planner.errors import UsageError
from planner.solvers.cluster_chains.chain import ChainPipeline, ChainStages


class BaPipeSchedule(StrEnum):
    """Schedule; see the formulas of the module."""

    AS = "1f1b-as"
    FBP_AS = "fbp-as"
    SNO = "1f1b-sno"
    SO = "1f1b-so"


SYNCHRONOUS = (BaPipeSchedule.SNO, BaPipeSchedule.SO)
"""Schedules of accelerators that run kernels and copies."""


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
        schedule: order of work.
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
    stages_left = stages - stage
    doubled = schedule in (BaPipeSchedule.SO, BaPipeSchedule.FBP_AS)
    kept = 2 * stages_left if doubled else stages_left
    if exact:
        kept = min(micro_batches, kept - 1 if schedule is BaPipeSchedule.SO else kept)
    return kept


def bapipe(
    compute_s: np.ndarray,
    feature_bytes: np.ndarray,
    boundary_bytes: np.ndarray,
    weight_bytes: np.ndarray,
    memory_bytes: np.ndarray,
    bandwidth_byte_per_s: float,
    micro_batches: int,
    schedule: BaPipeSchedule,
) -> ChainStages:
    """BaPipe's problem on D devices in line, at most one stage each; tables as in `ChainStages`, a type a device.

    Args:
        compute_s: float64 [D, n].
        feature_bytes: float64 [n] kept of one micro-batch.
        boundary_bytes: float64 [n + 1].
        weight_bytes: float64 [n].
        memory_bytes: float64 [D].
        bandwidth_byte_per_s: of the links between neighbours.
        micro_batches: of a mini-batch.
        schedule: of synchronous devices.
    """
    devices = len(memory_bytes)

    def straight(stages: int) -> ChainPipeline:
        kept = (features_in_flight(schedule, stage, stages, micro_batches, exact=True) for stage in range(stages))
        return ChainPipeline(
            schedule,
            tuple((2.0, features) for features in kept),
            rounds=pipeline_s(schedule, stages, micro_batches, 1.0),
            beside=1.0 if schedule is BaPipeSchedule.SO else 0.0,
            stops=pipeline_s(schedule, stages, micro_batches, 0.0, 1.0),
            line=tuple(range(stages)),
        )

    lengths = range(min(devices, len(weight_bytes)), 0, -1)
    return ChainStages(
        compute_s, feature_bytes, boundary_bytes, weight_bytes, memory_bytes,
        uniform_links(devices, bandwidth_byte_per_s), tuple(map(straight, lengths)),
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
        optimizer_per_weight: gradients and optimizer state, bytes per byte of weights.
        use_all: whether every device runs a stage.
    """
    devices, layers = sum(counts), len(weight_bytes)
    if devices < 1 or min(counts) < 0 or concurrent < 1:
        raise UsageError("nothing to decide: no device or no mini-batch", where="counts")

    def kept(stage: int, stages: int) -> tuple[float, float]:
        held = in_flight(stage, stages, concurrent)
        return held + optimizer_per_weight, held

    lengths = [n for n in ([devices] if use_all else range(min(devices, layers), 0, -1)) if n <= layers]
    pipelines = tuple(ChainPipeline("wave", tuple(kept(q, n) for q in range(n)), 1.0, entering=2.0) for n in lengths)
    return ChainStages(
        compute_s, saved_bytes, boundary_bytes, weight_bytes, memory_bytes, bandwidth_byte_per_s, pipelines, counts
    )


def uniform_links(kinds: int, bandwidth_byte_per_s: float) -> np.ndarray:
    """The same bandwidth between all types, float64 [t, t]."""
    return np.full((kinds, kinds), bandwidth_byte_per_s)

"""Synchronous pipelines of equal stages in one direction: iteration time, bubble, and what each worker keeps.

Bubbles are over total time, 1 - work / (workers * iteration), unless the name says `over_ideal`. Each form is tested
equal to the simulation of its schedule (`planner.measure_schedule`) over ranges of stages and micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from planner.errors import PlanError, UsageError
from planner.formulas._checks import divides, positive, whole
from planner.schedules import bpipe, get
from planner.schedules.types import ActivationUnit, Pipeline


def pipeline_makespan_s(stages: int, micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Seconds of any pipeline that fills and drains once (GPipe, 1F1B, DAPPLE): (M + D - 1)(F + B).

    >>> formulas.pipeline_makespan_s(4, 8, 1, 2)
    33
    """
    whole(stages=stages, micro_batches=micro_batches)
    return (micro_batches + stages - 1) * (forward_s + backward_s)


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Share of the time in which a worker of such a pipeline waits: (D-1)/(M+D-1), over total time.

    >>> round(formulas.pipeline_bubble(4, 8), 4)
    0.2727
    """
    whole(stages=stages, micro_batches=micro_batches)
    return (stages - 1) / (micro_batches + stages - 1)


def pipeline_bubble_over_ideal(stages: int, micro_batches: int) -> float:
    """The same waiting time over the time of the work itself: (D-1)/M.

    >>> formulas.pipeline_bubble_over_ideal(4, 8)
    0.375
    """
    whole(stages=stages, micro_batches=micro_batches)
    return (stages - 1) / micro_batches


def gpipe_bubble(stages: int, micro_batches: int) -> float:
    """GPipe's bubble, (K-1)/(M+K-1).

    >>> round(formulas.gpipe_bubble(stages=8, micro_batches=32), 4)
    0.1795
    """
    return pipeline_bubble(stages, micro_batches)


def gpipe_makespan_s(
    stages: int, micro_batches: int, forward_s: float, backward_s: float, recompute_s: float = 0.0
) -> float:
    """Seconds of GPipe: (M + K - 1)(F + B), with re-materialisation (M + K - 1)(F + B + R), R usually F.

    >>> formulas.gpipe_makespan_s(4, 8, 1, 2), formulas.gpipe_makespan_s(4, 8, 1, 2, recompute_s=1)
    (33.0, 44)
    """
    return pipeline_makespan_s(stages, micro_batches, forward_s, backward_s + recompute_s)


def gpipe_speedup(stages: int, micro_batches: int) -> float:
    """Throughput of K workers over one: K M/(M+K-1).

    >>> [round(formulas.gpipe_speedup(k, 32), 2) for k in (2, 4, 8)]
    [1.94, 3.66, 6.56]
    """
    return stages * (1 - pipeline_bubble(stages, micro_batches))


def gpipe_in_flight(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches that each stage keeps: all.

    >>> formulas.gpipe_in_flight(4, 8)
    (8, 8, 8, 8)
    """
    whole(stages=stages, micro_batches=micro_batches)
    return (micro_batches,) * stages


def gpipe_activation_bytes(
    layers: int, stages: int, micro_batches: int, layer_bytes: float, *, recompute: bool = True
) -> float:
    """Activations of a worker: a mini-batch's inputs and one micro-batch of its layers, N + L/K N/M; else N L/K.

    `layer_bytes` is what one layer puts out for the whole mini-batch, N.

    >>> [formulas.gpipe_activation_bytes(48, 8, 32, 64.0, recompute=r) for r in (True, False)]
    [76.0, 384.0]
    """
    whole(layers=layers, stages=stages, micro_batches=micro_batches)
    share = layers / stages
    return layer_bytes * (1 + share / micro_batches) if recompute else layer_bytes * share


def one_f_one_b_bubble(stages: int, micro_batches: int) -> float:
    """The bubble of 1F1B with a flush, (D-1)/(M+D-1), as GPipe's.

    >>> round(formulas.one_f_one_b_bubble(4, 4), 4)
    0.4286
    """
    return pipeline_bubble(stages, micro_batches)


def one_f_one_b_makespan_s(stages: int, micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Seconds of 1F1B with a flush, (M + D - 1)(F + B), as GPipe's.

    >>> formulas.one_f_one_b_makespan_s(8, 32, 1, 2)
    117
    """
    return pipeline_makespan_s(stages, micro_batches, forward_s, backward_s)


def one_f_one_b_in_flight(stages: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches that each stage keeps: min(M, D - s).

    >>> formulas.one_f_one_b_in_flight(4, 8), formulas.one_f_one_b_in_flight(4, 2)
    ((4, 3, 2, 1), (2, 2, 2, 1))
    """
    whole(stages=stages, micro_batches=micro_batches)
    return tuple(min(micro_batches, stages - s) for s in range(stages))


def interleaved_bubble(workers: int, micro_batches: int, chunks: int) -> float:
    """Interleaved 1F1B with v chunks a worker: (p-1)/(v m + p - 1).

    >>> round(formulas.interleaved_bubble(4, 8, chunks=2), 4)
    0.1579
    """
    whole(workers=workers, micro_batches=micro_batches, chunks=chunks)
    return (workers - 1) / (chunks * micro_batches + workers - 1)


def interleaved_bubble_over_ideal(workers: int, micro_batches: int, chunks: int) -> float:
    """The same over the time of the work itself: (p-1)/(v m).

    >>> formulas.interleaved_bubble_over_ideal(4, 8, chunks=2)
    0.1875
    """
    whole(workers=workers, micro_batches=micro_batches, chunks=chunks)
    return (workers - 1) / (chunks * micro_batches)


def interleaved_makespan_s(workers: int, micro_batches: int, chunks: int, forward_s: float, backward_s: float) -> float:
    """Seconds, F and B being of all chunks of a worker: m (F+B) + (p-1)(F+B)/v; m is a multiple of p.

    >>> formulas.interleaved_makespan_s(4, 8, 2, 1, 2)
    28.5
    """
    whole(workers=workers, micro_batches=micro_batches, chunks=chunks)
    divides("micro-batches", micro_batches, "workers", workers)
    return (micro_batches + (workers - 1) / chunks) * (forward_s + backward_s)


def interleaved_warm_up(workers: int, chunks: int) -> tuple[int, ...]:
    """Chunk forwards of each worker before its first backward, micro-batches enough: 2(p-r-1) + (v-1)p.

    >>> formulas.interleaved_warm_up(4, 2)
    (10, 8, 6, 4)
    """
    whole(workers=workers, chunks=chunks)
    return tuple(2 * (workers - r - 1) + (chunks - 1) * workers for r in range(workers))


def interleaved_in_flight(workers: int, micro_batches: int, chunks: int) -> tuple[float, ...]:
    """Activations of each worker in whole stages: (warm-up + 1)/v, at most m.

    >>> formulas.interleaved_in_flight(4, 8, 2)
    (5.5, 4.5, 3.5, 2.5)
    """
    whole(micro_batches=micro_batches)
    return tuple(min(micro_batches * chunks, k + 1) / chunks for k in interleaved_warm_up(workers, chunks))


def interleaved_memory_factor(workers: int, chunks: int) -> float:
    """Activations of the first worker over those of 1F1B: 1 + (p-1)/(p v). Transfers are v times as many.

    >>> formulas.interleaved_memory_factor(4, 2), formulas.interleaved_memory_factor(4, 4)
    (1.375, 1.1875)
    """
    whole(workers=workers, chunks=chunks)
    return 1 + (workers - 1) / (workers * chunks)


def bpipe_in_flight(workers: int) -> int:
    """Micro-batches that each worker keeps at the most, micro-batches enough: ceil((p+2)/2) instead of p.

    >>> [formulas.bpipe_in_flight(p) for p in (4, 8, 16)]
    [3, 5, 9]
    """
    whole(workers=workers)
    return min(workers, bpipe.BPipe().limit(workers))


def seq1f1b_bubble(stages: int, micro_batches: int, splits: int) -> float:
    """Seq1F1B with k sub-sequences of equal cost: (p-1)/(k m + p - 1).

    >>> round(formulas.seq1f1b_bubble(4, 8, splits=4), 4)
    0.0857
    """
    whole(stages=stages, micro_batches=micro_batches, splits=splits)
    return (stages - 1) / (splits * micro_batches + stages - 1)


def seq1f1b_in_flight(stages: int, micro_batches: int, splits: int) -> tuple[float, ...]:
    """Micro-batches that each stage keeps: (p - 1 - r + k)/k, at most m.

    >>> formulas.seq1f1b_in_flight(4, 8, splits=4)
    (1.75, 1.5, 1.25, 1.0)
    """
    whole(stages=stages, micro_batches=micro_batches, splits=splits)
    return tuple(min(micro_batches, (stages - 1 - r + splits) / splits) for r in range(stages))


def seq1f1b_warm_up(stages: int, splits: int) -> tuple[int, ...]:
    """Sub-sequences that each stage takes in before it alternates: p - r - 2 + k.

    >>> formulas.seq1f1b_warm_up(4, splits=4)
    (6, 5, 4, 3)
    """
    whole(stages=stages, splits=splits)
    return tuple(stages - r - 2 + splits for r in range(stages))


def seq1f1b_lengths(sequence: int, splits: int, hidden: int) -> tuple[int, ...]:
    """Tokens of k sub-sequences of about equal work under causal attention: 24 h^2 t + 2 h t^2 up to token t.

    The first are the longest, as later tokens attend to all before.

    >>> formulas.seq1f1b_lengths(8192, 4, hidden=1024), formulas.seq1f1b_lengths(8192, 4, hidden=1 << 20)
    ((2783, 2102, 1761, 1546), (2049, 2048, 2048, 2047))
    """
    whole(sequence=sequence, splits=splits, hidden=hidden)
    if splits > sequence:
        raise UsageError(f"{sequence} tokens do not make {splits} sub-sequences", hint="use fewer")
    linear, pairs = 12 * hidden, 1.0
    total = linear * sequence + pairs * sequence**2
    ends = [0]
    for part in range(1, splits + 1):
        end = (math.sqrt(linear**2 + 4 * pairs * total * part / splits) - linear) / (2 * pairs)
        ends.append(min(max(round(end), ends[-1] + 1), sequence - (splits - part)))
    return tuple(b - a for a, b in pairwise(ends))


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """What a worker keeps: copies of its share of the weights, and micro-batches' activations of its share."""

    weights: float
    activations: float


def pipeline_memory(schedule: str, stages: int, micro_batches: int) -> tuple[WorkerMemory, ...]:
    """Memory of each worker by what the schedule claims, a share being the model over the workers.

    Args:
        schedule: any name of `planner.schedules.names()`, with options (`chimera:pairs=2`).
        stages: pieces of the model; two for each worker of a V, v for interleaved, 2W for a wave.
        micro_batches: of one iteration.

    >>> formulas.pipeline_memory("pipedream", 4, 8)[0], formulas.pipeline_memory("chimera", 4, 4)[0]
    (WorkerMemory(weights=4.0, activations=4.0), WorkerMemory(weights=2.0, activations=3.0))

    Raises:
        UsageError: no such schedule.
        PlanError: it cannot serve such a pipeline; says why.
    """
    chosen, pipeline = get(schedule), Pipeline((1,) * stages, micro_batches)
    reason = chosen.supports(pipeline)
    if reason:
        raise PlanError(reason, hint="change the stages, the micro-batches, or the schedule")
    versions, placement = chosen.weight_versions(pipeline), chosen.placement(pipeline)
    chunks = max(stages // len(placement), 1)
    unit = {ActivationUnit.CHUNK: chunks, ActivationUnit.SUB_SEQUENCE: chosen.work(pipeline).parts}
    each = unit.get(chosen.activation_unit, 1)
    return tuple(
        WorkerMemory(sum(versions[stage] for stage in own) / chunks, kept / each)
        for own, kept in zip(placement, chosen.held(pipeline), strict=True)
    )


def recompute_overhead(forward_s: float, backward_s: float) -> float:
    """What repeating the forward adds to the work: F/(F+B), a third for B = 2F.

    >>> round(formulas.recompute_overhead(1, 2), 4)
    0.3333
    """
    positive(work_s=forward_s + backward_s)
    return forward_s / (forward_s + backward_s)

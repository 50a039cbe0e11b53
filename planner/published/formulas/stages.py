"""Cost models of published stage planners: the cost of given stages, and the best stages.

Partition problems given as columns of figures are solved exactly by `planner.solve_partition`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from planner.errors import UsageError, positive, same_length, whole
from planner.exchange.formulas import all_reduce_bytes
from planner.graph.ideals import enumerate_ideals, topological_line
from planner.memory import fits
from planner.published.problems import (
    BaPipeSchedule,
    IterationProblem,
    MaxLoadProblem,
    PipeDreamProblem,
    Released,
    chain_layers,
    features_in_flight,
    hetpipe,
    pipeline_s,
    uniform_links,
)
from planner.published.solvers import Result, solve_partition
from planner.registry import chosen
from planner.sums import float_sum

_BAPIPE = {
    "as": BaPipeSchedule.AS,
    "fbp": BaPipeSchedule.FBP_AS,
    "sno": BaPipeSchedule.SNO,
    "so": BaPipeSchedule.SO,
    **{s.value: s for s in BaPipeSchedule},
}


def bapipe_makespan_s(
    schedule: str,
    stages: int,
    micro_batches: int,
    forward_s: float,
    backward_s: float,
    transfer_s: float = 0.0,
    *,
    fill_overlap: bool = False,
) -> float:
    """Makespan of BaPipe's schedules for N equal stages; SR is the one-way transfer time of a boundary.

    as (M+N-1)(F+B); sno (M+N-1)(F+B) + (N+M-2-ceil((M-1)/N)) 2SR; so (M+N-1)(F+B) + (N-1) 2SR; fbp
    (M+2N-1)(F+B), as its stages wait for complete inputs; with `fill_overlap`, as published, (M+N-1)(F+B).

    >>> [formulas.bapipe_makespan_s(s, 4, 8, 1, 2, transfer_s=0.25) for s in ("as", "sno", "so")]
    [33, 37.0, 34.5]
    >>> formulas.bapipe_makespan_s("fbp", 3, 6, 1, 2), formulas.bapipe_makespan_s("fbp", 3, 6, 1, 2, fill_overlap=True)
    (33, 24)
    """
    whole(stages=stages, micro_batches=micro_batches)
    order = chosen("BaPipe schedule", schedule, _BAPIPE)
    return pipeline_s(order, stages, micro_batches, forward_s + backward_s, transfer_s, fill_overlap=fill_overlap)


def bapipe_features(schedule: str, stages: int, micro_batches: int | None = None) -> tuple[int, ...]:
    """Micro-batches whose features each stage keeps, as published: N-i+1 (as, sno), 2(N-i+1) (fbp, so), i = 1..N.

    With `micro_batches` the exact numbers: one less for so, and at most M.

    >>> formulas.bapipe_features("sno", 4), formulas.bapipe_features("so", 4), formulas.bapipe_features("so", 4, 5)
    ((4, 3, 2, 1), (8, 6, 4, 2), (5, 5, 3, 1))
    """
    whole(stages=stages)
    order = chosen("BaPipe schedule", schedule, _BAPIPE)
    exact, count = micro_batches is not None, micro_batches or 1
    return tuple(features_in_flight(order, s, stages, count, exact=exact) for s in range(stages))


def bapipe_bandwidth_byte_per_s(schedule: str, feature_bytes: float, forward_s: float, backward_s: float) -> float:
    """Link bandwidth at which an asynchronous schedule never waits: a/F for as, 2a/(F+B) for fbp.

    >>> [round(formulas.bapipe_bandwidth_byte_per_s(s, 6.0, 1, 2), 2) for s in ("as", "fbp")]
    [6.0, 4.0]
    """
    positive(forward_s=forward_s, backward_s=backward_s)
    order = chosen("BaPipe schedule", schedule, _BAPIPE)
    table = {BaPipeSchedule.AS: feature_bytes / forward_s}
    table[BaPipeSchedule.FBP_AS] = 2 * feature_bytes / (forward_s + backward_s)
    if order not in table:
        raise UsageError(f"{schedule} sends and computes in turn", hint="use as or fbp")
    return table[order]


def bapipe_schedule(
    *,
    asynchronous: bool,
    feature_bytes: float,
    forward_s: float,
    backward_s: float,
    byte_per_s: float,
    stages: int,
    memory_bytes: float = math.inf,
    weight_bytes: float = 0.0,
) -> str:
    """The schedule that BaPipe picks: `as` if the link has a/F, else `fbp`; `so` if twice the features fit, else `sno`.

    Memory is that of the first stage: weights, gradients, and the features of its micro-batches.

    >>> link = dict(feature_bytes=6.0, forward_s=1, backward_s=2, byte_per_s=5.0, stages=4)
    >>> formulas.bapipe_schedule(asynchronous=True, **link), formulas.bapipe_schedule(asynchronous=False, **link)
    ('fbp', 'so')
    >>> formulas.bapipe_schedule(asynchronous=False, **link, memory_bytes=40)
    'sno'
    """
    if asynchronous:
        return "as" if byte_per_s >= bapipe_bandwidth_byte_per_s("as", feature_bytes, forward_s, backward_s) else "fbp"
    needed = bapipe_features("so", stages)[0] * feature_bytes + 2 * weight_bytes
    return "so" if fits(needed, memory_bytes) else "sno"


def dapple_latency_s(
    forward_s: Sequence[float], backward_s: Sequence[float], micro_batches: int, sync_s: Sequence[float] | None = None
) -> float:
    """DAPPLE's estimate by the pivot stage Q: Tw + Ts + Te = sum F to Q + (M-1)(F_Q+B_Q) + max_s(AR_s +- sum B).

    The search for the pivot goes from the last stage to the first: a stage becomes the pivot if its steady phase is
    longer than that of Q plus the stages in between. Exact if the pivot is the critical stage, too low if an early
    stage is slow. O(stages^2).

    >>> formulas.dapple_latency_s([1] * 4, [2] * 4, 8), formulas.dapple_latency_s([1] * 4, [2] * 4, 8, sync_s=[5] * 4)
    (33, 38)
    >>> formulas.dapple_latency_s([2, 1, 1, 1], [4, 2, 2, 2], 8)
    48
    """
    whole(micro_batches=micro_batches)
    sync = [0] * len(forward_s) if sync_s is None else sync_s
    same_length(forward_s=forward_s, backward_s=backward_s, sync_s=sync)
    stage_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    pivot = len(stage_s) - 1
    for stage in reversed(range(pivot)):
        between = float_sum(stage_s[stage + 1 : pivot])
        if (micro_batches - 1) * stage_s[stage] > (micro_batches - 1) * stage_s[pivot] + between:
            pivot = stage
    ending = max(
        moved + (float_sum(backward_s[s : pivot + 1]) if s <= pivot else -float_sum(backward_s[pivot + 1 : s + 1]))
        for s, moved in enumerate(sync)
    )
    return float_sum(forward_s[: pivot + 1]) + (micro_batches - 1) * stage_s[pivot] + ending


def dapple_released_latency_s(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    micro_batches: int,
    sync_s: Sequence[float] | None = None,
    transfer_s: Sequence[float] = (),
) -> float:
    """Estimate of DAPPLE's released planner: block (M-1) + sum(F+B) + transfers of the cuts + max_i(AR_i - i block).

    block is the slowest stage's F + B; the last term is not below 0.

    >>> formulas.dapple_released_latency_s([2, 1, 1, 1], [4, 2, 2, 2], 8)
    57
    """
    whole(micro_batches=micro_batches)
    sync = [0] * len(forward_s) if sync_s is None else sync_s
    same_length(forward_s=forward_s, backward_s=backward_s, sync_s=sync)
    stage_s = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
    block = max(stage_s)
    exposed = max(0, *(ar - i * block for i, ar in enumerate(sync)))
    return block * (micro_batches - 1) + float_sum(stage_s) + float_sum(transfer_s) + exposed


def dapple_placement(policy: str, free: Sequence[int], size: int, needed: int) -> tuple[int, ...]:
    """Devices that a stage takes from each machine: unused machines first, machines in use first, or evenly from all.

    Args:
        policy: fresh-first, append-first or scatter-first.
        free: unused devices of each machine.
        size: devices of a machine.
        needed: devices of the stage.

    >>> [formulas.dapple_placement(p, [1, 4, 4], 4, 4) for p in ("fresh-first", "append-first", "scatter-first")]
    [(0, 4, 0), (1, 3, 0), (1, 2, 1)]

    Raises:
        UsageError: the policy is unknown, or too few devices are free.
    """
    whole(0, **{f"free[{i}]": count for i, count in enumerate(free)})
    whole(size=size, needed=needed)
    if sum(free) < needed:
        raise UsageError(f"{needed} devices are needed and {sum(free)} free", hint="use fewer replicas")
    used = [0 < count < size for count in free]
    order = {
        "fresh-first": sorted(range(len(free)), key=lambda i: used[i]),
        "append-first": sorted(range(len(free)), key=lambda i: not used[i]),
        "scatter-first": list(range(len(free))),
    }
    taken = [0] * len(free)
    machine_order = chosen("placement policy", policy, order)
    while sum(taken) < needed:
        for i in machine_order:
            limit = 1 if policy == "scatter-first" else needed
            taken[i] += min(limit, free[i] - taken[i], needed - sum(taken))
    return tuple(taken)


def alpa_latency_s(stage_s: Sequence[float], micro_batches: int) -> float:
    """Iteration of a synchronous pipeline of unequal stages: sum t + (B-1) max t.

    >>> formulas.alpa_latency_s([1, 2, 1], 8), formulas.alpa_latency_s([3, 3], 4), formulas.alpa_latency_s([2, 5], 4)
    (18, 15, 22)
    """
    whole(micro_batches=micro_batches)
    same_length(stage_s=stage_s)
    return float_sum(stage_s) + (micro_batches - 1) * max(stage_s)


def piper_stage_s(
    time_s: float,
    boundary_bytes: float,
    weight_bytes: float,
    replicas: int,
    batch: int,
    byte_per_s: float,
    tensor_bytes: float = 0.0,
) -> float:
    """Time per sample of a stage: p/d + [2(c + c_tp)/d + 4(d-1)w/(dN)]/B.

    Args:
        time_s: p, time of one replica for a sample.
        boundary_bytes: c, bytes through the stage's boundaries in one direction.
        weight_bytes: w.
        replicas: d.
        batch: N, samples of a mini-batch.
        byte_per_s: B, bandwidth.
        tensor_bytes: c_tp, bytes that tensor parallelism adds at the boundaries.

    >>> formulas.piper_stage_s(6, 10, 400, replicas=2, batch=64, byte_per_s=100)
    3.225
    """
    whole(replicas=replicas, batch=batch)
    positive(byte_per_s=byte_per_s)
    moved = 2 * (boundary_bytes + tensor_bytes) / replicas + 2 * all_reduce_bytes(weight_bytes, replicas) / batch
    return time_s / replicas + moved / byte_per_s


def piper_time_per_sample_s(stages: Sequence[tuple[float, float, float, int]], batch: int, byte_per_s: float) -> float:
    """Piper's objective, the time of the slowest stage; a stage is (time, boundary bytes, weight bytes, replicas).

    >>> formulas.piper_time_per_sample_s([(8, 10, 100, 4), (6, 10, 400, 2)], batch=64, byte_per_s=100)
    3.225
    """
    same_length(stages=stages)
    return max(piper_stage_s(*stage, batch, byte_per_s) for stage in stages)


def contiguous_sets(nodes: int, edges: Sequence[tuple[int, int]] | None = None, most: int = 2000) -> tuple[int, int]:
    """Numbers of downsets of a DAG, and of distinct non-empty differences of two downsets: the possible stages.

    A chain of n layers (the default) has n + 1 and n(n+1)/2. O(downsets^2).

    >>> formulas.contiguous_sets(8), formulas.contiguous_sets(24)
    ((9, 36), (25, 300))

    Raises:
        UsageError: more than `most` downsets.
    """
    whole(nodes=nodes)
    arcs = [(i, i + 1) for i in range(nodes - 1)] if edges is None else list(edges)
    ideals = enumerate_ideals(nodes, arcs, most)
    if ideals is None:
        raise UsageError(
            f"the graph has more than {most} downsets", hint="allow more, or solve it by planner.partition"
        )
    bits = [int.from_bytes(row.astype("<u8").tobytes(), "little") for row in ideals]
    return len(bits), len({b & ~a for a in bits for b in bits if a & b == a and a != b})


def max_load_bound(work: Sequence[float], devices: int) -> float:
    """Lower bound on the load of the fullest of k devices: the maximum of the mean load and the largest node.

    >>> formulas.max_load_bound([4, 3, 2, 6, 5], 2), round(formulas.max_load_bound([4, 3, 2, 6, 5], 3), 4)
    (10.0, 6.6667)
    """
    whole(devices=devices)
    same_length(work=work)
    return max(float_sum(work) / devices, max(work))


TIME_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class PipeDreamStages:
    """The result of PipeDream's partitioner.

    Attributes:
        bottleneck_s: time of the slowest stage or transfer, seconds per mini-batch.
        boundaries: 0, ..., n: stage i runs the layers `boundaries[i]` to `boundaries[i + 1] - 1`.
        replicas: replicas of each stage.
        data_parallel_s: seconds per mini-batch with all layers on all workers.
    """

    bottleneck_s: float
    boundaries: tuple[int, ...]
    replicas: tuple[int, ...]
    data_parallel_s: float


def pipedream_partition(
    compute_s: Sequence[float],
    weight_bytes: Sequence[float],
    output_bytes: Sequence[float],
    workers: int | Sequence[int],
    byte_per_s: float | Sequence[float],
    cost: str = "published",
    *,
    replicate: bool = True,
) -> PipeDreamStages:
    """The best stages and replicas of a chain of layers, by PipeDream's recurrence.

    Args:
        compute_s: forward and backward time of each layer.
        weight_bytes: weights of each layer.
        output_bytes: output activations of each layer.
        workers: number of workers, or number by level, innermost level first.
        byte_per_s: bandwidth of the links, by level.
        cost: `published` max(compute, 2(m-1)w/B)/m, `released` (compute + 4(m-1)w/(mB))/m.
        replicate: True if stages may have replicas.

    >>> layers = dict(compute_s=[4, 3, 3, 1, 1], weight_bytes=[0.1, 0.2, 0.4, 4, 8], output_bytes=[8, 4, 2, 1, 0])
    >>> found = formulas.pipedream_partition(**layers, workers=4, byte_per_s=4)
    >>> round(found.bottleneck_s, 6), found.boundaries, found.replicas, round(found.data_parallel_s, 6)
    (3.333333, (0, 3, 5), (3, 1), 4.7625)
    """
    same_length(compute_s=compute_s, weight_bytes=weight_bytes, output_bytes=output_bytes)
    machines = (workers,) if isinstance(workers, int) else tuple(workers)
    speeds = (float(byte_per_s),) if isinstance(byte_per_s, (int, float)) else tuple(byte_per_s)
    rules = {"published": Released.NOTHING, "paper": Released.NOTHING, "released": Released.COST}
    layers = chain_layers([*map(float, compute_s)], [*map(float, weight_bytes)], [*map(float, output_bytes)])
    problem = PipeDreamProblem(layers, machines, speeds, chosen("cost", cost, rules), replicate=replicate)
    result = _solved(problem)
    parallel = problem.judge(dict(problem.trivial())["data-parallel"]).objective
    replicas = tuple(stage.replicas for stage in result.decision)
    return PipeDreamStages(result.objective, _boundaries(len(s.layers) for s in result.decision), replicas, parallel)


def hetpipe_partition(
    layers: Sequence[float], speeds: Sequence[float], boundary_bytes: Sequence[float] = (), byte_per_s: float = math.inf
) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
    """Minimise the slowest stage over all cuts of a chain and all orders of the devices; every device is used.

    Args:
        layers: work of each layer; the time of a stage is its work over the speed of its device.
        speeds: speed of each device.
        boundary_bytes: bytes that each layer sends to the next, one way; none by default.
        byte_per_s: bandwidth of the links.

    >>> formulas.hetpipe_partition([3, 1, 4, 1, 5, 9, 2, 6], speeds=[4, 2, 2, 1])[0]
    4.0

    Returns:
        Time of the slowest stage, the cuts, and the device speed of each stage.
    """
    same_length(layers=layers)
    positive(slowest_speed=min(speeds, default=0))
    kinds = sorted(set(speeds), reverse=True)
    count, work = len(layers), np.asarray(layers, dtype=float)
    crossing = np.zeros(count + 1)
    if len(boundary_bytes):
        same_length(layers=layers, boundary_bytes=boundary_bytes)
        crossing[1:] = boundary_bytes
    problem = hetpipe(
        compute_s=np.asarray([work / speed for speed in kinds]),
        weight_bytes=np.zeros(count),
        saved_bytes=np.zeros(count),
        boundary_bytes=crossing,
        counts=tuple(list(speeds).count(kind) for kind in kinds),
        memory_bytes=np.full(len(kinds), math.inf),
        bandwidth_byte_per_s=uniform_links(len(kinds), byte_per_s),
    )
    result = _solved(problem)
    return result.objective, result.decision.boundaries, tuple(float(kinds[kind]) for kind in result.decision.types)


def max_load_partition(
    work: Sequence[float],
    devices: int,
    edges: Sequence[tuple[int, int]] | None = None,
    sizes: Sequence[float] | None = None,
    byte_per_s: float = 1.0,
) -> tuple[float, tuple[int, ...]]:
    """Acyclic k-partition of a DAG that minimises the fullest block: work, and distinct inputs and outputs over B.

    Args:
        work: work of each node.
        devices: k.
        edges: pairs of nodes; a chain by default.
        sizes: bytes of each node's result; 0 by default.
        byte_per_s: B, bandwidth.

    >>> formulas.max_load_partition([4, 3, 2, 6, 5], 2)
    (11.0, (0, 0, 0, 1, 1))
    >>> formulas.max_load_partition([4, 3, 2, 6, 5], 2, sizes=[4, 8, 1, 2, 0], byte_per_s=4)[0]
    11.25

    Returns:
        Load of the fullest block, and the block of each node, in pipeline order.
    """
    whole(devices=devices)
    positive(byte_per_s=byte_per_s)
    count = same_length(work=work)
    moved = np.zeros(count) if sizes is None else np.asarray(sizes, dtype=float) / byte_per_s
    if len(moved) != count:
        same_length(work=work, sizes=sizes or ())
    arcs = [(i, i + 1) for i in range(count - 1)] if edges is None else list(edges)
    times = np.asarray(work, dtype=float)
    problem = MaxLoadProblem(
        accelerators=devices,
        cpus=0,
        memory_bytes=math.inf,
        accelerator_ms=times,
        cpu_ms=times,
        size_bytes=np.zeros(count),
        supported=np.ones(count, dtype=bool),
        backward=np.zeros(count, dtype=bool),
        colour=np.full(count, -1),
        edges=np.asarray(arcs, dtype=np.int64).reshape(-1, 2),
        transfer_ms=moved,
    )
    result = _solved(problem)
    return result.objective, _in_order(result.decision, arcs)


def alpa_partition(layer_s: Sequence[float], stages: int, micro_batches: int) -> tuple[float, tuple[int, ...]]:
    """Cut a chain into stages, one device each, that minimise sum t + (B-1) max t.

    >>> formulas.alpa_partition([1, 2, 1, 1, 1], stages=2, micro_batches=8)
    (27.0, (0, 2, 5))

    Returns:
        Latency of an iteration, and the cuts.
    """
    count = same_length(layer_s=layer_s)
    whole(stages=stages, micro_batches=micro_batches)
    if stages > count:
        raise UsageError(f"{count} layers do not make {stages} stages", hint="use fewer stages")
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(layer_s, dtype=float))])
    table = np.where(np.tri(count, dtype=bool).T, sums[None, 1:] - sums[:-1, None], np.inf)
    result = _solved(IterationProblem(table[:, :, None], np.array([1]), stages, micro_batches))
    return result.objective, _boundaries(s.last - s.first + 1 for s in result.decision)


def _solved(problem: object) -> Result:
    return solve_partition(problem, time_limit_s=TIME_LIMIT_S)  # type: ignore[arg-type]


def _boundaries(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))


def _in_order(blocks: Sequence[int], edges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Number the blocks so that every edge goes to the same or a later block; empty blocks are left out."""
    arcs = [(blocks[a], blocks[b]) for a, b in edges]
    ordered = [b for b in topological_line(max(blocks) + 1, arcs) if b in set(blocks)]
    return tuple(ordered.index(b) for b in blocks)

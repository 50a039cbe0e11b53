"""Partition problems given by a few columns of figures, solved exactly by the solvers of `planner.solve_partition`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from planner.errors import UsageError
from planner.formulas.checks import chosen, positive, same_length, whole
from planner.graph.ideals import topological_line
from planner.solvers.partition import Result, solve_partition
from planner.space.partition import (
    IterationProblem,
    MaxLoadProblem,
    PipeDreamProblem,
    StageCost,
    chain_layers,
    hetpipe,
    uniform_links,
)

TIME_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class PipeDreamStages:
    """What PipeDream's partitioner finds.

    Attributes:
        bottleneck_s: the slowest stage or transfer, seconds a mini-batch.
        boundaries: 0, ..., n: stage i runs the layers `boundaries[i]` to `boundaries[i + 1] - 1`.
        replicas: of each stage.
        data_parallel_s: the same of all layers on all workers.
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
        compute_s: forward and backward of each layer.
        weight_bytes: of each layer.
        output_bytes: activations that each layer passes on.
        workers: of one level, or by level, innermost first.
        byte_per_s: of the links, by level.
        cost: `published` max(compute, 2(m-1)w/B)/m, `released` (compute + 4(m-1)w/(mB))/m.
        replicate: whether stages may have replicas.

    >>> layers = dict(compute_s=[4, 3, 3, 1, 1], weight_bytes=[0.1, 0.2, 0.4, 4, 8], output_bytes=[8, 4, 2, 1, 0])
    >>> found = formulas.pipedream_partition(**layers, workers=4, byte_per_s=4)
    >>> round(found.bottleneck_s, 6), found.boundaries, found.replicas, round(found.data_parallel_s, 6)
    (3.333333, (0, 3, 5), (3, 1), 4.7625)
    """
    same_length(compute_s=compute_s, weight_bytes=weight_bytes, output_bytes=output_bytes)
    machines = (workers,) if isinstance(workers, int) else tuple(workers)
    speeds = (float(byte_per_s),) if isinstance(byte_per_s, (int, float)) else tuple(byte_per_s)
    rule = chosen(
        "cost", cost, {"published": StageCost.PAPER, "paper": StageCost.PAPER, "released": StageCost.RELEASED}
    )
    layers = chain_layers([*map(float, compute_s)], [*map(float, weight_bytes)], [*map(float, output_bytes)])
    problem = PipeDreamProblem(layers, machines, speeds, cost=rule, replicate=replicate)
    found = _solved(problem)
    parallel = problem.judge(dict(problem.trivial())["data-parallel"]).objective
    replicas = tuple(stage.replicas for stage in found.decision)
    return PipeDreamStages(found.objective, _marks(len(s.layers) for s in found.decision), replicas, parallel)


@dataclass(frozen=True, slots=True)
class HetPipeStages:
    """What HetPipe's partitioner finds: the slowest stage, the cuts, and the speed of the device of each stage."""

    bottleneck_s: float
    boundaries: tuple[int, ...]
    order: tuple[float, ...]


def hetpipe_partition(
    layers: Sequence[float], speeds: Sequence[float], boundary_bytes: Sequence[float] = (), byte_per_s: float = math.inf
) -> HetPipeStages:
    """The least slowest stage over all cuts of a chain and all orders of devices of these speeds, all in use.

    Args:
        layers: work of each layer; a stage takes its sum over its device's speed.
        speeds: of each device.
        boundary_bytes: what crosses behind each layer, one way; nothing when absent.
        byte_per_s: of the links.

    >>> formulas.hetpipe_partition([3, 1, 4, 1, 5, 9, 2, 6], speeds=[4, 2, 2, 1]).bottleneck_s
    4.0
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
    found = _solved(problem)
    return HetPipeStages(
        found.objective, found.decision.boundaries, tuple(float(kinds[kind]) for kind in found.decision.types)
    )


@dataclass(frozen=True, slots=True)
class Blocks:
    """An acyclic partition: load of the fullest block, and the block of each node, in pipeline order."""

    max_load: float
    blocks: tuple[int, ...]


def max_load_partition(
    work: Sequence[float],
    devices: int,
    edges: Sequence[tuple[int, int]] | None = None,
    sizes: Sequence[float] | None = None,
    byte_per_s: float = 1.0,
) -> Blocks:
    """Acyclic k-partition of a DAG with the least fullest block: its work, its distinct inputs and its outputs over B.

    Args:
        work: of each node.
        devices: k.
        edges: from node to node; a chain when absent.
        sizes: of each node's result; nothing when absent.
        byte_per_s: B.

    >>> formulas.max_load_partition([4, 3, 2, 6, 5], 2)
    Blocks(max_load=11.0, blocks=(0, 0, 0, 1, 1))
    >>> formulas.max_load_partition([4, 3, 2, 6, 5], 2, sizes=[4, 8, 1, 2, 0], byte_per_s=4).max_load
    11.25
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
    found = _solved(problem)
    return Blocks(found.objective, _in_order(found.decision, arcs))


@dataclass(frozen=True, slots=True)
class AlpaStages:
    """What Alpa's outer programme finds: latency of an iteration, and the cuts."""

    latency_s: float
    boundaries: tuple[int, ...]


def alpa_partition(layer_s: Sequence[float], stages: int, micro_batches: int) -> AlpaStages:
    """Stages of a chain, one device each, with the least sum t + (B-1) max t.

    >>> formulas.alpa_partition([1, 2, 1, 1, 1], stages=2, micro_batches=8)
    AlpaStages(latency_s=27.0, boundaries=(0, 2, 5))
    """
    count = same_length(layer_s=layer_s)
    whole(stages=stages, micro_batches=micro_batches)
    if stages > count:
        raise UsageError(f"{count} layers do not make {stages} stages", hint="use fewer stages")
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(layer_s, dtype=float))])
    table = np.where(np.tri(count, dtype=bool).T, sums[None, 1:] - sums[:-1, None], np.inf)
    found = _solved(IterationProblem(table[:, :, None], np.array([1]), stages, micro_batches))
    return AlpaStages(found.objective, _marks(s.last - s.first + 1 for s in found.decision.stages))


def _solved(problem: object) -> Result:
    return solve_partition(problem, time_limit_s=TIME_LIMIT_S)  # type: ignore[arg-type]


def _marks(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))


def _in_order(blocks: Sequence[int], edges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Blocks numbered so that every edge goes to the same one or a later one; empty ones are left out."""
    arcs = [(blocks[a], blocks[b]) for a, b in edges]
    line = [b for b in topological_line(max(blocks) + 1, arcs) if b in set(blocks)]
    return tuple(line.index(b) for b in blocks)

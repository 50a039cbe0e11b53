"""Configurations as people name them: tensor, pipeline and data parallel degrees, chunks a worker, split of layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import JobError, UsageError
from planner.graph import Chain, Graph
from planner.graph.blocks import layer_of
from planner.graph.types import per_graph
from planner.hardware.types import Cluster
from planner.registry import did_you_mean
from planner.schedules import Schedule, get
from planner.space.configuration import Configuration, StageChoice
from planner.space.cuts import balanced, run_sums
from planner.space.types import BlockCosts, Job


@dataclass(frozen=True, slots=True)
class Degrees:
    """A configuration in the words of the field.

    Attributes:
        tensor: ranks that share every operator (TP).
        pipeline: workers of a pipeline (PP).
        data: copies of the pipeline (DP); 0 for as many as the devices hold.
        chunks: stages that each worker holds; more than one needs a schedule that places them.
        micro_batch: samples a worker runs at a time.
        schedule: by name; empty for 1F1B, interleaved where workers hold several chunks.
        zero: ZeRO stage.
        recompute: stages repeat their forward.
        repeats: or the forward of modules of these names (`planner.operators.modules`).
        starts: first block of each stage but the first, its number or name; empty for equal numbers of layers.
        adjacent: copies of a worker are neighbours (the data parallel axis inside the pipeline axis).
        replicas: of each worker within a copy, which take its micro-batches in turn.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 0
    chunks: int = 1
    micro_batch: int = 1
    schedule: str = ""
    zero: int = 0
    recompute: bool = False
    starts: tuple[int | str, ...] = ()
    adjacent: bool = True
    replicas: int = 1
    repeats: tuple[str, ...] = ()


def configuration_of(degrees: Degrees, chain: Chain, costs: BlockCosts, cluster: Cluster, job: Job) -> Configuration:
    """The configuration that has these degrees.

    Args:
        degrees: what was named.
        chain: blocks of the model.
        costs: their costs at the micro-batch size, with operators shared as wanted (`costs.ranks` is the TP degree).
        cluster: the machine.
        job: global batch and devices.

    Raises:
        JobError: devices, samples or layers do not come out, or no block has a name; says which.
        UsageError: no schedule has the name.
    """
    least = min(degrees.pipeline, degrees.replicas, degrees.chunks, degrees.micro_batch, degrees.data + 1)
    if least < 1:
        raise JobError("a degree is below 1", hint="give whole numbers of at least 1; 0 leaves data to the devices")
    devices = min(job.devices or cluster.device_count, cluster.device_count)
    wide = costs.ranks * degrees.pipeline * degrees.replicas
    copies = degrees.data or devices // wide
    if copies < 1 or copies * wide > devices:
        raise JobError(
            f"TP {costs.ranks} x PP {degrees.pipeline} x DP {max(copies, 1) * degrees.replicas} takes "
            f"{max(copies, 1) * wide} devices of {devices}",
            hint="use smaller degrees, or more devices",
        )
    count, rest = divmod(job.global_batch, copies * degrees.micro_batch)
    if rest or not count:
        raise JobError(
            f"DP {copies} with micro-batches of {degrees.micro_batch} does not divide a global batch of "
            f"{job.global_batch}",
            hint="use another data parallel degree or micro-batch, or a global batch that they divide",
        )
    schedule, stages = _scheduled(degrees, count)
    if not degrees.starts:
        edges = layer_edges(chain, costs, stages)
    else:
        names = [block.name for block in chain.blocks]
        edges = (0, *(block_number(start, names) for start in degrees.starts), len(names))
    if len(edges) != stages + 1:
        raise JobError(
            f"{len(edges) - 1} stages are given, {schedule.name} over {degrees.pipeline} workers has {stages}",
            hint=f"give {stages - 1} first blocks",
        )
    return Configuration(
        stages=tuple(
            StageChoice(a, b, degrees.replicas, degrees.recompute, costs.ranks, costs.sharding, repeats=degrees.repeats)
            for a, b in itertools.pairwise(edges)
        ),
        copies=copies,
        micro_batch=degrees.micro_batch,
        micro_batches=count,
        schedule=schedule.name,
        zero=degrees.zero if copies * degrees.replicas > 1 else 0,
        adjacent=degrees.adjacent and copies > 1,
    )


def block_number(block: int | str, names: Sequence[str]) -> int:
    """A block's number, given by that or by its name.

    Raises:
        JobError: the model has no block of the name, or several.
    """
    if isinstance(block, int):
        return block
    if names.count(block) != 1:
        count = f"{names.count(block)} blocks" if block in names else "no block"
        raise JobError(f"the model has {count} of the name {block!r}", hint=did_you_mean(block, names))
    return names.index(block)


def _scheduled(degrees: Degrees, micro_batches: int) -> tuple[Schedule, int]:
    """The schedule, and the stages of a pipeline: as many on each worker as asked for.

    Raises:
        JobError: the schedule places another number of stages on a worker.
    """
    name = degrees.schedule or ("interleaved" if degrees.chunks > 1 else "1f1b")
    own, wanted = get(name), degrees.pipeline * degrees.chunks
    tried = (own, *own.variants(degrees.pipeline, micro_batches, recompute=degrees.recompute))
    for schedule in tried:
        counts = schedule.stage_counts(degrees.pipeline)
        if wanted in counts:
            return schedule, wanted
    if degrees.chunks == 1 and own.stage_counts(degrees.pipeline):
        return own, own.stage_counts(degrees.pipeline)[0]
    placed = sorted({count // degrees.pipeline for s in tried for count in s.stage_counts(degrees.pipeline)})
    had = ", ".join(map(str, placed)) or "no"
    raise JobError(
        f"{name} over {degrees.pipeline} workers with {micro_batches} micro-batches holds {had} chunks a worker, not "
        f"{degrees.chunks}",
        hint="use another schedule, number of chunks, or number of micro-batches",
    )


def layer_edges(chain: Chain, costs: BlockCosts, stages: int) -> tuple[int, ...]:
    """First block of each stage, and the end: equal numbers of layers, else stages of equal work.

    What comes before the first layer goes to the first stage, what comes after the last to the last. Where the layers
    do not come out, the first and the last stage have one layer fewer, or stages are balanced by time.

    Raises:
        JobError: fewer blocks than stages.
    """
    blocks = len(chain.blocks)
    if stages > blocks:
        raise JobError(f"{blocks} blocks do not make {stages} stages", hint="use fewer stages or chunks")
    heads = layer_heads(chain)
    for missing in (0, 2):
        each, rest = divmod(len(heads) + missing, stages)
        if not rest and each > (1 if missing else 0):
            starts = [heads[stage * each - missing // 2] for stage in range(1, stages)]
            return (0, *starts, blocks)
    work_s = run_sums((costs.forward_s + costs.backward_s).mean(axis=0))
    real = np.arange(blocks + 1)[:, None] < np.arange(blocks + 1)[None, :]
    edges = balanced(np.where(real, work_s, np.inf), [real] * stages)
    if edges is None:
        raise UsageError(f"{blocks} blocks cannot be cut into {stages} stages", hint="use fewer stages")
    return edges


def layer_heads(chain: Chain) -> list[int]:
    """First block of each numbered layer, in order; the longest run of them where the model has several kinds."""
    found: dict[str, int] = {}
    layers = _layers(chain.graph)
    for at, block in enumerate(chain.blocks):
        layer = layers[block.nodes[0]]
        if layer and layer[-1].isdigit():
            found.setdefault(layer, at)
    by_kind: dict[str, list[int]] = {}
    for layer, at in found.items():
        by_kind.setdefault(layer.rstrip("0123456789"), []).append(at)
    return max(by_kind.values(), key=len, default=[])


@per_graph
def _layers(graph: Graph) -> tuple[str, ...]:
    """The layer that each node belongs to."""
    return tuple(layer_of(node.module) for node in graph.nodes)

"""Configurations as people name them: tensor, pipeline and data parallel degrees, chunks a worker, split of layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.errors import JobError
from planner.graph import Chain
from planner.hardware.types import Cluster
from planner.registry import did_you_mean
from planner.schedules import Schedule, get
from planner.space.configuration import Configuration
from planner.space.layer_cuts import layer_edges, layout_edges, read_layout, uneven_edges
from planner.space.types import BlockCosts, Job


@dataclass(frozen=True, slots=True)
class Degrees:
    """A configuration in the words of the field.

    Attributes:
        tensor: ranks that share every operator (TP).
        context: ranks that share the sequence (CP).
        expert: ranks to which experts are dealt (EP); they are among those of `data`.
        pipeline: workers of a pipeline (PP).
        data: copies of the pipeline (DP); 0 for as many as the devices hold.
        chunks: stages that each worker holds; more than one needs a schedule that places them.
        micro_batch: samples a worker runs at a time.
        schedule: by name; empty for 1F1B, interleaved where workers hold several chunks.
        zero: ZeRO stage.
        recompute: stages repeat their forward.
        repeats: or the forward of modules of these names (`planner.operators.modules`).
        starts: first block of each stage but the first, its number or name; empty for equal numbers of layers.
        layout: stages as Megatron writes them, `Et*3|(t*4|)*6t*3L`: E embedding, t decoder layer, m further token
            predicted, L loss (`planner.space.layer_cuts`); says the number of chunks, too.
        first_layers, last_layers: layers of the first and of the last worker, all chunks together; 0 for as many as the
            others have.
        adjacent: copies of a worker are neighbours (the data parallel axis inside the pipeline axis).
        replicas: of each worker within a copy, which take its micro-batches in turn.

    The samples of `micro_batch` are those of one of the `expert` ranks.
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
    layout: str = ""
    first_layers: int = 0
    last_layers: int = 0
    adjacent: bool = True
    replicas: int = 1
    context: int = 1
    expert: int = 1
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
    if degrees.data % costs.expert:
        hint = f"use a multiple of {costs.expert}, or another EP"
        raise JobError(f"EP {costs.expert} ranks are among those of DP {degrees.data}, and do not divide it", hint=hint)
    if least < 1:
        raise JobError("a degree is below 1", hint="give whole numbers of at least 1; 0 leaves data to the devices")
    devices = min(job.devices or cluster.device_count, cluster.device_count)
    wide = costs.ranks * degrees.pipeline * degrees.replicas
    copies = degrees.data // costs.expert or devices // wide
    if copies < 1 or copies * wide > devices:
        raise JobError(
            f"TP {costs.ranks} x PP {degrees.pipeline} x DP {max(copies, 1) * degrees.replicas} takes "
            f"{max(copies, 1) * wide} devices of {devices}",
            hint="use smaller degrees, or more devices",
        )
    count, rest = divmod(job.global_batch, copies * costs.micro_batch)
    if rest or not count:
        raise JobError(
            f"DP {copies * costs.expert} with micro-batches of {degrees.micro_batch} does not divide a global batch of "
            f"{job.global_batch}",
            hint="use another data parallel degree or micro-batch, or a global batch that they divide",
        )
    degrees = _with_chunks(degrees)
    schedule, stages = _scheduled(degrees, count)
    edges = _edges(degrees, chain, costs, stages)
    if len(edges) != stages + 1:
        raise JobError(
            f"{len(edges) - 1} stages are given, {schedule.name} over {degrees.pipeline} workers has {stages}",
            hint=f"give {stages - 1} first blocks" if degrees.starts else f"write {stages} stages",
        )
    return Configuration(
        stages=tuple(
            costs.stage(a, b, degrees.replicas, degrees.recompute, degrees.repeats)
            for a, b in itertools.pairwise(edges)
        ),
        copies=copies,
        micro_batch=costs.micro_batch,
        micro_batches=count,
        schedule=schedule.name,
        zero=degrees.zero if copies * degrees.replicas > 1 or costs.inner_replicas else 0,
        adjacent=degrees.adjacent and copies > 1,
    )


def _with_chunks(degrees: Degrees) -> Degrees:
    """The degrees with as many chunks a worker as their layout has.

    Raises:
        JobError: the layout cannot be read, has another number of chunks, or the cut is said twice.
    """
    said = [name for name in ("starts", "layout") if getattr(degrees, name)]
    if degrees.first_layers or degrees.last_layers:
        said.append("first_layers, last_layers")
    if len(said) > 1:
        raise JobError(f"the cut is given by {' and by '.join(said)}", hint="say it in one way")
    if not degrees.layout:
        return degrees
    chunks, rest = divmod(len(read_layout(degrees.layout)), degrees.pipeline)
    if rest or degrees.chunks not in (1, chunks):
        raise JobError(
            f"a layout of {chunks * degrees.pipeline + rest} stages for {degrees.pipeline} workers"
            + (f" of {degrees.chunks} chunks" if degrees.chunks > 1 else ""),
            hint="write as many stages as workers hold chunks, worker by worker in each round",
        )
    return replace(degrees, chunks=chunks)


def _edges(degrees: Degrees, chain: Chain, costs: BlockCosts, stages: int) -> tuple[int, ...]:
    """First block of each stage, and the end, as the degrees say it."""
    if degrees.starts:
        names = [block.name for block in chain.blocks]
        return (0, *(block_number(start, names) for start in degrees.starts), len(names))
    if degrees.layout:
        return layout_edges(chain, degrees.layout)
    if degrees.first_layers or degrees.last_layers:
        return uneven_edges(chain, stages, degrees.pipeline, degrees.first_layers, degrees.last_layers)
    return layer_edges(chain, costs, stages)


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

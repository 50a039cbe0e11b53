"""Configurations by their degrees: TP, PP, DP, CP, EP, chunks a worker, and the split of layers into stages.

A chain is cut into stages of so many layers each: equal ones, or those of a pipeline layout as Megatron writes it. A
layout is a line of items, `|` between stages: `E` the embedding, `t` a decoder layer, `m` a predictor of a further
token, `L` the loss with the logits. `t*4` is `tttt`, and `(tt|)*3` is `tt|tt|tt|`. Stage i is chunk i // p of worker
i % p. (Megatron Core, `core/transformer/pipeline_parallel_layer_layout.py`.)
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from planner import exchange
from planner.errors import JobError, UsageError
from planner.graph import Chain, Graph
from planner.graph.blocks import layer_of
from planner.graph.types import per_model
from planner.hardware.types import Cluster
from planner.registry import did_you_mean
from planner.schedules import get
from planner.space.configuration import Configuration, RecomputeChoice
from planner.space.cuts import balanced, mean_work_s
from planner.space.types import BlockCosts, Job

_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,4})")
_REPEATED = re.compile(r"([EtmL|])\*(\d{1,4})")
_ITEMS = re.compile(r"E?t*m*L?")
_LONGEST = 10_000
"""Items of a layout with everything written out."""
_GRAMMAR = "write it like 'Et*3|(t*4|)*6t*3L': E embedding, t layer, m further token, L loss, | between stages"


@dataclass(frozen=True, slots=True)
class Items:
    """First blocks of the items of a pipeline layout in a chain.

    Attributes:
        layers: first block of each layer, in order.
        predictors: first block of each predictor of a further token. The first predictor begins where the layers end,
            with the logits of the model itself, which come before the predictors in a chain.
        loss: first block of logits and loss: where the layers end, or where the last predictor begins.
    """

    layers: tuple[int, ...]
    predictors: tuple[int, ...]
    loss: int


def layer_edges(chain: Chain, stages: int) -> tuple[int, ...] | None:
    """First block of each stage, and the end, with equal numbers of layers; None where these do not come out.

    What comes before the first layer goes to the first stage, what comes after the last to the last. Else the first
    and the last stage have one layer fewer.

    Raises:
        JobError: fewer blocks than stages.
    """
    blocks = len(chain.blocks)
    if stages > blocks:
        raise JobError(f"{blocks} blocks do not make {stages} stages", hint="use fewer stages or chunks")
    heads = chain.layer_heads
    for absent in (0, 2):
        layers_a_stage, remainder = divmod(len(heads) + absent, stages)
        if not remainder and layers_a_stage > (1 if absent else 0):
            starts = [heads[stage * layers_a_stage - absent // 2] for stage in range(1, stages)]
            return (0, *starts, blocks)
    return None


def _edges_by_time(costs: BlockCosts, stages: int) -> tuple[int, ...]:
    """First block of each stage, and the end, of stages that take about equally long."""
    bounds = len(costs.parameter_elements) + 1
    real = np.arange(bounds)[:, None] < np.arange(bounds)[None, :]
    edges = balanced(np.where(real, mean_work_s(costs), np.inf), [real] * stages)
    if edges is None:
        raise UsageError(f"{bounds - 1} blocks cannot be cut into {stages} stages", hint="use fewer stages")
    return edges


def uneven_edges(chain: Chain, stages: int, workers: int, first: int, last: int) -> tuple[int, ...]:
    """First block of each stage, and the end, where the first and the last worker have other numbers of layers.

    Args:
        chain: the model.
        stages: of the pipeline; stage i is on worker i % workers.
        workers: of the pipeline.
        first, last: layers of the first and of the last worker over all their chunks; 0 for as many as the others.

    Raises:
        JobError: a worker's layers do not come out over its chunks, or the rest not over the other workers.
    """
    chunks, total = stages // workers, len(chain_items(chain).layers)
    fixed = {worker: count for worker, count in ((0, first), (workers - 1, last)) if count}
    others, remainder = divmod(total - sum(fixed.values()), max(1, workers - len(fixed)))
    layers_by_worker = [fixed.get(worker, others) for worker in range(workers)]
    if (
        remainder
        or sum(layers_by_worker) != total
        or min(layers_by_worker) < chunks
        or any(count % chunks for count in layers_by_worker)
    ):
        raise JobError(
            f"{total} layers with {first or 'as many as others'} on the first and {last or 'as many as others'} on the "
            f"last of {workers} workers do not come out in {chunks} chunks each",
            hint="give numbers that leave equal layers to the other workers, each a multiple of the chunks",
        )
    counts = [layers_by_worker[stage % workers] // chunks for stage in range(stages)]
    return layout_edges(chain, "E" + "|".join("t" * count for count in counts) + "L", all_items=False)


def read_layout(text: str) -> tuple[str, ...]:
    """The items of each stage, `("Ett", "tt", "ttL")`.

    Raises:
        JobError: the text is no layout.
    """
    expanded = text.replace(",", "").replace(" ", "")
    while len(expanded) <= _LONGEST and (match := _GROUP.search(expanded) or _REPEATED.search(expanded)):
        expanded = expanded[: match.start()] + match[1] * int(match[2]) + expanded[match.end() :]
    stages = tuple(expanded.split("|"))
    if len(expanded) > _LONGEST or not _ITEMS.fullmatch("".join(stages)) or not all(stages):
        what = "a stage is empty" if not all(stages) and len(stages) > 1 else "it cannot be read"
        raise JobError(f"pipeline layout {text[:80]!r}: {what}", hint=_GRAMMAR)
    return stages


def layout_edges(chain: Chain, text: str, *, all_items: bool = True) -> tuple[int, ...]:
    """First block of each stage of a layout, and the end.

    Args:
        chain: the model.
        text: the layout.
        all_items: predictors of further tokens are written, too; else they go with the loss.

    Raises:
        JobError: the text is no layout, or the model's items do not fill it; says which.
    """
    stages, items = read_layout(text), chain_items(chain)
    written = "".join(stages)
    held = {"E": 1, "t": len(items.layers), "m": len(items.predictors) if all_items else 0, "L": 1}
    names = {"E": "embeddings", "t": "layers", "m": "predictors of further tokens", "L": "losses"}
    for item, count in held.items():
        if written.count(item) != count:
            raise JobError(
                f"the layout has {written.count(item)} {names[item]} ({item}), the model {count}",
                hint=f"write {item} {count} times",
            )
    firsts = iter((0, *items.layers, *(items.predictors if all_items else ()), items.loss))
    starts = [[next(firsts) for _ in stage] for stage in stages]
    edges = (*(first[0] for first in starts), len(chain.blocks))
    for stage, (own, first, next_start) in enumerate(zip(stages, starts, edges[1:], strict=True)):
        if first[-1] >= next_start:
            raise JobError(
                f"stage {stage} of the layout ends with {own[-1]}, which no block divides from what follows",
                hint=f"write {own[-1]} on the next stage",
            )
    return edges


def chain_items(chain: Chain) -> Items:
    """What a layout's items are in a chain.

    Layers are the longest run of numbered modules, else (a graph without names) the longest run of equal blocks;
    numbered modules behind them are predictors of further tokens.
    """
    heads, layers = list(chain.layer_heads), _layers(chain.graph)
    if not heads:
        heads, size = _equal_blocks([block.signature for block in chain.blocks])
        return Items(tuple(heads), (), heads[-1] + size if heads else 1)
    last_layer = layers[chain.blocks[heads[-1]].nodes[0]]
    end = heads[-1] + 1
    while end < len(chain.blocks) and layer_of(chain.blocks[end].name.partition("[")[0]) == last_layer:
        end += 1
    layers_after = [layers[block.nodes[0]] for block in chain.blocks[end:]]
    stems = [name.rstrip("0123456789") if name and name[-1].isdigit() else "" for name in layers_after]
    names = [name for name, kind in zip(layers_after, stems, strict=True) if kind]
    starts = [end + layers_after.index(name) for name in dict.fromkeys(names)]
    predictors = (end, *starts[1:]) if starts else ()
    return Items(tuple(heads), predictors, predictors[-1] if predictors else end)


def _equal_blocks(signatures: Sequence[str]) -> tuple[list[int], int]:
    """First blocks of the layers, and the blocks of each, where the same few blocks follow each other most often."""
    n, best = len(signatures), (0, 0, 0)
    for size in range(1, n // 2 + 1):
        run = 0
        for at in range(n - size):
            run = run + 1 if signatures[at] == signatures[at + size] else 0
            layers = run // size + 1 if run >= size else 0
            if layers * size > best[0] * best[1]:
                best = layers, size, at + 1 - run
    layers, size, start = best
    return [start + layer * size for layer in range(layers)], size


@per_model
def _layers(graph: Graph) -> tuple[str, ...]:
    """The layer that each node belongs to."""
    return tuple(layer_of(node.module) for node in graph.nodes)


@dataclass(frozen=True, slots=True)
class Degrees:
    """A configuration by its parallel degrees.

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
        recompute: stages recompute all their layers, or the first `recompute_layers` of them.
        recompute_layers: layers of each stage that are recomputed (`planner.space.layers`); 0 for all.
        repeats: names of modules that they recompute otherwise (`planner.operators.modules`).
        starts: first block of each stage but the first, its number or name; empty for equal numbers of layers.
        layout: stages as Megatron writes them, `Et*3|(t*4|)*6t*3L`: E embedding, t decoder layer, m further token
            predicted, L loss (`planner.space.named`); says the number of chunks, too.
        first_layers, last_layers: layers of the first and of the last worker, all chunks together; 0 for as many as the
            others have.
        adjacent: copies of a worker are neighbours (the data parallel axis inside the pipeline axis).
        replicas: of each worker within a copy, which take its micro-batches in turn.
        exchange: scheme by which gradients travel (`planner.exchange`), with its options; empty for the recipe of the
            ZeRO stage.
        offload: names of modules whose kept activations lie in the host's memory; `layer_input` with `recompute`.
        shard_over: neighbouring data-parallel ranks over which ZeRO shards, so that each group of them holds all of it;
            0 for all ranks. Ranks of `expert` and `context` are in groups of their own.

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
    exchange: str = ""
    offload: tuple[str, ...] = ()
    shard_over: int = 0
    recompute_layers: int = 0

    def __post_init__(self) -> None:
        """Refuse words where numbers are meant.

        Raises:
            JobError: a field of another kind, by name.
        """
        for own in fields(self):
            given, usual = getattr(self, own.name), own.default
            if not isinstance(given, type(usual)) or (isinstance(given, bool) and not isinstance(usual, bool)):
                raise JobError(f"{own.name} is {given!r}", where="Degrees", hint=_KINDS[type(usual)])


_KINDS = {bool: "give True or False", int: "give a whole number", str: "give a text", tuple: "give a tuple"}


def configurations_of(
    degrees: Degrees, chain: Chain, shardings: Sequence[BlockCosts], cluster: Cluster, job: Job
) -> Iterator[tuple[Configuration, list[BlockCosts]]]:
    """The configuration that has these degrees, with the shardings that it serves; its stages name the first of them.

    Mostly one serves all. Where stages are balanced by time, shardings may be cut differently; where one replica alone
    holds all weights, there is nothing for a ZeRO stage to split.

    Args:
        degrees: what was named.
        chain: blocks of the model.
        shardings: the ways to share operators: costs at one micro-batch size, for the same TP, CP and EP.
        cluster: the machine.
        job: global batch and devices.

    Raises:
        JobError: devices, samples or layers do not come out, or no block has a name; says which.
        UsageError: no schedule or exchange scheme has the name.
    """
    if degrees.exchange:
        exchange.get(degrees.exchange)
    costs = shardings[0]
    copies, count = _copies(degrees, costs, cluster, job)
    degrees = _with_chunks(degrees)
    name = degrees.schedule or ("interleaved" if degrees.chunks > 1 else "1f1b")
    schedule, stages = _scheduled(name, degrees.pipeline, degrees.chunks, count, recompute=degrees.recompute)
    cut = _edges(degrees, chain, stages)
    keeping = RecomputeChoice(degrees.recompute, degrees.repeats, degrees.recompute_layers, degrees.offload)
    alike: dict[tuple[tuple[int, ...], int], list[BlockCosts]] = {}
    for costs in shardings:
        edges = cut or _edges_by_time(costs, stages)
        zero = degrees.zero if copies * degrees.replicas > 1 or costs.inner_replicas else 0
        alike.setdefault((edges, zero), []).append(costs)
    for (edges, zero), members in alike.items():
        if len(edges) != stages + 1:
            raise JobError(
                f"{len(edges) - 1} stages are given, {schedule} over {degrees.pipeline} workers has {stages}",
                hint=_other_cut(degrees, stages),
            )
        configuration = Configuration(
            stages=tuple(members[0].stage(a, b, degrees.replicas, keeping) for a, b in itertools.pairwise(edges)),
            copies=copies,
            micro_batch=costs.micro_batch,
            micro_batches=count,
            schedule=schedule,
            zero=zero,
            adjacent=degrees.adjacent and copies > 1,
            exchange=degrees.exchange,
            shard_over=_shard_over(degrees, copies * degrees.replicas, zero),
        )
        yield configuration, members


def _shard_over(degrees: Degrees, replicas: int, zero: int) -> int:
    """Replicas over which state is sharded; 0 for all.

    Raises:
        JobError: they do not divide the replicas, or nothing is sharded.
    """
    over = degrees.shard_over
    if not over or over == replicas:
        return 0
    if over < 2 or replicas % over or not zero:
        what = f"{replicas} replicas" if zero else "ZeRO-0, which shards nothing"
        hint = "use a ZeRO stage, and a number of 2 and more that divides the replicas"
        raise JobError(f"state is to be sharded over {over} of {what}", hint=hint)
    return over


def _other_cut(degrees: Degrees, stages: int) -> str:
    """What to do where a cut has another number of stages than the schedule."""
    if not degrees.starts:
        return f"write {stages} stages"
    return f"give {stages - 1} first blocks" if stages > 1 else "leave --starts out"


def _copies(degrees: Degrees, costs: BlockCosts, cluster: Cluster, job: Job) -> tuple[int, int]:
    """Copies of the pipeline, and micro-batches of each.

    Raises:
        JobError: devices or samples do not come out.
    """
    smallest = min(degrees.pipeline, degrees.replicas, degrees.chunks, degrees.micro_batch, degrees.data + 1)
    if degrees.data % costs.expert:
        hint = f"use a multiple of {costs.expert}, or another EP"
        raise JobError(f"EP {costs.expert} ranks are among those of DP {degrees.data}, and do not divide it", hint=hint)
    if smallest < 1:
        raise JobError("a degree is below 1", hint="give whole numbers of at least 1; 0 leaves data to the devices")
    devices = job.devices_of(cluster)
    copy_devices = costs.ranks * degrees.pipeline * degrees.replicas
    copies = degrees.data // costs.expert or devices // copy_devices
    if copies < 1 or copies * copy_devices > devices:
        raise JobError(
            f"TP {costs.ranks} x PP {degrees.pipeline} x DP {max(copies, 1) * degrees.replicas} takes "
            f"{max(copies, 1) * copy_devices} devices of {devices}",
            hint="use smaller degrees, or more devices",
        )
    count, remainder = divmod(job.global_batch, copies * costs.micro_batch)
    if remainder or not count:
        raise JobError(
            f"DP {copies * costs.expert} with micro-batches of {degrees.micro_batch} does not divide a global batch of "
            f"{job.global_batch}",
            hint="use another data parallel degree or micro-batch, or a global batch that they divide",
        )
    return copies, count


def _with_chunks(degrees: Degrees) -> Degrees:
    """The degrees with the number of chunks a worker that their layout has.

    Raises:
        JobError: the layout cannot be read, has another number of chunks, or the cut is said twice.
    """
    cuts = [name for name in ("starts", "layout") if getattr(degrees, name)]
    if degrees.first_layers or degrees.last_layers:
        cuts.append("first_layers, last_layers")
    if len(cuts) > 1:
        raise JobError(f"the cut is given by {' and by '.join(cuts)}", hint="say it in one way")
    if not degrees.layout:
        return degrees
    chunks, remainder = divmod(len(read_layout(degrees.layout)), degrees.pipeline)
    if remainder or degrees.chunks not in (1, chunks):
        raise JobError(
            f"a layout of {chunks * degrees.pipeline + remainder} stages for {degrees.pipeline} workers"
            + (f" of {degrees.chunks} chunks" if degrees.chunks > 1 else ""),
            hint="write as many stages as workers hold chunks, worker by worker in each round",
        )
    return replace(degrees, chunks=chunks)


def _edges(degrees: Degrees, chain: Chain, stages: int) -> tuple[int, ...] | None:
    """First block of each stage, and the end, as the degrees say it; None where stages are balanced by time."""
    if degrees.starts:
        names = [block.name for block in chain.blocks]
        return (0, *(block_number(start, names) for start in degrees.starts), len(names))
    if degrees.layout:
        return layout_edges(chain, degrees.layout)
    if degrees.first_layers or degrees.last_layers:
        return uneven_edges(chain, stages, degrees.pipeline, degrees.first_layers, degrees.last_layers)
    return layer_edges(chain, stages)


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


@functools.lru_cache(maxsize=1024)
def _scheduled(name: str, workers: int, chunks: int, micro_batches: int, *, recompute: bool) -> tuple[str, int]:
    """The schedule with its options, and the stages of a pipeline: as many on each worker as asked for.

    Raises:
        JobError: the schedule places another number of stages on a worker.
    """
    schedule = get(name)
    tried = (schedule, *schedule.variants(workers, micro_batches, recompute=recompute))
    named = schedule.holding(chunks) if schedule.name == schedule.key else None
    for variant in (*tried, *([named] if named else [])):
        if workers * chunks in variant.stage_counts(workers):
            return variant.name, workers * chunks
    if chunks == 1 and schedule.stage_counts(workers):
        return schedule.name, schedule.stage_counts(workers)[0]
    placed = sorted({count // workers for variant in tried for count in variant.stage_counts(workers)})
    raise JobError(
        f"{name} over {workers} workers with {micro_batches} micro-batches holds "
        f"{', '.join(map(str, placed)) or 'no'} chunks a worker, not {chunks}",
        hint="use another schedule, number of chunks, or number of micro-batches",
    )

"""Facts that several exporters need of a plan: degrees of parallelism, order of ranks, modules and layers by stage.

Parallel styles are names for how the weights of a module are sharded over the ranks of a tensor-parallel group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.escaping import prose_name
from planner.graph.blocks import layer_of
from planner.plans import Block, Plan, ShardedBlock, Sharding
from planner.plans.readings import base_name, block_items, dealt_axes, layer_name, layers
from planner.schedules import ActionKind
from planner.sharding import AxisRole
from planner.sharding.layout import parse_layout

GRID = ("tensor", "context", "data", "pipeline")
"""Order of parallel dimensions by rank in Megatron, torchtitan and DeepSpeed, fastest first."""

PIPELINE_INSIDE = ("tensor", "context", "pipeline", "data")
"""The order in which all stages of a replica are on neighbouring ranks."""

_CELLS = {
    ActionKind.FORWARD: "F",
    ActionKind.BACKWARD: "B",
    ActionKind.INPUT_GRAD: "I",
    ActionKind.WEIGHT_GRAD: "W",
}


@dataclass(frozen=True, slots=True)
class PlanDegrees:
    """Degrees of parallelism of a plan, as training frameworks count them.

    Attributes:
        tensor: ranks that share operators (TP).
        context: ranks that share the sequence (CP).
        expert: ranks that hold different experts (EP); they are data or tensor parallel ranks, too.
        pipeline: workers in a row (PP).
        chunks: stages of each worker.
        data: ranks that have different samples (DP).
        micro_batch: samples of a micro-batch of one data parallel rank.
        accumulated: micro-batches of a data parallel rank in an iteration.
        expert_tensor: ranks that share an expert's products (ETP).
    """

    tensor: int
    context: int
    expert: int
    pipeline: int
    chunks: int
    data: int
    micro_batch: int
    accumulated: int
    expert_tensor: int

    @property
    def ranks(self) -> int:
        """Number of ranks that are not idle."""
        return self.tensor * self.context * self.data * self.pipeline


def degrees(plan: Plan) -> PlanDegrees:
    """Degrees of a plan whose stages are all divided alike."""
    choice, sharding, replicas = plan.configuration.stages[0], plan.sharding_of(0), len(plan.stages[0].replicas)
    axes, dealt = (sharding.axes, dealt_axes(sharding)) if sharding else ((), frozenset[str]())
    workers = len(dict.fromkeys(stage.replicas for stage in plan.stages))
    return PlanDegrees(
        tensor=choice.ranks // (choice.context * choice.expert),
        context=choice.context,
        expert=math.prod(axis.size for axis in axes if axis.name in dealt),
        pipeline=workers,
        chunks=len(plan.stages) // workers,
        data=replicas * choice.expert,
        micro_batch=plan.micro_batches.size // choice.expert,
        accumulated=plan.micro_batches.count // replicas,
        expert_tensor=math.prod(axis.size for axis in axes if axis.role is AxisRole.TENSOR and axis.name not in dealt),
    )


def rank_order(plan: Plan, grid: Sequence[str] = GRID) -> tuple[int, ...]:
    """For each rank of a framework, in order, the plan's rank.

    Args:
        plan: a plan whose stages are all divided alike.
        grid: the framework's order of parallel dimensions, fastest first.
    """
    counts, order = degrees(plan), []
    sizes = {"tensor": counts.tensor, "context": counts.context, "data": counts.data, "pipeline": counts.pipeline}
    workers = list(dict.fromkeys(stage.replicas for stage in plan.stages))
    for place in itertools.product(*(range(sizes[name]) for name in reversed(grid))):
        at = dict(zip(reversed(grid), place, strict=True))
        replica, expert = divmod(at["data"], counts.data // len(plan.stages[0].replicas))
        roles = {AxisRole.TENSOR: at["tensor"], AxisRole.CONTEXT: at["context"], AxisRole.EXPERT: expert}
        order.append(workers[at["pipeline"]][replica][_position(plan.sharding_of(0), roles)])
    return tuple(order)


def _position(sharding: Sharding | None, roles: Mapping[AxisRole, int]) -> int:
    """Place in its group of the rank at these positions along the axes of each role."""
    left, position, stride = dict(roles), 0, 1
    for axis in reversed(sharding.axes if sharding else ()):
        role = axis.role
        left[role], along = divmod(left[role], axis.size)
        position += along * stride
        stride *= axis.size
    return position


def is_loop(plan: Plan) -> bool:
    """Whether stage i is on worker i % workers, as interleaved schedules place them."""
    workers = len(dict.fromkeys(stage.replicas for stage in plan.stages))
    return all(stage.replicas == plan.stages[stage.index % workers].replicas for stage in plan.stages)


def is_tied(plan: Plan) -> bool:
    """Whether the logits use the embedding's weights."""
    items, table = block_items(plan), plan.block_table
    weights = {
        item: {p.tied_to or p.name for at, block in enumerate(table) if items[at] == item for p in block.parameters}
        for item in "EL"
    }
    return bool(weights["E"] & weights["L"])


def matrices(plan: Plan, item: str) -> tuple[str, ...]:
    """Modules with weights of several dimensions before (`E`) or behind (`L`) the layers, in order."""
    blocks = (block for block, own in zip(plan.block_table, block_items(plan), strict=True) if own == item)
    return tuple(dict.fromkeys(p.module for block in blocks for p in block.parameters if len(p.shape) > 1))


def stage_modules(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """For each stage the paths of its modules, all of those that hold its weights.

    A layer is one module, and stands at the first stage that has it; none of a stage lies inside another one of it.
    """
    owners = {p.module for block in plan.block_table for p in block.parameters if p.module}
    taken: set[str] = set()
    stages = []
    for stage in plan.stages:
        names = dict.fromkeys(n for b in plan.stage_blocks(stage.index) for n in _modules(b, owners))
        stages.append(tuple(n for n in names if n not in taken and not any(_inside(n, other) for other in names)))
        taken.update(names)
    return tuple(stages)


def _modules(block: Block, owners: set[str]) -> Iterator[str]:
    """Modules of a block: its layer, and outside of it those that hold its parameters; without any the block's own."""
    name = base_name(block)
    if _is_numbered(layer_name(block)):
        yield layer_name(block)
    for parameter in block.parameters:
        layer = layer_of(parameter.module)
        if parameter.module:
            yield layer if _is_numbered(layer) else parameter.module
    if name and not _is_numbered(layer_name(block)) and not any(o == name or _inside(o, name) for o in owners):
        yield name


def _is_numbered(module: str) -> bool:
    return module.rpartition(".")[2].isdigit()


def _inside(module: str, other: str) -> bool:
    """Whether a module lies inside another one."""
    return module.startswith(f"{other}.")


def own_weights(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """For each stage the weights that the model itself holds, outside of its modules."""
    return tuple(
        tuple(p.name for p in plan.stage_parameters(s.index) if p.trainable and not p.module and p.name.isidentifier())
        for s in plan.stages
    )


def scattered_weights(plan: Plan) -> tuple[str, ...]:
    """Weights that are not in the modules and weights of exactly their own stage (`stage_modules`, `own_weights`).

    Their module is unknown, or it is in several stages, by itself or with a module around it. Weights that stages share
    (`Plan.shared_parameters`) are none of them.
    """
    modules, weights = stage_modules(plan), own_weights(plan)
    shared = {entry.parameter for entry in plan.shared_parameters}
    scattered = dict[str, None]()
    for stage in plan.stages:
        for parameter in plan.stage_parameters(stage.index):
            path = f"{parameter.module}."
            holders = [at for at, names in enumerate(modules) if any(_inside(path, name) for name in names)]
            holders += [at for at, names in enumerate(weights) if parameter.name in names]
            known = parameter.owner in shared or not (parameter.trainable or parameter.module)
            if holders != [stage.index] and not known:
                scattered[parameter.name] = None
    return tuple(scattered)


def machines(plan: Plan) -> tuple[int, int]:
    """Number of machines, and of ranks on each; one machine where ranks do not fill machines evenly."""
    per = plan.hardware.levels[0].size if plan.hardware.levels else 1
    ranks = degrees(plan).ranks
    return (ranks // per, per) if ranks > per and ranks % per == 0 else (1, ranks)


def sequence_length(plan: Plan) -> int:
    """Steps of the model's first input of two dimensions; 0 for a model without one."""
    return next((spec.shape[1] for spec in plan.model.inputs if len(spec.shape) == 2), 0)


def recomputes(plan: Plan) -> bool:
    """Whether stages recompute whole layers."""
    return any(stage.recompute for stage in plan.stages)


def recomputed_layers(plan: Plan) -> tuple[str, ...]:
    """The numbered modules that are recomputed, in order."""
    kept = {block for stage in plan.stages for block in stage.kept_blocks}
    blocks = [b for stage in plan.stages if stage.recompute for b in range(*stage.blocks) if b not in kept]
    names = {layer_name(plan.block_table[b]) for b in blocks}
    return tuple(name for name in layers(plan) if name in names)


def cuts_sequence(plan: Plan) -> bool:
    """Whether tensors between layers are sharded along the sequence over tensor-parallel ranks."""
    sharding = plan.sharding_of(0)
    return sharding is not None and any(
        boundary == "sequence" and axis.role is AxisRole.TENSOR
        for axis, boundary in zip(sharding.axes, sharding.boundaries, strict=True)
    )


def some_of(names: Sequence[str]) -> str:
    """The first two names, and dots where there are more."""
    return ", ".join(dict.fromkeys(names[:2])) + (" .." if len(names) > 2 else "")


def some_in_prose(names: Sequence[str]) -> str:
    """The first two names, in a sentence of Markdown, and dots where there are more."""
    return some_of([*map(prose_name, names)])


def precision_base(plan: Plan) -> str:
    """The precision without its options."""
    return plan.options.precision.partition(":")[0]


def schedule_csv(plan: Plan) -> str:
    """The order of each pipeline rank as `torch.distributed.pipelining` reads it (`compute_only`).

    One row a rank; a cell is stage, `F`, `B`, `I` or `W`, and micro-batch, numbered from 0 within a replica.
    """
    count = len(plan.stages[0].replicas)
    rows = []
    for replicas in dict.fromkeys(stage.replicas for stage in plan.stages):
        cells: list[str] = []
        for action in plan.actions(replicas[0][0]):
            if action.kind not in _CELLS:
                continue
            cell = f"{action.stage}{_CELLS[action.kind]}{action.micro_batch // count}"
            if action.paired:
                cell = f"({cells.pop()};{cell})OVERLAP_F_B"
            cells.append(cell)
        rows.append(",".join(cells))
    return "\n".join(rows) + "\n"


def launch(plan: Plan, program: str, arguments: Sequence[str] = (), before: Sequence[str] = ()) -> str:
    """A shell script that starts one process a rank with torchrun.

    Args:
        plan: the plan.
        program: program that each process runs.
        arguments: lines of its arguments.
        before: lines of the script before the start.
    """
    nodes, per = machines(plan)
    start = [
        "torchrun",
        f"--nnodes {nodes} --nproc-per-node {per}",
        *(['--node-rank "${NODE_RANK:?}" --master-addr "${MASTER_ADDR:?}"'] if nodes > 1 else []),
        program,
        *arguments,
        '"$@"',
    ]
    return "\n".join(["#!/usr/bin/env bash", "set -euo pipefail", *before, " \\\n  ".join(start), ""])


def module_styles(plan: Plan) -> Iterator[tuple[str, str]]:
    """Pairs of module and parallel style, for modules whose weights or gradients are not simply replicated.

    `colwise` and `rowwise` linear layers, `logits` (by columns, the result gathered), `embedding rows` and `embedding
    columns`, `experts` of a mixture, `sequence` (a norm between layers whose input is cut by the sequence), `summed`
    (a whole weight whose gradient is summed over the group: a norm of the heads of a rank); "" where none of these fits
    how weights are cut.
    """
    for stage in plan.stages:
        sharding = plan.sharding_of(stage.index)
        if sharding is None:
            continue
        for at, entry, own_names in plan.sharded_blocks(stage.index):
            logits = at == len(plan.block_table) - 1
            yield from _styles_of(plan.block_table[at], sharding, entry, own_names, logits=logits)


def split_otherwise(plan: Plan) -> tuple[str, ...]:
    """Modules whose weights a plan cuts otherwise than tensor-parallel layers of frameworks do, and how, as Markdown.

    There the words of an embedding are cut, and of the linear layers of a module the last by rows, the others by
    columns.
    """
    modules: dict[str, list[tuple[str, str]]] = {}
    for module, style in module_styles(plan):
        modules.setdefault(module.rpartition(".")[0], []).append((module, style))
    found = []
    for own in modules.values():
        linear = [module for module, style in own if style in ("colwise", "rowwise")]
        rows = {module for module, style in own if style == "rowwise"}
        found += [f"{prose_name(module)} by rows" for module in linear[:-1] if module in rows]
        found += [f"{prose_name(module)} by columns" for module, style in own if style == "embedding columns"]
    return tuple(found)


def other_times(plan: Plan, title: str) -> tuple[str, ...]:
    """A sentence about what a framework's layers split otherwise than the plan; none where they do as it says."""
    if not (unusual := split_otherwise(plan)):
        return ()
    return (f"Weights cut as {some_of(unusual)}: layers of {title} cut them otherwise, and take other times.",)


def _styles_of(
    block: Block, sharding: Sharding, entry: ShardedBlock, own_names: Mapping[str, str], *, logits: bool
) -> Iterator[tuple[str, str]]:
    """Pairs of module and parallel style in one block."""
    tables = {own_names[h.weight]: h.what for h in entry.holdings}
    owners, style_of = {p.name: p for p in block.parameters}, dict[str, str]()
    sequence = "sequence" in sharding.boundaries
    for place in entry.tensors:
        names = [own_names[name] for name in (place.parameters or (place.tensor,))]
        if not place.optimizer or len(names) != 1 or names[0] not in owners:
            continue
        parameter = owners[names[0]]
        cuts = {part.dim for part in parse_layout(place.value, len(sharding.axes)) if part.cuts}
        if len(parameter.shape) > 1 and (cuts or sequence):
            linear = place.dims == (1, 0)
            style_of[parameter.module] = _style(
                cuts, tables.get(own_names[place.tensor], ""), linear=linear, logits=logits
            )
        elif len(parameter.shape) == 1 and (cuts or sequence or "P" in place.gradient):
            style_of.setdefault(parameter.module, "" if cuts else "sequence" if sequence else "summed")
    inside = {module.rpartition(".")[0] for module, kind in style_of.items() if kind in ("colwise", "rowwise")}
    for module, kind in style_of.items():
        yield module, "" if kind == "sequence" and module.rpartition(".")[0] in inside else kind


def _style(cuts: set[int], table: str, *, linear: bool, logits: bool) -> str:
    """The style of a matrix: a product reads the transpose of an `nn.Linear`'s weight, whose columns are rows of it."""
    if table:
        return table if table == "experts" else f"embedding {table}"
    if not linear or len(cuts) != 1:
        return ""
    return ("logits" if logits else "colwise") if cuts == {1} else "rowwise"

"""What a plan needs of the framework that runs it, and which of that a framework lacks, in words.

Everything is read off the plan: what it `requires`, and how its stages and the ranks of its groups differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from planner.graph import Graph
from planner.operators import OpCall, graph_specs
from planner.plans import Plan
from planner.plans.readings import block_items, item_starts
from planner.plans.shardings import OperatorSplit, ShardedBlock, Sharding
from planner.plans.types import OF_MINOR_1, Requirement
from planner.sharding import AxisRole
from planner.sharding.layout import parse_layout
from planner.sharding.limits import SMALL, STEP_SPLITS, attention_heads, begins_layer, cut_as_layers, deals_heads
from planner.space.layers import layer_starts
from planner.systems.backends import PIPELINE, Backend

ZERO = frozenset({Requirement.ZERO1, Requirement.ZERO2, Requirement.ZERO3})
WORDS: Mapping[Requirement, str] = {
    Requirement.PIPELINE: "a pipeline of stages",
    Requirement.SEPARATE_COPIES: "weights of several stages that are no longer tied",
    Requirement.ASYNC_WEIGHTS: "weights that are updated while the pipeline runs",
    Requirement.MULTI_STAGE_RANK: "several stages on a rank",
    Requirement.SPLIT_BACKWARD: "a backward pass in two parts",
    Requirement.TENSOR_PARALLEL: "operators shared by several ranks",
}
"""Requirements in words, where the value of the name does not say enough."""

MOST_NAMED = 2
"""Names that a message gives of many."""


def lacks(plan: Plan, backend: Backend, graph: Graph | None = None) -> tuple[str, ...]:
    """What a plan needs and a framework lacks, a reason each; empty where the framework takes the plan as it is.

    Args:
        plan: the plan.
        backend: the framework.
        graph: its model; without it, whether the ranks of a group divide the attention heads, and whether products and
            tables are cut as layers cut them, is not looked at.
    """
    found = [*_at_large(plan, backend), *_of_model(plan, backend), *_of_stages(plan, backend)]
    if backend.groups and backend.structure.axes:
        found += _in_groups(plan, backend, graph)
        found += (words for sharding in plan.shardings for words in _width(sharding, backend, graph))
    return tuple(dict.fromkeys(found))


def running(plan: Plan, backends: Sequence[Backend], graph: Graph | None = None) -> tuple[str, ...]:
    """Names of the frameworks, of some, that take a plan as it is."""
    return tuple(backend.key for backend in backends if not lacks(plan, backend, graph))


def _at_large(plan: Plan, backend: Backend) -> Iterator[str]:
    """The order of work, exchanges, ZeRO, and what the plan says that it requires."""
    own = {
        Requirement.UNEQUAL_REPLICATION: not backend.structure.equal_replicas,
        Requirement.MID_MODULE_CUT: not backend.structure.whole_layers,
    }
    free_groups = backend.groups and not backend.structure.axes
    for requirement in plan.requires:
        can = requirement in backend.can or requirement in ZERO or (free_groups and requirement in _INSIDE)
        can |= requirement is Requirement.RING_ATTENTION and AxisRole.CONTEXT in backend.structure.axes
        if requirement in OF_MINOR_1:  # by the schedule's name, stage by stage and group by group, below
            continue
        told = requirement in PIPELINE and requirement is not Requirement.PIPELINE and not backend.pipelines
        if requirement not in own and not can and not told:
            yield WORDS.get(requirement, requirement.replace("_", " "))
    several = len(plan.stages) > 1
    if several and backend.pipelines and plan.schedule.name.partition(":")[0] not in backend.schedules:
        yield f"the schedule {plan.schedule.name}"
    if plan.exchange is not None:
        yield f"gradients exchanged by {plan.exchange.scheme}"
    choices = zip(plan.stages, plan.configuration.stages, strict=True)  # whose ranks with other samples hold the same
    replicated = plan.copies * max(len(stage.replicas) * own.context * own.expert for stage, own in choices) > 1
    zero = plan.configuration.zero
    formats, optimizer = plan.options.precision, plan.options.optimizer
    if replicated and zero not in backend.zero_for(formats, optimizer, piped=several):
        beside = f" in {formats}" if zero in backend.zero_for("", optimizer, piped=several) else ""
        beside = f" of {optimizer}" if zero in backend.zero_for(formats, "adam", piped=several) else beside
        yield f"ZeRO-{zero}{beside or (' in a pipeline' if several and backend.structure.zero_in_pipelines else '')}"


def _of_model(plan: Plan, backend: Backend) -> Iterator[str]:
    """Number formats, the optimizer, and what the layers are."""
    options = plan.options
    if not backend.trains_in(options.precision):
        yield f"the precision {options.precision}"
    format_options = options.precision.partition(":")[2].split(",")
    given = {name for name, _, value in (option.partition("=") for option in format_options) if value != "0"}
    if wider := given & set(backend.unable.get(options.precision.partition(":")[0], ())):
        yield f"{options.precision}: the {' and the '.join(sorted(wider))} layers in a wider format"
    if not backend.has_optimizer(options.optimizer):
        yield f"the optimizer {options.optimizer}"
    if not backend.decoders:
        return
    if why := backend.unlike_decoders(plan.block_names, [(spec.shape, spec.dtype) for spec in plan.model.inputs]):
        yield f"a model that is no decoder between an embedding and a loss ({why})"
        return
    items, starts = block_items(plan), item_starts(plan)
    for stage in plan.stages:
        first = stage.blocks[0]
        if first not in starts and items[first] != "t":
            name = plan.block_table[first].name
            yield f"a stage that begins with {name} (stage {stage.index}), inside the embedding or the output"


def _of_stages(plan: Plan, backend: Backend) -> Iterator[str]:
    """How stages differ from each other, and where they begin."""
    structure, stages = backend.structure, plan.stages
    counts = [len(stage.replicas) for stage in stages]
    if structure.equal_replicas and len(set(counts)) > 1:
        yield f"unequal replicas ({min(counts)} to {max(counts)})"
    if structure.alike and len({stage.group_ranks for stage in stages}) > 1:
        yield "groups of unequally many ranks"
    elif structure.alike and len({stage.sharding for stage in stages}) > 1:
        yield f"operators shared unlike in different stages ({len({stage.sharding for stage in stages})} ways)"
    choices = plan.configuration.stages
    some_layers = sorted({choice.layers for choice in choices} - {0})
    if some_layers and not structure.some_layers:
        yield f"recomputation of some layers ({', '.join(map(str, some_layers))} of a stage)"
    again = {(stage.recompute, own.layers, stage.repeats) for stage, own in zip(stages, choices, strict=True)}
    if structure.alike and len(again) > 1:
        some = sum(stage.recompute or bool(stage.repeats) for stage in stages)
        yield f"recomputation in some stages ({some} of {len(stages)}), or of unlike modules"
    if structure.alike and len({stage.offload for stage in stages}) > 1:
        some = sum(bool(stage.offload) for stage in stages)
        yield f"offload in some stages ({some} of {len(stages)}), or of unlike modules"
    kept = {name for stage in stages for name in stage.offload} - set(backend.offloads)
    if kept:
        yield f"activations in the host's memory ({', '.join(sorted(kept))})"
    precision = plan.options.precision
    unknown = {name for stage in stages if not backend.repeats(stage.repeats, precision) for name in stage.repeats}
    if unknown:
        beside = f" in {precision}" if all(map(backend.repeats, (stage.repeats for stage in stages))) else ""
        yield f"modules recomputed alone{beside} ({', '.join(sorted(unknown))})"
    starts = layer_starts(plan.block_names)
    torn = [stage.index for stage in stages if starts[stage.blocks[0]] != stage.blocks[0]]
    if structure.whole_layers and torn:
        yield f"layers divided between stages (before {'stage' if len(torn) == 1 else 'stages'} {_listed(torn)})"


def _width(sharding: Sharding, backend: Backend, graph: Graph | None) -> Iterator[str]:
    """Ranks along the axes that cut operators."""
    sizes = [axis.size for axis in sharding.axes if axis.role is AxisRole.TENSOR]
    width = math.prod(sizes)
    if graph is not None and width > 1:
        count, (heads, groups) = backend.heads_dealt(graph), attention_heads(graph)
        if count % width:
            yield f"{width} ranks for {count} {backend.structure.head_groups}"
        elif count and not deals_heads(heads, groups, sizes):
            yield f"{width} ranks along one axis for {groups} key-value heads"


def _in_groups(plan: Plan, backend: Backend, graph: Graph | None) -> Iterator[str]:
    """How the ranks of a group share operators, other than by the columns, rows and heads of tensor parallel layers and
    the experts of mixtures."""
    found: dict[str, list[str]] = {}
    for sharding in plan.shardings:
        roles = sharding.roles
        unknown = [role for role in roles if role not in backend.structure.axes]
        dealt = ("batch", AxisRole.TENSOR) in zip(sharding.boundaries, roles, strict=True)
        if "free" in sharding.boundaries:
            found["tensors between layers that lie each in a layout of its own"] = []
        elif dealt:
            found["samples dealt to the ranks of a group"] = []
        elif unknown:
            found[f"{unknown[0]} parallel ranks"] = []
        elif unlike := _between_layers(sharding, roles, backend):
            found[unlike] = []
        else:
            for entry in sharding.blocks:
                for words, names in _in_entry(plan, entry, sharding, roles, graph):
                    found.setdefault(words, []).extend(names)
    yield from (f"{words} ({_named(names)})" if names else words for words, names in found.items())


def _between_layers(sharding: Sharding, roles: Sequence[AxisRole], backend: Backend) -> str:
    """How tensors between layers lie on a tensor axis, where the framework has them otherwise; else ""."""
    taken, lies = backend.structure.between_layers, zip(sharding.boundaries, roles, strict=True)
    own = {boundary for boundary, role in lies if role is AxisRole.TENSOR}
    if not taken or own <= set(taken):
        return ""
    return "tensors between layers cut by the sequence" if "sequence" in own else "tensors between layers on all ranks"


def _in_entry(
    plan: Plan, entry: ShardedBlock, sharding: Sharding, roles: Sequence[AxisRole], graph: Graph | None
) -> Iterator[tuple[str, list[str]]]:
    """What is unlike tensor parallel layers in one kind of block, and the tensors and operators that are."""
    weights = {place.tensor for place in entry.tensors if place.optimizer}
    gathered = [c.of for c in entry.collectives if c.of in weights and c.phase != "step" and c.kind == "all_gather"]
    tensor = [axis for axis, role in enumerate(roles) if role is AxisRole.TENSOR]
    by_steps = [o.operator for o in entry.operators if any(o.splits[a] in STEP_SPLITS for a in tensor)]
    for words, names in (
        ("weights gathered inside a group in every pass", gathered),
        ("weights of products whole on all ranks of a group", _whole_weights(plan, entry, sharding, roles)),
        ("weights cut by columns and by rows", _cut_both_ways(entry, tensor, len(roles))),
        ("queries or keys cut by the sequence", by_steps),
        ("products or tables that layers cut along another dimension", _cut_otherwise(entry, tensor, roles, graph)),
    ):
        if names:
            yield words, names


def _whole_weights(plan: Plan, entry: ShardedBlock, sharding: Sharding, roles: Sequence[AxisRole]) -> list[str]:
    """Weights of two dimensions, that every rank of a tensor parallel axis has, though they could be cut."""
    block = plan.block_table[entry.first[0]]
    shapes = {p.name: p.shape for p in block.parameters}
    elements = sum(math.prod(shape) for shape in shapes.values())
    found = []
    for place in entry.tensors:
        shape = shapes.get(place.parameters[0] if place.parameters else place.tensor, ())
        layout = parse_layout(place.value, len(roles)) if place.optimizer else None
        if layout is None or len(shape) not in (2, 3) or math.prod(shape) < SMALL * elements:
            continue
        cut = zip(sharding.axes, layout, roles, strict=True)
        axes = [(axis.size, part) for axis, part, role in cut if role is AxisRole.TENSOR]
        even = all(n % size == 0 for size, _ in axes for n in shape[-2:])
        if even and any(size > 1 and not part.cuts for size, part in axes):
            found.append(place.tensor)
    return found


def _cut_both_ways(entry: ShardedBlock, axes: Sequence[int], count: int) -> list[str]:
    """Weights that one tensor axis (of `count` axes of the mesh) cuts along another dimension than the next."""
    places = ((place, parse_layout(place.value, count)) for place in entry.tensors if place.optimizer)
    return [place.tensor for place, layout in places if len({layout[a].dim for a in axes if layout[a].cuts}) > 1]


def _cut_otherwise(
    entry: ShardedBlock, axes: Sequence[int], roles: Sequence[AxisRole], graph: Graph | None
) -> list[str]:
    """Operators that tensor axes cut otherwise than layers do; none without the model."""
    if graph is None:
        return []
    specs, begins = graph_specs(graph), begins_layer(graph)

    def is_usual(split: OperatorSplit, index: int) -> bool:
        call = OpCall.of(graph, graph.nodes[index])
        reads, writes = (
            {p: parse_layout(layout, len(roles)) for p, layout in enumerate(layouts) if layout}
            for layouts in (split.reads, split.writes)
        )
        return all(cut_as_layers(call, specs[index], reads, writes.values(), a, begins=begins[index]) for a in axes)

    known = ((split, graph.producer[split.operator]) for split in entry.operators if split.operator in graph.producer)
    return [split.operator for split, index in known if not is_usual(split, index)]


_INSIDE = frozenset({
    Requirement.RING_ATTENTION, Requirement.HALO_EXCHANGE, Requirement.SHARED_STATISTICS, Requirement.PADDED_SPLIT,
    Requirement.INTERLEAVED_SPLIT,
})  # fmt: skip
"""What ranks of a group do where any layout can be asked for."""


def _named(names: Sequence[str]) -> str:
    """The first of some names, and how many more."""
    kinds = list(dict.fromkeys(names))
    more = f" and {len(kinds) - MOST_NAMED} more" if len(kinds) > MOST_NAMED else ""
    return ", ".join(kinds[:MOST_NAMED]) + more


def _listed(values: Sequence[int]) -> str:
    """A few numbers, shortened in the middle."""
    return ", ".join(map(str, values)) if len(values) < 7 else f"{values[0]}, {values[1]} .. {values[-1]}"

"""Write the shardings of a decision's stages for the plan file, with names of operators and tensors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from planner.costs.precision import Precision
from planner.errors import PlanError
from planner.graph import Graph, Node, TensorKind
from planner.operators import Access, DimKind, LoopNest, graph_specs
from planner.plans.figures import Predictions
from planner.plans.model import Block, repeats, skeletons, template
from planner.plans.records import Boundary, RankReplicas, SharedParameter
from planner.plans.shardings import (
    BlockFigures,
    BlockSeries,
    GroupCollective,
    Holding,
    OperatorSplit,
    ShardedBlock,
    Sharding,
    TensorPlace,
)
from planner.plans.words import significant
from planner.sharding import (
    CollectiveUse,
    InnerPoint,
    Mesh,
    StageSharding,
    Strategy,
    TensorLayout,
    WeightChoice,
    collective_uses,
    layout_text,
    parse_layout,
    shard_elements,
    shard_shape,
)
from planner.space.types import Configuration
from planner.sums import float_sum


def used_shardings(
    decision: Configuration, catalogue: Mapping[int, StageSharding]
) -> dict[int, tuple[StageSharding, str]]:
    """The catalogue entries that a decision's stages use, with unique names, by index.

    Raises:
        PlanError: a stage's entry is missing, or its mesh has not as many ranks as the stage's groups.
    """
    used: dict[int, tuple[StageSharding, str]] = {}
    for number, stage in enumerate(decision.stages):
        if stage.ranks == 1:
            continue
        entry = catalogue.get(stage.sharding)
        ranks = entry.inner.mesh.device_count if entry else 0
        if entry is None or ranks != stage.ranks:
            raise PlanError(
                f"stage {number} has groups of {stage.ranks} ranks; sharding {stage.sharding} is for {ranks or 'none'}",
                hint="hand over the shardings of the decision's micro-batch size",
            )
        if stage.sharding not in used:
            same_label = sum(other.label == entry.label for other, _ in used.values())
            used[stage.sharding] = entry, f"{entry.label} ({same_label + 1})" if same_label else entry.label
    return used


def sharding_sections(
    graph: Graph, decision: Configuration, used: Mapping[int, tuple[StageSharding, str]], table: Sequence[Block]
) -> tuple[Sharding, ...]:
    """The sections of all used shardings, for the blocks of their stages; O(operators of distinct blocks + all names).

    Args:
        graph: the model at the decision's micro-batch size.
        decision: the answer.
        used: the result of `used_shardings`.
        table: all blocks of the plan.
    """
    sections = []
    for index, (entry, name) in used.items():
        stages = [stage for stage in decision.stages if stage.sharding == index and stage.ranks > 1]
        costs, inner = entry.costs, entry.inner
        blocks_by_point: dict[Hashable, list[int]] = {}
        for b in (block for stage in stages for block in range(stage.start, stage.stop)):
            blocks_by_point.setdefault((id(costs.points[b]), _origins(graph, table[b])), []).append(b)
        blocks = tuple(_sharded_block(graph, entry, b, table) for b in blocks_by_point.values())
        boundaries: Any = tuple(each.value for each in costs.boundaries)
        sections.append(Sharding(name, inner.mesh.axes, boundaries, blocks, inner.setting.options.padded))
    return tuple(sections)


def _origins(graph: Graph, block: Block) -> tuple[Hashable, ...]:
    """How each weight that the operators of a block read follows from parameters: from how many, in which order."""
    read = (name for key in block.nodes for name in graph.nodes[graph.producer[key]].inputs if name in graph.sources)
    return tuple((len(parameters), dims) for parameters, dims in (weight_origin(graph, name) for name in read))


def _sharded_block(graph: Graph, entry: StageSharding, members: Sequence[int], table: Sequence[Block]) -> ShardedBlock:
    """The section of blocks that are sharded alike, in the names of the first."""
    setting = dataclasses.replace(entry.inner.setting, graph=graph)
    first, mesh = members[0], setting.mesh
    point = entry.inner.blocks[first].named(entry.costs.points[first])
    uses = collective_uses(setting, point.decision, point.communication)
    operators, places = list[OperatorSplit](), list[TensorPlace]()
    for name, choice in point.decision.items():
        if isinstance(choice, Strategy):
            key, layouts = name.removeprefix("op:"), (by_position(choice.reads), by_position(choice.writes))
            operators.append(OperatorSplit(key, choice.splits, *layouts, significant(choice.share)))
        else:
            value, gradient, optimizer = (*map(layout_text, choice.layouts), "", "")[:3]
            places.append(TensorPlace(name, value, gradient, optimizer, *weight_origin(graph, name)))
    made = ShardedBlock(
        of=(),
        figures=_figures(point),
        operators=tuple(operators),
        tensors=tuple(places),
        collectives=tuple(group_collective(use, mesh, setting.micro_batches) for use in uses),
        holdings=holdings(graph, mesh, [o.operator for o in operators], places),
    )
    return dataclasses.replace(made, of=_series(entry, members, table, made.names))


def _figures(point: InnerPoint) -> BlockFigures:
    traffic = ("forward_s", "backward_s", "step_s", "communication_s", "sent_bytes")
    kept = ("saved_bytes", "checkpoint_bytes", "workspace_bytes")
    return BlockFigures(
        **{name: significant(getattr(point, name)) for name in traffic},
        **{name: significant(getattr(point, name), 15) for name in kept},
        parameters=significant(point.parameter_elements, 15),
    )


def _series(
    entry: StageSharding, members: Sequence[int], table: Sequence[Block], names: Sequence[str]
) -> tuple[BlockSeries, ...]:
    """The member blocks, with the names that do not follow from positions in the plan's blocks."""
    first, names_of = members[0], [entry.inner.blocks[b].names for b in members]
    solved_of = {own: solved for solved, own in names_of[0].items()}
    solved_names = {name: solved_of.get(name, name) for name in names}
    rows = [{name: own.get(solved, solved) for name, solved in solved_names.items()} for own in names_of]
    placed = [_placed(table[first], table[b]) for b in members]
    other_names = [n for n in names if any(at.get(n) != row[n] for at, row in zip(placed, rows, strict=True))]
    return _runs(members, [tuple(row[n] for n in other_names) for row in rows])


def _placed(before: Block, after: Block) -> dict[str, str]:
    """Names of the second block by names of the first, matched by position."""
    matches = dict(zip(before.nodes, after.nodes, strict=False))
    matches.update(zip((p.name for p in before.parameters), (p.name for p in after.parameters), strict=False))
    return matches


def _runs(members: Sequence[int], rows: Sequence[tuple[str, ...]]) -> tuple[BlockSeries, ...]:
    """Members as series: those at equal distances whose names follow one template share a series."""
    series, at, outlines = [], 0, skeletons((row, ()) for row in rows)
    while at < len(members):
        count = 1
        if at + 1 < len(members):
            step = members[at + 1] - members[at]
            while at + count < len(members) and members[at + count] == members[at] + step * count:
                count += 1
            count = min(count, repeats(outlines, at, 1))
        if count > 1:
            names = tuple(template(a, b) for a, b in zip(rows[at], rows[at + 1], strict=True))
            series.append(BlockSeries(members[at], step, count, names))
        else:
            series.append(BlockSeries(members[at], 1, 1, rows[at]))
        at += count
    return tuple(series)


PlaceOf = Callable[[int, str], tuple[TensorLayout, Sequence[int]] | None]
"""By stage and tensor: its layout on the ranks of a group and the sizes of their mesh; None in groups of one rank."""


def placed_boundary(boundary: Boundary, place_of: PlaceOf) -> Boundary:
    """A boundary with its layout and bytes on the groups that make and read it."""
    made = place_of(boundary.from_stage, boundary.tensor)
    readers = (place_of(stage, boundary.tensor) for stage in boundary.to_stages)
    received = tuple("" if place is None else layout_text(place[0]) for place in readers)
    shape = boundary.shape
    return dataclasses.replace(
        boundary,
        layout="" if made is None else layout_text(made[0]),
        rank_bytes=0 if made is None else boundary.bytes * shard_elements(shape, *made) // max(1, math.prod(shape)),
        received=received if any(received) else (),
    )


def sharded_boundaries(
    boundaries: Sequence[Boundary], decision: Configuration, used: Mapping[int, tuple[StageSharding, str]]
) -> tuple[Boundary, ...]:
    """Boundaries placed as a decision's stages are sharded."""

    def place_of(stage: int, tensor: str) -> tuple[TensorLayout, Sequence[int]] | None:
        choice = decision.stages[stage]
        entry = used[choice.sharding][0] if choice.ranks > 1 else None
        return None if entry is None else (entry.costs.layouts[tensor], entry.inner.mesh.sizes)

    return tuple(placed_boundary(boundary, place_of) for boundary in boundaries)


def with_inside(
    predictions: Predictions, decision: Configuration, used: Mapping[int, tuple[StageSharding, str]]
) -> Predictions:
    """The predictions with seconds and bytes of communication inside each stage's groups, per micro-batch."""
    stages = []
    for terms, choice in zip(predictions.stages, decision.stages, strict=True):
        if choice.ranks > 1:
            costs, blocks = used[choice.sharding][0].costs, slice(choice.start, choice.stop)
            seconds = float(costs.communication_s[blocks].sum())
            sent_bytes = float_sum(
                map(significant, costs.sent_bytes[blocks].tolist())
            )  # the sum of the blocks' figures
            terms = dataclasses.replace(terms, inside_s=significant(seconds), inside_bytes=round(sent_bytes))
        stages.append(terms)
    return dataclasses.replace(predictions, stages=tuple(stages))


def rank_share(
    shared: SharedParameter, used: Mapping[int, tuple[StageSharding, str]], chosen: Precision
) -> SharedParameter:
    """A shared parameter with the gradient bytes of one rank, in the sharding where a rank holds most of it."""
    parameters = (each for entry, _ in used.values() for each in entry.costs.parameters)
    held_elements = [each[shared.parameter] for each in parameters if shared.parameter in each]
    held_bytes = round(max(held_elements, default=0.0) * chosen.gradient_bytes)
    return dataclasses.replace(shared, bytes=held_bytes) if held_elements else shared


def rank_parameters(entry: StageSharding, start: int, stop: int) -> int:
    """Trained weight elements of blocks `start` to `stop` that a rank holds, a shared parameter counted once.

    A parameter of several blocks counts as in the block where a rank holds most of it.
    """
    return round(float_sum(_held(entry, start, stop).values()))


def rank_replicas(entry: StageSharding, start: int, stop: int) -> tuple[RankReplicas, ...]:
    """Trained weight elements that several ranks of a group hold alike, by the number of these ranks."""
    elements_by_axes: dict[tuple[int, ...], float] = {}
    for name, elements in _held(entry, start, stop).items():
        axes = entry.costs.whole_on.get(name, ())
        elements_by_axes[axes] = elements_by_axes.get(axes, 0.0) + elements
    mesh = entry.inner.mesh
    return tuple(
        RankReplicas(mesh.ranks_along(axes), round(n)) for axes, n in sorted(elements_by_axes.items()) if axes and n
    )


def _held(entry: StageSharding, start: int, stop: int) -> dict[str, float]:
    """By parameter of blocks `start` to `stop`, the elements that a rank holds, in the block where it holds most."""
    return {name: entry.most_held[name] for each in entry.costs.parameters[start:stop] for name in each}


def by_position(layouts: Sequence[tuple[int, TensorLayout]]) -> tuple[str, ...]:
    """Layout texts by position; "" at positions without a layout."""
    texts = {p: layout_text(layout) for p, layout in layouts}
    return tuple(texts.get(p, "") for p in range(max(texts, default=-1) + 1))


def group_collective(use: CollectiveUse, mesh: Mesh, micro_batches: int) -> GroupCollective:
    """A collective for the plan file: one of an update counts in full, not by a micro-batch's share."""
    per_step = micro_batches if use.phase == "step" else 1
    return GroupCollective(
        of=use.subject,
        reason=use.reason,  # type: ignore[arg-type]
        phase=use.phase,  # type: ignore[arg-type]
        kind=use.kind.value,
        axes=use.axes,
        level=level_crossed(mesh, use.axes),
        payload_bytes=significant(use.payload_bytes),
        sent_bytes=significant(use.sent_bytes * per_step),
        times=significant(use.times * per_step),
        seconds=significant(use.seconds * per_step),
    )


def weight_origin(graph: Graph, tensor: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(parameters, dims): what a weight is computed from; for a transposed one, the parameter's dimension by its own.

    Both are empty for a parameter itself and for a tensor that is no weight.
    """
    sources = graph.sources.get(tensor, ())
    return ((), ()) if tensor in sources else (sources, graph.permuted.get(tensor, ()) if sources else ())


def level_crossed(mesh: Mesh, axes: Sequence[str]) -> str:
    """Name of the outermost level of links between ranks along the axes; "" without a cluster."""
    if mesh.cluster is None:
        return ""
    groups = mesh.groups([mesh.names.index(name) for name in axes])
    crossed, below = "", 1
    for level, size in zip(mesh.cluster.levels, mesh.cluster.group_sizes(), strict=True):
        if np.any(groups // below != groups[:, :1] // below):
            crossed = level.name
        below = size
    return crossed


EXPERTS, ROWS, COLUMNS = "experts", "rows", "columns"


def holdings(graph: Graph, mesh: Mesh, operators: Sequence[str], places: Sequence[TensorPlace]) -> tuple[Holding, ...]:
    """Experts, rows and columns of weights that the operators read and that are dealt to ranks.

    Args:
        graph: the model.
        mesh: the mesh of a group.
        operators: their first outputs.
        places: layouts of the weights.
    """
    specs = graph_specs(graph)
    layouts = {place.tensor: parse_layout(place.value, len(mesh.axes)) for place in places if place.optimizer}
    holdings_by_dim: dict[tuple[str, int], Holding] = {}
    for key in operators:
        i = graph.producer[key]
        for what, weight, dim in counted_dims(graph, graph.nodes[i], specs[i].nests):
            layout, shape = layouts.get(weight), graph.tensors[weight].shape
            axes = tuple(a.name for a, part in zip(mesh.axes, layout or (), strict=False) if part.dim == dim)
            if layout and axes and (weight, dim) not in holdings_by_dim:
                rank_count = shard_shape(shape, layout, mesh.sizes)[dim]
                holdings_by_dim[weight, dim] = Holding(what, weight, dim, axes, shape[dim], rank_count)  # type: ignore[arg-type]
    return tuple(holdings_by_dim.values())


def expert_ranks_of(entry: StageSharding) -> int:
    """Ranks that hold different experts under a sharding, along any axes; 1 without experts. O(distinct blocks)."""
    graph, mesh, specs = entry.inner.graph, entry.inner.mesh, graph_specs(entry.inner.graph)
    axes: set[int] = set()
    seen: set[int] = set()
    for block, (solved, point) in enumerate(zip(entry.inner.blocks, entry.costs.points, strict=True)):
        if id(point) in seen:
            continue
        seen.add(id(point))
        decision = solved.named(point).decision
        for i in entry.inner.chain.blocks[block].nodes:
            for what, weight, dim in counted_dims(graph, graph.nodes[i], specs[i].nests):
                choice = decision.get(weight)
                if what == EXPERTS and isinstance(choice, WeightChoice):
                    axes.update(axis for axis, part in enumerate(choice.weight) if part.dim == dim)
    return mesh.ranks_along(tuple(sorted(axes))) if axes else 1


def counted_dims(graph: Graph, node: Node, nests: Sequence[LoopNest]) -> Iterator[tuple[str, str, int]]:
    """("experts", "rows" or "columns", weight, dimension) of what an operator reads.

    Experts are counted by the dimension that a product's weight shares with its other operand and its result, rows of a
    table by the one from which a lookup picks, columns by the others.
    """
    for nest in nests:
        for access in nest.reads:
            weight = node.inputs[access.position]
            if not weight or graph.tensors[weight].kind is not TensorKind.PARAMETER:
                continue
            counts = [_counts(nest, access, names[0]) if len(names) == 1 else "" for names in access.dims]
            for dim, what in enumerate(counts):
                if what or ROWS in counts:
                    yield what or COLUMNS, weight, dim


def _counts(nest: LoopNest, access: Access, name: str) -> str:
    """What an iteration dimension counts: experts, rows, or "" for neither."""
    others = [a for a in (*nest.reads, *nest.writes) if a is not access]
    indexed = [any(name in names for names in a.dims) for a in others]
    if nest.matrix_flops:
        return EXPERTS if indexed and all(indexed) else ""
    return ROWS if nest.dim(name).kind is DimKind.REDUCED and not any(indexed) else ""

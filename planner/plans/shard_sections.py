"""Shardings that a decision's stages have, written out with their names for the plan file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from planner.costs.precision import Precision
from planner.errors import PlanError
from planner.graph import Graph, Node, TensorKind
from planner.operators import Access, DimKind, LoopNest, graph_specs
from planner.plans.figures import Predictions
from planner.plans.model import Block, longest_run, template
from planner.plans.records import Boundary, RankReplicas, SharedParameter
from planner.plans.shardings import (
    BlockFigures,
    BlockSeries,
    GroupCollective,
    Holding,
    MeshAxis,
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
    Setting,
    StageSharding,
    Strategy,
    TensorLayout,
    collective_uses,
    layout_text,
    parse_layout,
    shard_elements,
    shard_shape,
)
from planner.sharding.problem import GraphFacts
from planner.space.types import Configuration


def used_shardings(
    decision: Configuration, catalogue: Mapping[int, StageSharding]
) -> dict[int, tuple[StageSharding, str]]:
    """The entries that a decision's stages use and their names, by index.

    Raises:
        PlanError: a stage's entry is missing, or its mesh has not as many ranks as the stage's groups.
    """
    found: dict[int, tuple[StageSharding, str]] = {}
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
        if stage.sharding not in found:
            alike = sum(other.label == entry.label for other, _ in found.values())
            found[stage.sharding] = entry, f"{entry.label} ({alike + 1})" if alike else entry.label
    return found


def sharding_sections(
    graph: Graph, decision: Configuration, used: Mapping[int, tuple[StageSharding, str]], table: Sequence[Block]
) -> tuple[Sharding, ...]:
    """Every sharding that stages use, for the blocks of those stages; O(operators of distinct blocks + all names).

    Args:
        graph: the model at the decision's micro-batch size.
        decision: the answer.
        used: as `used_shardings` gives them.
        table: all blocks as the plan names them.
    """
    writers: dict[int, _Writer] = {}
    found = []
    for index, (entry, name) in used.items():
        own = [b for s in decision.stages if s.sharding == index and s.ranks > 1 for b in range(s.start, s.stop)]
        writer = writers.setdefault(id(entry.inner), _Writer(graph, entry))
        costs, inner = entry.costs, entry.inner
        alike: dict[int, list[int]] = {}
        for b in own:
            alike.setdefault(id(costs.points[b]), []).append(b)
        axes = tuple(MeshAxis(axis.name, axis.size) for axis in inner.mesh.axes)
        blocks = tuple(writer.block(entry, members, table) for members in alike.values())
        boundaries: Any = tuple(each.value for each in costs.boundaries)
        found.append(Sharding(name, axes, boundaries, blocks, inner.options.options.padded))
    return tuple(found)


class _Writer:
    """Describes blocks of one set of inner costs."""

    def __init__(self, graph: Graph, entry: StageSharding) -> None:
        inner, options = entry.inner, entry.inner.options
        self._graph = graph
        self._setting = Setting(
            graph,
            inner.mesh,
            item_bytes=options.item_bytes,
            micro_batches=options.micro_batches,
            options=options.options,
        )
        self._facts = GraphFacts.of(self._setting)

    def block(self, entry: StageSharding, members: Sequence[int], table: Sequence[Block]) -> ShardedBlock:
        """What is said of blocks that are sharded alike, in the names of the first."""
        first, mesh = members[0], self._setting.mesh
        point = entry.inner.blocks[first].named(entry.costs.points[first])
        uses = collective_uses(self._setting, point.decision, point.communication, self._facts.carrying)
        operators, places = list[OperatorSplit](), list[TensorPlace]()
        for name, choice in point.decision.items():
            if isinstance(choice, Strategy):
                key, layouts = name.removeprefix("op:"), (by_position(choice.reads), by_position(choice.writes))
                operators.append(OperatorSplit(key, choice.splits, *layouts, significant(choice.share)))
            else:
                value, gradient, optimizer = (*map(layout_text, choice.layouts), "", "")[:3]
                places.append(TensorPlace(name, value, gradient, optimizer, *weight_origin(self._graph, name)))
        made = ShardedBlock(
            of=(),
            figures=_figures(point),
            operators=tuple(operators),
            tensors=tuple(places),
            collectives=tuple(group_collective(use, mesh, self._setting.micro_batches) for use in uses),
            holdings=holdings(self._graph, mesh, [o.operator for o in operators], places),
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
    """The members with the names that do not follow from places in the plan's blocks."""
    first = members[0]
    home = {entry.inner.blocks[first].names.get(s, s): s for s in _solved_names(entry, first, names)}
    rows: list[dict[str, str]] = []
    for b in members:
        own = entry.inner.blocks[b].names
        rows.append({name: own.get(home[name], home[name]) for name in names})
    placed = [_placed(table[first], table[b]) for b in members]
    further = [n for n in names if any(at.get(n) != row[n] for at, row in zip(placed, rows, strict=True))]
    return _runs(members, [tuple(row[n] for n in further) for row in rows])


def _solved_names(entry: StageSharding, block: int, names: Sequence[str]) -> Sequence[str]:
    """Names of the block that was solved, of which the given ones are the block's own."""
    own = entry.inner.blocks[block].names
    back = {new: old for old, new in own.items()}
    return [back.get(name, name) for name in names]


def _placed(before: Block, after: Block) -> dict[str, str]:
    """Names that correspond by their place in two blocks."""
    found = dict(zip(before.nodes, after.nodes, strict=False))
    found.update(zip((p.name for p in before.parameters), (p.name for p in after.parameters), strict=False))
    return found


def _runs(members: Sequence[int], rows: Sequence[tuple[str, ...]]) -> tuple[BlockSeries, ...]:
    """Members at equal distances whose names follow one template, together."""
    found, at = [], 0
    while at < len(members):
        count = 1
        if at + 1 < len(members):
            step = members[at + 1] - members[at]
            while at + count < len(members) and members[at + count] == members[at] + step * count:
                count += 1
            count = longest_run(rows[at : at + count])
        if count > 1:
            names = tuple(template(a, b) for a, b in zip(rows[at], rows[at + 1], strict=True))
            found.append(BlockSeries(members[at], step, count, names))
        else:
            found.append(BlockSeries(members[at], 1, 1, rows[at]))
        at += count
    return tuple(found)


def sharded_boundaries(
    graph: Graph,
    boundaries: Sequence[Boundary],
    decision: Configuration,
    used: Mapping[int, tuple[StageSharding, str]],
) -> tuple[Boundary, ...]:
    """Boundaries with how they lie on the groups that make and read them."""

    def lies(stage: int, tensor: str) -> TensorLayout | None:
        choice = decision.stages[stage]
        if choice.ranks == 1:
            return None
        return used[choice.sharding][0].costs.layouts[tensor]

    found = []
    for b in boundaries:
        made = lies(b.from_stage, b.tensor)
        received = tuple(layout_text(lies(to, b.tensor) or ()) for to in b.to_stages)
        rank_bytes = 0
        if made is not None:
            sizes = used[decision.stages[b.from_stage].sharding][0].inner.mesh.sizes
            rank_bytes = b.bytes * shard_elements(b.shape, made, sizes) // max(1, graph.tensors[b.tensor].elements)
        found.append(
            dataclasses.replace(
                b,
                layout=layout_text(made or ()),
                rank_bytes=rank_bytes,
                received=received if any(received) else (),
            )
        )
    return tuple(found)


def with_inside(
    predictions: Predictions, decision: Configuration, used: Mapping[int, tuple[StageSharding, str]]
) -> Predictions:
    """The predictions with what each stage's groups exchange inside, a micro-batch."""
    stages = []
    for terms, choice in zip(predictions.stages, decision.stages, strict=True):
        if choice.ranks > 1:
            costs, own = used[choice.sharding][0].costs, slice(choice.start, choice.stop)
            seconds, sent = float(costs.communication_s[own].sum()), float(costs.sent_bytes[own].sum())
            terms = dataclasses.replace(terms, inside_s=significant(seconds), inside_bytes=round(sent))
        stages.append(terms)
    return dataclasses.replace(predictions, stages=tuple(stages))


def rank_share(
    shared: SharedParameter, used: Mapping[int, tuple[StageSharding, str]], chosen: Precision
) -> SharedParameter:
    """A shared parameter with the bytes of what one rank holds of its gradient, as where ranks hold most of it."""
    held = [
        elements
        for entry, _ in used.values()
        for each in entry.parameters
        for name, elements in each.items()
        if name == shared.parameter
    ]
    return dataclasses.replace(shared, bytes=round(max(held) * chosen.gradient_bytes)) if held else shared


def rank_parameters(entry: StageSharding, start: int, stop: int) -> int:
    """Trained weight elements that a rank holds of some blocks, a shared parameter once.

    A parameter that several blocks of the chain read counts as where a rank holds most of it.
    """
    return round(sum(_held(entry, start, stop).values()))


def rank_replicas(entry: StageSharding, start: int, stop: int) -> tuple[RankReplicas, ...]:
    """The same of those that ranks of a group hold alike, by how many do so."""
    found: dict[tuple[int, ...], float] = {}
    for name, elements in _held(entry, start, stop).items():
        axes = entry.costs.whole_on.get(name, ())
        found[axes] = found.get(axes, 0.0) + elements
    mesh = entry.inner.mesh
    return tuple(RankReplicas(mesh.ranks_along(axes), round(n)) for axes, n in sorted(found.items()) if axes and n)


def _held(entry: StageSharding, start: int, stop: int) -> dict[str, float]:
    """By parameter of some blocks, the elements that a rank holds where it holds most."""
    return {name: entry.most_held[name] for each in entry.parameters[start:stop] for name in each}


def by_position(layouts: Sequence[tuple[int, TensorLayout]]) -> tuple[str, ...]:
    """Layouts as texts by position, "" where there is none."""
    found = {p: layout_text(layout) for p, layout in layouts}
    return tuple(found.get(p, "") for p in range(max(found, default=-1) + 1))


def group_collective(use: CollectiveUse, mesh: Mesh, micro_batches: int) -> GroupCollective:
    """A collective as the plan has it: what an update runs is told whole, not by a micro-batch's share of it."""
    whole = micro_batches if use.phase == "step" else 1
    return GroupCollective(
        of=use.subject,
        reason=use.reason,  # type: ignore[arg-type]
        phase=use.phase,  # type: ignore[arg-type]
        kind=use.kind.value,
        axes=use.axes,
        level=level_crossed(mesh, use.axes),
        payload_bytes=significant(use.payload_bytes),
        sent_bytes=significant(use.sent_bytes * whole),
        times=significant(use.times * whole),
        seconds=significant(use.seconds * whole),
    )


def weight_origin(graph: Graph, tensor: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Parameters that a weight is computed from, and the parameter's dimension for each of a transposed one's.

    Both empty for a parameter itself and for what is no weight.
    """
    sources = graph.sources.get(tensor, ())
    return ((), ()) if tensor in sources else (sources, graph.permuted.get(tensor, ()) if sources else ())


def level_crossed(mesh: Mesh, axes: Sequence[str]) -> str:
    """Name of the outermost level of links between ranks along the axes; "" where there is none."""
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
    """Experts and rows that the given operators read and that are dealt to ranks; each weight's dimension once.

    Args:
        graph: the model.
        mesh: the mesh of a group.
        operators: their first outputs.
        places: where the weights lie.
    """
    specs = graph_specs(graph)
    lies = {place.tensor: parse_layout(place.value, len(mesh.axes)) for place in places if place.optimizer}
    found: dict[tuple[str, int], Holding] = {}
    for key in operators:
        i = graph.producer[key]
        for what, weight, dim in counted_dims(graph, graph.nodes[i], specs[i].nests):
            layout, shape = lies.get(weight), graph.tensors[weight].shape
            axes = tuple(a.name for a, part in zip(mesh.axes, layout or (), strict=False) if part.dim == dim)
            if layout and axes and (weight, dim) not in found:
                each = shard_shape(shape, layout, mesh.sizes)[dim]
                found[weight, dim] = Holding(what, weight, dim, axes, shape[dim], each)  # type: ignore[arg-type]
    return tuple(found.values())


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
    """What the iteration dimension counts, "" for neither."""
    others = [a for a in (*nest.reads, *nest.writes) if a is not access]
    indexed = [any(name in names for names in a.dims) for a in others]
    if nest.matrix_flops:
        return EXPERTS if indexed and all(indexed) else ""
    return ROWS if nest.dim(name).kind is DimKind.REDUCED and not any(indexed) else ""

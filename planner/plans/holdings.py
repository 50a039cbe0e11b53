"""Which dimensions of weights count experts or rows of a table, and how they are dealt to the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.graph import Graph, Node, TensorKind
from planner.operators import Access, DimKind, LoopNest, graph_specs
from planner.plans.shardings import Holding, TensorPlace
from planner.sharding import Mesh, parse_layout, shard_shape

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

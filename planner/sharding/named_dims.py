"""Names for the dimensions of a graph's tensors: two dimensions that one loop nest iterates together share a name.

Mesh-TensorFlow programs name their dimensions; here the names are derived. A dimension that is a product (heads times
head size) has the name of its outermost factor, which a cut would cut. The dimension of a fused projection, which a
`Split` cuts into equal pieces, has the name of the pieces: it is cut in as many blocks, each like a piece.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from planner.graph import Graph, Node
from planner.operators import DimKind, LoopNest, OpCall, OpSpec
from planner.sharding.layout import indexed, named_nests

Place = tuple[str, int]
"""A tensor and one of its dimensions."""


@dataclass
class NamedDims:
    """Names of tensor dimensions.

    Attributes:
        of: by tensor and dimension, its name.
        sizes: by name, the greatest common divisor of the sizes of its dimensions.
        nest: by node index, the name of each iteration dimension that has one.
        blocks: by dimension of a fused tensor, the number of pieces that it joins.
    """

    of: dict[Place, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    nest: dict[int, dict[str, str]] = field(default_factory=dict)
    blocks: dict[Place, int] = field(default_factory=dict)

    def tensor(self, name: str, rank: int) -> tuple[str, ...]:
        """Names of the dimensions of a tensor; "" for a dimension of size 1."""
        return tuple(self.of.get((name, k), "") for k in range(rank))


T = TypeVar("T", str, Place)


def group_leaders(pairs: Iterable[tuple[T, T]]) -> dict[T, T]:
    """By member, the least member of its connected component; a pair of one member twice adds it alone."""
    import networkx

    groups = ((min(group), group) for group in networkx.connected_components(networkx.Graph(pairs)))
    return {member: least for least, group in groups for member in group}


def _places(node: Node, nest: LoopNest) -> dict[str, list[Place]]:
    """By iteration dimension, the tensor dimensions of which it is the outermost factor.

    The sliced dimensions of a `Slice` keep names of their own, since it cannot be cut along them.
    """
    dims_of: dict[str, list[Place]] = {}
    for tensor, k, names in indexed(node, nest):
        if names and not (node.op == "Slice" and nest.dim(names[0]).kind is DimKind.WHOLE):
            dims_of.setdefault(names[0], []).append((tensor, k))
    return dims_of


def named_dims(
    graph: Graph, nodes: Sequence[int], specs: Sequence[OpSpec], tied: Mapping[str, str] | None = None
) -> NamedDims:
    """Names of all dimensions of the tensors of some nodes, `d0`, `d1`, ... in order of first use; O(operands).

    Args:
        graph: the model.
        nodes: indices of the nodes.
        specs: descriptions, aligned with the graph's nodes.
        tied: by tensor, the tensor with the same dimensions.
    """
    pairs, led = list[tuple[Place, Place]](), {}
    for i in nodes:
        node = graph.nodes[i]
        led[i] = [(nest, _places(node, nest)) for nest in named_nests(OpCall.of(graph, node), specs[i])]
        for _, places in led[i]:
            pairs += [(spots[0], spot) for spots in places.values() for spot in spots]
    for name, other in (tied or {}).items():
        pairs += [((name, k), (other, k)) for k in range(len(graph.tensors[name].shape))]
    root = group_leaders(pairs)
    pieces = _pieces(root, [entry for entries in led.values() for entry in entries])
    result = NamedDims()
    known: dict[Place, str] = {}
    for i in nodes:
        result.nest[i] = {}
        for nest, places in led[i]:
            for dim, spots in places.items():
                fused = root[spots[0]]
                group, count = pieces.get(fused, (fused, 1))
                parting = count > 1 and nest.dim(dim).kind is DimKind.WHOLE
                name = known.setdefault(group, f"d{len(known)}")
                if not parting:
                    result.nest[i][dim] = name
                for tensor, k in spots:
                    size = graph.tensors[tensor].shape[k]
                    result.of[tensor, k] = name
                    sizes = (size // count,) if parting else (size // count, nest.dim(dim).size // count)
                    result.sizes[name] = math.gcd(result.sizes.get(name, 0), *sizes)
                    if count > 1:
                        result.blocks[tensor, k] = count
    return result


def _pieces(
    root: Mapping[Place, Place], led: Sequence[tuple[LoopNest, Mapping[str, list[Place]]]]
) -> dict[Place, tuple[Place, int]]:
    """By fused dimension that a nest splits, the dimension and the number of its pieces; without ambiguous ones."""
    pieces_of: dict[Place, set[tuple[Place, int]]] = {}
    for nest, places in led:
        for access in (*nest.reads, *nest.writes):
            for names in access.dims:
                if len(names) < 2 or nest.dim(names[0]).kind is not DimKind.WHOLE or names[1] not in places:
                    continue
                (fused,) = {root[spot] for spot in places[names[0]]}
                pieces_of.setdefault(fused, set()).add((root[places[names[1]][0]], nest.dim(names[0]).size))
    unique = {fused: next(iter(pieces)) for fused, pieces in pieces_of.items() if len(pieces) == 1}
    return {fused: (piece, count) for fused, (piece, count) in unique.items() if piece not in pieces_of and count > 1}

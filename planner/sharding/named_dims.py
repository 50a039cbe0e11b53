"""Names for the dimensions of a graph's tensors: two dimensions that one loop nest iterates together share a name.

Mesh-TensorFlow programs name their dimensions; here the names are found. A dimension that is a product (heads times
head size) goes by its outermost factor, the one that a cut would cut. A fused projection, which a `Split` parts into
equal pieces, goes by the name of the pieces: it is cut in so many blocks, each like a piece.
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
        of: name of each dimension of each tensor.
        sizes: greatest common divisor of the sizes under each name.
        nest: by node index, the name of each iteration dimension that has one.
        blocks: of the dimensions of fused tensors, how many pieces lie side by side in them.
    """

    of: dict[Place, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    nest: dict[int, dict[str, str]] = field(default_factory=dict)
    blocks: dict[Place, int] = field(default_factory=dict)

    def tensor(self, name: str, rank: int) -> tuple[str, ...]:
        """Names of a tensor's dimensions; a dimension of size 1 has an empty one."""
        return tuple(self.of.get((name, k), "") for k in range(rank))


T = TypeVar("T", str, Place)


def joined(pairs: Iterable[tuple[T, T]]) -> dict[T, T]:
    """The least member of each thing's group; pairs belong together, and a pair of a thing with itself names it."""
    import networkx

    groups = ((min(group), group) for group in networkx.connected_components(networkx.Graph(pairs)))
    return {member: least for least, group in groups for member in group}


def _places(node: Node, nest: LoopNest) -> dict[str, list[Place]]:
    """For each iteration dimension the tensor dimensions that it leads.

    What a slice leaves of the dimensions that it cannot be cut along has a name of its own.
    """
    found: dict[str, list[Place]] = {}
    for tensor, k, names in indexed(node, nest):
        if names and not (node.op == "Slice" and nest.dim(names[0]).kind is DimKind.WHOLE):
            found.setdefault(names[0], []).append((tensor, k))
    return found


def named_dims(
    graph: Graph, nodes: Sequence[int], specs: Sequence[OpSpec], tied: Mapping[str, str] | None = None
) -> NamedDims:
    """Names for all dimensions of the tensors of some nodes, `d0`, `d1`, ... in order of first use; O(operands).

    Args:
        graph: the model.
        nodes: indices of the nodes.
        specs: descriptions, aligned with the graph's nodes.
        tied: tensors whose dimensions are those of another.
    """
    pairs, led = list[tuple[Place, Place]](), {}
    for i in nodes:
        node = graph.nodes[i]
        led[i] = [(nest, _places(node, nest)) for nest in named_nests(OpCall.of(graph, node), specs[i])]
        for _, places in led[i]:
            pairs += [(spots[0], spot) for spots in places.values() for spot in spots]
    for name, other in (tied or {}).items():
        pairs += [((name, k), (other, k)) for k in range(len(graph.tensors[name].shape))]
    root = joined(pairs)
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
    """Of fused dimensions that a nest parts: the dimension of a piece, and how many there are; none that is unclear."""
    found: dict[Place, set[tuple[Place, int]]] = {}
    for nest, places in led:
        for access in (*nest.reads, *nest.writes):
            for names in access.dims:
                if len(names) < 2 or nest.dim(names[0]).kind is not DimKind.WHOLE or names[1] not in places:
                    continue
                (fused,) = {root[spot] for spot in places[names[0]]}
                found.setdefault(fused, set()).add((root[places[names[1]][0]], nest.dim(names[0]).size))
    one = {fused: next(iter(each)) for fused, each in found.items() if len(each) == 1}
    return {fused: (piece, count) for fused, (piece, count) in one.items() if piece not in found and count > 1}

"""Interleaved cuts worth considering: for the tensors through which the parts of a fused projection flow.

Operators that split or join a dimension (`Split`, `Concat`, an attention with its projection) need interleaved cuts of
their fused tensor. The need travels along dimensions that operators carry from operand to result unchanged, up to the
weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.graph import Graph, Node
from planner.operators import DimKind, LoopNest, OpCall, OpSpec
from planner.sharding.choices import MOST_BLOCKS
from planner.sharding.layout import Part, indexed, named_nests

MOST_CUTS = 2
"""Interleaved cuts that are kept for one tensor."""

InterleavedCuts = dict[str, set[Part]]


def _leading(nests: Sequence[LoopNest]) -> frozenset[str]:
    """Dimensions that are the outermost factor of some operand's or result's dimension."""
    sides = [a for nest in nests for a in (*nest.reads, *nest.writes)]
    return frozenset(names[0] for a in sides for names in a.dims if names)


def _needed_cuts(node: Node, nest: LoopNest, leading: frozenset[str]) -> InterleavedCuts:
    """Interleaved cuts of fused tensors that a nest needs so that its plain results or operands can be cut."""
    cuts: InterleavedCuts = {}
    sizes = {d.name: d.size for d in nest.dims}
    for tensor, k, names in indexed(node, nest):
        blocks = 1
        for name in names:
            can_be_cut = nest.dim(name).kind in (DimKind.PARALLEL, DimKind.REDUCED) and sizes[name] > 1
            if 1 < blocks <= MOST_BLOCKS and name in leading and can_be_cut:
                cuts.setdefault(tensor, set()).add(Part(k, blocks))
            blocks *= sizes[name]
    return cuts


def _spread(places: Mapping[str, Sequence[tuple[str, int]]], cuts: InterleavedCuts) -> bool:
    """Spread cuts among the tensor dimensions that one iteration dimension indexes; true if anything changed."""
    changed = False
    for tensor_dims in places.values():
        blocks = sorted({p.blocks for name, k in tensor_dims for p in cuts.get(name, ()) if p.dim == k})
        for name, k in tensor_dims:
            for n in blocks:
                if len(cuts.get(name, ())) < MOST_CUTS and Part(k, n) not in cuts.get(name, ()):
                    cuts.setdefault(name, set()).add(Part(k, n))
                    changed = True
    return changed


def _plain_places(node: Node, nest: LoopNest) -> dict[str, list[tuple[str, int]]]:
    """By iteration dimension that can be cut, the tensor dimensions that it indexes by itself."""
    dims_of: dict[str, list[tuple[str, int]]] = {
        d.name: [] for d in nest.dims if d.kind in (DimKind.PARALLEL, DimKind.REDUCED)
    }
    for tensor, k, names in indexed(node, nest):
        if len(names) == 1 and names[0] in dims_of:
            dims_of[names[0]].append((tensor, k))
    return dims_of


def interleaved_cuts(graph: Graph, nodes: Sequence[int], specs: Sequence[OpSpec]) -> InterleavedCuts:
    """Interleaved cuts worth considering, by tensor name; O(rounds * nodes), with few rounds."""
    cuts: InterleavedCuts = {}
    if not any(graph.nodes[i].op in _FUSED for i in nodes):
        return cuts
    all_places: list[dict[str, list[tuple[str, int]]]] = []
    for i in nodes:
        node = graph.nodes[i]
        if node.op not in ("Split", "Concat", *_CARRIERS) and not specs[i].matrix_flops:
            continue
        nests = named_nests(OpCall.of(graph, node), specs[i])
        for nest in nests:
            all_places.append(_plain_places(node, nest))
            if node.op in _FUSED:
                for name, parts in _needed_cuts(node, nest, _leading(nests)).items():
                    cuts.setdefault(name, set()).update(sorted(parts)[:MOST_CUTS])
    changed = True
    while changed:
        changed = False
        for places in all_places:
            changed |= _spread(places, cuts)
    return cuts


_FUSED = (
    "Split", "Concat", "com.microsoft.Attention", "com.microsoft.GroupQueryAttention", "com.microsoft.MoE",
    "com.microsoft.MultiHeadAttention", "com.microsoft.QAttention",
)  # fmt: skip
"""Operators with a fused operand or result."""
_CARRIERS = ("Add", "Mul", "Cast", "Identity", "Dropout", "Gelu", "Transpose", "Slice")
"""Operators through which the need for interleaved cuts travels, besides products."""

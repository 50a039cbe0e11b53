"""Which tensors may be cut in an interleaved way: those that a fused projection's parts flow through.

Operators that part or join a dimension (`Split`, `Concat`, an attention with its projection) ask for interleaved cuts
of their fused tensor. The wish travels along dimensions that operators carry from operand to result unchanged, up to
the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.graph import Graph
from planner.operators import DimKind, LoopNest, OpCall, OpSpec
from planner.sharding.choices import MOST_BLOCKS
from planner.sharding.equal_parts import named_nests
from planner.sharding.layout import Part

MOST_TAGS = 2
"""Ways to interleave one tensor that are kept."""

Tags = dict[str, set[Part]]


def _leading(nests: Sequence[LoopNest]) -> frozenset[str]:
    """Dimensions that are the outermost factor of some operand's or result's dimension."""
    sides = [a for nest in nests for a in (*nest.reads, *nest.writes)]
    return frozenset(names[0] for a in sides for names in a.dims if names)


def _wishes(nest: LoopNest, tensors: Mapping[tuple[bool, int], str], leading: frozenset[str]) -> Tags:
    """Interleaved cuts that a nest with a plain result (or operand) on the other side asks for."""
    found: Tags = {}
    sizes = {d.name: d.size for d in nest.dims}
    sides = [(False, a) for a in nest.reads] + [(True, a) for a in nest.writes]
    for side, access in sides:
        for k, names in enumerate(access.dims):
            blocks = 1
            for name in names:
                free = nest.dim(name).kind in (DimKind.PARALLEL, DimKind.REDUCED) and sizes[name] > 1
                if 1 < blocks <= MOST_BLOCKS and name in leading and free and (side, access.position) in tensors:
                    found.setdefault(tensors[side, access.position], set()).add(Part(k, blocks))
                blocks *= sizes[name]
    return found


def _carry(nest: LoopNest, tensors: Mapping[tuple[bool, int], str], tags: Tags) -> bool:
    """Hand wishes on along plain dimensions; whether anything was new."""
    changed = False
    sides = [(False, a) for a in nest.reads] + [(True, a) for a in nest.writes]
    places: dict[str, list[tuple[str, int]]] = {}
    for side, access in sides:
        for k, names in enumerate(access.dims):
            if len(names) == 1 and (side, access.position) in tensors:
                places.setdefault(names[0], []).append((tensors[side, access.position], k))
    for dim in nest.dims:
        if dim.kind not in (DimKind.PARALLEL, DimKind.REDUCED):
            continue
        spots = places.get(dim.name, [])
        blocks = sorted({p.blocks for name, k in spots for p in tags.get(name, ()) if p.dim == k})
        for name, k in spots:
            for n in blocks:
                if len(tags.get(name, ())) < MOST_TAGS and Part(k, n) not in tags.get(name, ()):
                    tags.setdefault(name, set()).add(Part(k, n))
                    changed = True
    return changed


def block_tags(graph: Graph, nodes: Sequence[int], specs: Sequence[OpSpec]) -> Tags:
    """Interleaved cuts worth considering, by tensor name; O(rounds * nodes), rounds being few."""
    found: Tags = {}
    work: list[tuple[LoopNest, dict[tuple[bool, int], str]]] = []
    for i in nodes:
        node = graph.nodes[i]
        if node.op not in ("Split", "Concat", *_CARRIERS) and not specs[i].matrix_flops:
            continue
        tensors = {(False, p): name for p, name in enumerate(node.inputs) if name}
        tensors |= {(True, p): name for p, name in enumerate(node.outputs) if name}
        nests = named_nests(OpCall.of(graph, node), specs[i])
        for nest in nests:
            work.append((nest, tensors))
            if node.op in _ASKING:
                for name, parts in _wishes(nest, tensors, _leading(nests)).items():
                    found.setdefault(name, set()).update(sorted(parts)[:MOST_TAGS])
    changed = True
    while changed:
        changed = False
        for nest, tensors in work:
            changed |= _carry(nest, tensors, found)
    return found


_ASKING = (
    "Split", "Concat", "com.microsoft.Attention", "com.microsoft.GroupQueryAttention", "com.microsoft.MoE",
    "com.microsoft.MultiHeadAttention", "com.microsoft.QAttention",
)  # fmt: skip
"""Operators with a fused operand or result whose parts they use side by side."""
_CARRIERS = ("Add", "Mul", "Cast", "Identity", "Dropout", "Gelu", "Transpose", "Slice")
"""Operators through which wishes travel, besides products."""

"""The passes of training that Tofu cuts, the ways to cut one, and the bytes that moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.graph import Graph
from planner.operators import DimKind, LoopNest, OpCall, OpSpec, gradient_nest
from planner.sharding.choices import splits
from planner.sharding.layout import PARTIAL, REPLICATED, Part, named_nests


@dataclass(frozen=True, slots=True)
class Pass:
    """One loop nest of training: an operator's forward pass, or the gradient of one operand.

    Attributes:
        key: the node's key, with `#` and the operand's number for a gradient.
        nests: loop nests whose accesses are numbered in order of `reads` and `writes`.
        reads: names of the tensors read (a gradient goes by its tensor's name).
        writes: names of the tensors written.
    """

    key: str
    nests: tuple[LoopNest, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """One way to cut a pass: the dimension and what that makes of each operand; "" repeats the work."""

    dim: str
    reads: tuple[Part, ...]
    writes: tuple[Part, ...]
    halo_bytes: float = 0.0


def _numbered(nest: LoopNest, reads: Sequence[int], writes: Sequence[int]) -> LoopNest:
    """The nest with its accesses numbered by their place in those lists."""
    return replace(
        nest,
        reads=tuple(replace(a, position=reads.index(a.position)) for a in nest.reads),
        writes=tuple(replace(a, position=writes.index(a.position)) for a in nest.writes),
    )


def _gradients(nest: LoopNest, names: Sequence[str], out: str, wanted: frozenset[str], key: str) -> list[Pass]:
    """A pass for each operand of a nest whose gradient is wanted."""
    found = []
    for r, access in enumerate(nest.reads):
        target = names[access.position]
        if target not in wanted:
            continue
        back = gradient_nest(nest, r)
        others = [names[a.position] for i, a in enumerate(nest.reads) if i != r]
        reads = tuple(replace(a, position=i) for i, a in enumerate(back.reads))
        writes = (replace(back.writes[0], position=0),)
        found.append(Pass(f"{key}#{r}", (replace(back, reads=reads, writes=writes),), (out, *others), (target,)))
    return found


def passes_of(graph: Graph, i: int, spec: OpSpec, wanted: frozenset[str]) -> list[Pass]:
    """The forward pass of a node and the gradients that training asks of it."""
    node = graph.nodes[i]
    nests = [n for n in named_nests(OpCall.of(graph, node), spec) if n.reads or n.writes]
    if not nests:
        return []
    reads = sorted({a.position for n in nests for a in n.reads})
    writes = sorted({a.position for n in nests for a in n.writes})
    forward = tuple(_numbered(n, reads, writes) for n in nests)
    names, outs = tuple(node.inputs[p] for p in reads), tuple(node.outputs[p] for p in writes)
    found = [Pass(node.key, forward, names, outs)]
    if outs[0] in wanted:
        for nest in forward:
            found += _gradients(nest, names, outs[0], wanted, node.key)
    return found


def cuts_of(one: Pass, ranks: int, item_bytes: float) -> list[Cut]:
    """All cuts of a pass in that many parts; repeating the work only where there is none."""
    found = []
    sizes = {d.name: d.size for n in one.nests for d in n.dims}
    widths = {(a.position, k): width for nest in one.nests for a in nest.reads for k, width in a.halo}
    for dim, (reads, writes) in splits(one.nests).items():
        if sizes[dim] % ranks:
            continue
        halo = 0.0
        for p, part in reads.items():
            surface = operand_elements(one, p, sizes) / sizes[dim]
            halo += 2 * (ranks - 1) * widths.get((p, part.dim), 0) * surface * item_bytes
        parts = [
            tuple(side.get(p, REPLICATED) for p in range(count))
            for side, count in ((reads, len(one.reads)), (writes, len(one.writes)))
        ]
        found.append(Cut(dim, parts[0], parts[1], halo))
    if not found:
        found.append(Cut("", (REPLICATED,) * len(one.reads), (REPLICATED,) * len(one.writes)))
    return found


def operand_elements(one: Pass, read: int, sizes: Mapping[str, int], *, written: bool = False) -> float:
    """Elements of an operand that one group works on: the sizes of the dimensions that index it, windows by results."""
    for nest in one.nests:
        for access in nest.writes if written else nest.reads:
            if access.position == read:
                whole = {d.name for d in nest.dims if d.kind is DimKind.WHOLE}
                windows = {k for k, _ in access.halo}
                return float(math.prod(
                    sizes[n] for k, names in enumerate(access.dims) for n in names
                    if not (k in windows and n in whole)
                ))  # fmt: skip
    return 0.0


def moved_bytes(rest: Part, used: Part, ranks: int, byte_count: float, *, written: bool = False) -> float:
    """Bytes that all ranks fetch to use a tensor as `used` when it rests as `rest`, or to bring a result to rest."""
    if written and used == PARTIAL:
        return byte_count * (ranks - 1) * (1 if rest.cuts else 2)
    have, want = (used, rest) if written else (rest, used)
    if not have.cuts or have == want:
        return 0.0
    return byte_count * (ranks - 1) / (ranks if want.cuts else 1)


def cut_bytes(one: Pass, cut: Cut, rests: Sequence[Part], ranks: int, item_bytes: float) -> float:
    """Bytes that all ranks move in one pass, given how its tensors rest (reads first, then writes)."""
    sizes = {d.name: d.size for n in one.nests for d in n.dims}
    total = cut.halo_bytes
    for p, used in enumerate(cut.reads):
        total += moved_bytes(rests[p], used, ranks, item_bytes * operand_elements(one, p, sizes))
    for p, used in enumerate(cut.writes):
        elements = operand_elements(one, p, sizes, written=True)
        total += moved_bytes(rests[len(one.reads) + p], used, ranks, item_bytes * elements, written=True)
    return total

"""Every legal way to split an operator, read off its loop nests.

A dimension that indexes the results may be cut: each part computes its share of the results from its share of the
operands that the dimension indexes and from the whole of the others. A reduced dimension may be cut too: each part
then holds a partial sum of the results. Coupled and whole dimensions may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from planner.operators.types import Access, DimKind, LoopNest, OpSpec


class Placement(StrEnum):
    """What one tensor becomes when an iteration dimension is divided among the ranks of a mesh axis."""

    REPLICATE = "replicate"
    SPLIT = "split"
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a tensor's elements lie on one mesh axis.

    Attributes:
        placement: whole on every rank, cut, or to be summed over the ranks.
        dim: the tensor dimension that is cut; -1 unless split.
        halo: elements that each neighbour must supply on either side of the cut.
    """

    placement: Placement
    dim: int = -1
    halo: int = 0


REPLICATE = Layout(Placement.REPLICATE)
PARTIAL = Layout(Placement.PARTIAL)


@dataclass(frozen=True, slots=True)
class Split:
    """One legal split.

    Attributes:
        dim: the iteration dimension.
        size: its size; the number of ranks should divide it.
        reads: layout that each input must have, by position; an input that is PARTIAL is added once over all ranks.
        writes: layout that each output gets, by position.
    """

    dim: str
    size: int
    reads: tuple[tuple[int, Layout], ...]
    writes: tuple[tuple[int, Layout], ...]


def _layout(access: Access, name: str) -> Layout | None:
    """Layout of one access under a split of a dimension; None when the cut is not one contiguous part a rank."""
    hits = [k for k, names in enumerate(access.dims) if name in names]
    if not hits:
        return REPLICATE
    if len(hits) > 1 or access.dims[hits[0]][0] != name:
        return None
    return Layout(Placement.SPLIT, hits[0], dict(access.halo).get(hits[0], 0))


def _nest_layouts(nest: LoopNest, name: str, kind: DimKind) -> tuple[dict[int, Layout], dict[int, Layout]] | None:
    """Layouts of a nest's reads and writes by position, or None when the nest forbids the split."""
    dim = next((d for d in nest.dims if d.name == name), None)
    if dim is None:
        once = PARTIAL if kind is DimKind.REDUCED else REPLICATE
        return {a.position: once for a in nest.reads}, {a.position: once for a in nest.writes}
    if dim.kind is not kind:
        return None
    reads: dict[int, Layout] = {}
    writes: dict[int, Layout] = {}
    for group, accesses in ((reads, nest.reads), (writes, nest.writes)):
        for access in accesses:
            layout = _layout(access, name)
            if layout is None or group.get(access.position, layout) != layout:
                return None
            group[access.position] = layout
    if any(layout.halo for layout in writes.values()):
        return None
    if kind is DimKind.REDUCED:
        writes = {p: PARTIAL if layout is REPLICATE else layout for p, layout in writes.items()}
    return reads, writes


def splits(what: OpSpec | LoopNest | Sequence[LoopNest]) -> tuple[Split, ...]:
    """All legal splits of an operator, one for each iteration dimension that allows it, in order of the nests.

    Nests of one operator share dimension names and results. A nest without the split dimension adds to the result
    once (a bias under a split of the reduced dimension), so its operands are PARTIAL.
    Complexity: dimensions times operands.
    """
    nests = what.nests if isinstance(what, OpSpec) else (what,) if isinstance(what, LoopNest) else tuple(what)
    found = []
    for name, dim in {d.name: d for nest in nests for d in nest.dims}.items():
        if dim.kind not in (DimKind.PARALLEL, DimKind.REDUCED) or dim.size < 2:
            continue
        reads: dict[int, Layout] = {}
        writes: dict[int, Layout] = {}
        for nest in nests:
            layouts = _nest_layouts(nest, name, dim.kind)
            if layouts is None or any(writes.get(p, v) != v for p, v in layouts[1].items()):
                break
            if any(reads.get(p, v) != v for p, v in layouts[0].items()):
                break
            reads |= layouts[0]
            writes |= layouts[1]
        else:
            found.append(Split(name, dim.size, tuple(sorted(reads.items())), tuple(sorted(writes.items()))))
    return tuple(found)

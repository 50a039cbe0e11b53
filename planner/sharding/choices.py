"""What one mesh axis can do with an operator: cut a dimension of its loop nests, or nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.graph import TensorKind
from planner.operators import Access, Dim, DimKind, JointCut, LoopNest, OpCall, OpSpec, rule_of
from planner.sharding.layout import PARTIAL, REPLICATED, Part
from planner.sharding.mesh import AxisRole

Parts = tuple[dict[int, Part], dict[int, Part]]
"""What becomes of an operator's operands and of its results, by position."""

MOST_BLOCKS = 8
"""Interleaved cuts of more blocks than this are not considered."""


class Means(StrEnum):
    """How an axis runs an operator."""

    REPEAT = "repeat"
    """Every rank does the same."""
    CUT = "cut"
    """A parallel or reduced dimension is cut."""
    STATISTICS = "statistics"
    """A coupled dimension is cut, statistics are reduced over the ranks."""
    RING = "ring"
    """Queries and keys of an attention are cut together, keys and values go around."""
    EXPERTS = "experts"
    """Rows and experts of a mixture are cut together, rows go to their experts and back."""
    PARTIAL = "partial"
    """Partial operands give partial results."""


@dataclass(frozen=True, slots=True)
class Options:
    """Which splits count.

    Attributes:
        padded: uneven cuts, at the cost of their padding: every rank works on and holds as much as the largest piece.
            Padding is zeros, so dimensions whose statistics are reduced, and factors of a tensor dimension, are not
            padded.
        coupled: cuts of coupled dimensions with an exchange of statistics, ring attention, and rows sent to experts.
        partial: partial sums may pass through linear operators.
        replicate: an axis may do the same work on every rank.
        interleaved: interleaved cuts (a fused projection's thirds).
        blocks: numbers of blocks in which plain cuts may be interleaved too, since a neighbour wants it so.
        roles: what each mesh axis may do; empty where all of them may do anything.
        as_layers: tensor axes cut operators as the tensor parallel layers of frameworks do
            (`planner.sharding.limits`).
    """

    padded: bool = False
    coupled: bool = True
    partial: bool = True
    replicate: bool = True
    interleaved: bool = True
    blocks: tuple[int, ...] = ()
    roles: tuple[AxisRole, ...] = ()
    as_layers: bool = False

    @property
    def dealing(self) -> tuple[int, ...]:
        """The axes on which weights are whole but those of experts."""
        return tuple(axis for axis, role in enumerate(self.roles) if role.deals)

    def role(self, axis: int) -> AxisRole:
        """What an axis may do."""
        return self.roles[axis] if self.roles else AxisRole.TENSOR


@dataclass(frozen=True, slots=True)
class Local:
    """What one rank runs after some axes were cut: nests of local sizes, its share of the work, the means so far."""

    nests: tuple[LoopNest, ...]
    share: float = 1.0
    means: tuple[Means, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One axis of a strategy.

    Attributes:
        means: how.
        name: the dimension cut, or the means where that says more; "" when every rank does the same.
        reads: part of each input by position; inputs not listed are whole.
        writes: part of each output by position.
        left: what one rank runs then.
    """

    means: Means
    name: str
    reads: Mapping[int, Part]
    writes: Mapping[int, Part]
    left: Local


def has(nest: LoopNest, name: str) -> bool:
    """Whether the nest iterates over that dimension."""
    return any(d.name == name for d in nest.dims)


def divides(size: int, ranks: int, padded: bool) -> bool:
    """Whether a dimension may be cut: evenly, or with padding that leaves no rank empty."""
    return size % ranks == 0 or (padded and -(-size // ranks) * (ranks - 1) < size)


def _alone(local: Local, name: str) -> bool:
    """Whether the dimension is everywhere a tensor dimension of its own, no factor or window of one."""
    accesses = [a for nest in local.nests for a in (*nest.reads, *nest.writes)]
    return all(len(names) == 1 for a in accesses for names in a.dims if name in names)


def evenly_or_alone(local: Local, name: str, ranks: int) -> bool:
    """Whether a cut of the dimension is even, or tears no tensor dimension that it is only a factor or window of."""
    sizes = {d.size for nest in local.nests for d in nest.dims if d.name == name}
    return _alone(local, name) or all(size % ranks == 0 for size in sizes)


def choices(
    call: OpCall, spec: OpSpec, local: Local, ranks: int, options: Options, role: AxisRole = AxisRole.TENSOR
) -> list[Choice]:
    """Everything an axis of that many ranks and that role can do with what earlier axes left, doing nothing first."""
    found = _free_choices(call, spec, local, ranks, options)
    if not role.deals:
        return found
    found = [c for c in found if _keeps_weights(call, local.nests, c, role)]
    return [c for c in found if _deals_samples(call, c)] or found if role is AxisRole.EXPERT else found


def _deals_samples(call: OpCall, choice: Choice) -> bool:
    """Whether a choice cuts one of the first two dimensions of some activation: samples, or the rows of experts."""
    reads = (part for p, part in choice.reads.items() if not _is_weight(call, p))
    return any(part.dim in (0, 1) for part in (*reads, *choice.writes.values()))


def _keeps_weights(call: OpCall, nests: Sequence[LoopNest], choice: Choice, role: AxisRole) -> bool:
    """Whether a choice leaves the weights of products whole but those of experts, which an expert axis cuts."""
    if not any(nest.matrix_flops for nest in nests):
        return True
    experts = expert_dims(call, nests) if role is AxisRole.EXPERT else {}
    cut = {p: part.dim for p, part in choice.reads.items() if part.cuts and _is_weight(call, p)}
    joint = rule_of(call.op).joint is JointCut.EXPERTS and choice.means is not Means.EXPERTS
    return not cut if joint else all(experts.get(p) == dim for p, dim in cut.items())


def _is_weight(call: OpCall, position: int) -> bool:
    tensor = call.inputs[position]
    return tensor is not None and tensor.kind is TensorKind.PARAMETER


def expert_dims(call: OpCall, nests: Sequence[LoopNest]) -> dict[int, int]:
    """By position of a weight, its dimension that counts experts: one that the result and all other operands of a
    product have too, or the experts `e` of a mixture in one operator. The channels of a depthwise convolution, which
    sums over a window alone, are no experts."""
    joint, found = rule_of(call.op).joint is JointCut.EXPERTS, dict[int, int]()
    for nest in nests:
        sides = [*nest.reads, *nest.writes]
        summed = {(d.name,) for d in nest.dims if d.kind is DimKind.REDUCED}
        if not joint and not all(summed.intersection(access.dims) for access in nest.reads):
            continue
        for access in (a for a in nest.reads if _is_weight(call, a.position) and (joint or nest.matrix_flops)):
            for dim, names in enumerate(access.dims):
                shared = len(names) == 1 and all(any(names[0] in at for at in other.dims) for other in sides)
                if names == ("e",) if joint else shared:
                    found[access.position] = dim
    return found


def _free_choices(call: OpCall, spec: OpSpec, local: Local, ranks: int, options: Options) -> list[Choice]:
    found = []
    if options.replicate or ranks == 1:
        found.append(Choice(Means.REPEAT, "", {}, {}, Local(local.nests, local.share, (*local.means, Means.REPEAT))))
    if ranks == 1:
        return found
    rule = rule_of(call.op)
    for dim in {d.name: d for nest in local.nests for d in nest.dims}.values():
        if dim.size < 2 or dim.name in rule.uncut or not divides(dim.size, ranks, options.padded):
            continue
        means = Means.CUT
        if dim.kind is DimKind.COUPLED and options.coupled and rule.statistics is not None:
            means = Means.STATISTICS
        elif dim.kind not in (DimKind.PARALLEL, DimKind.REDUCED):
            continue
        if dim.size % ranks and (means is Means.STATISTICS or not evenly_or_alone(local, dim.name, ranks)):
            continue
        if any(not _consistent(call, spec, nest, dim.name, dim.kind, ranks) for nest in local.nests):
            continue
        found += _cut_choice(call, local, (dim.name,), dim.kind, means, ranks)
    if options.coupled and _may_ring(call, local, ranks):
        found += _cut_choice(call, local, ("s", "u"), DimKind.PARALLEL, Means.RING, ranks)
    for row in _dispatched(call, local, ranks) if options.coupled else ():
        found += _cut_choice(call, local, (row, "e"), DimKind.PARALLEL, Means.EXPERTS, ranks)
    if options.partial and rule.linear and all(m in (Means.REPEAT, Means.PARTIAL, Means.CUT) for m in local.means):
        found.append(_pass_partial(local))
    if not options.interleaved:
        return [c for c in found if not _interleaves(c)]
    return found + [v for c in found for n in options.blocks if (v := _interleaved(c, local, n, ranks)) is not None]


def _interleaves(choice: Choice) -> bool:
    return any(part.blocks > 1 for part in (*choice.reads.values(), *choice.writes.values()))


def _interleaved(choice: Choice, local: Local, blocks: int, ranks: int) -> Choice | None:
    """The same cut in an interleaved way: the points of a dimension may be dealt to the ranks in any order."""
    if choice.means not in (Means.CUT, Means.STATISTICS) or _interleaves(choice):
        return None
    size = next(d.size for nest in local.nests for d in nest.dims if d.name == choice.name)
    if size % (blocks * ranks) or not _alone(local, choice.name):
        return None

    def dealt(parts: Mapping[int, Part]) -> dict[int, Part]:
        return {p: Part(part.dim, blocks) if part.cuts else part for p, part in parts.items()}

    return replace(choice, reads=dealt(choice.reads), writes=dealt(choice.writes))


def _cut_choice(
    call: OpCall, local: Local, names: Sequence[str], kind: DimKind, means: Means, ranks: int
) -> list[Choice]:
    """The choice that cuts those dimensions together, none when some operand cannot be cut so."""
    parts = _parts(local.nests, names, kind, rule_of(call.op).whole_reads)
    if parts is None:
        return []
    size = next(d.size for nest in local.nests for d in nest.dims if d.name == names[0])
    share = local.share * _share(local.nests, names, -(-size // ranks) / size)
    nests = local.nests
    for name in names:
        nests = tuple(shrink(nest, name, ranks) for nest in nests)
    label = means.value if means in (Means.RING, Means.EXPERTS) else names[0]
    return [Choice(means, label, *parts, Local(nests, share, (*local.means, means)))]


def splits(nests: Sequence[LoopNest]) -> dict[str, Parts]:
    """Parts of reads and writes when one dimension of an operator's nests is cut, by dimension that allows it.

    Nests of one operator share dimension names and results. A nest without the dimension adds to the result once (a
    bias under a cut of the reduced dimension), so its operands are partial. Left out are cuts that are not one
    contiguous piece of every tensor.
    """
    found = {}
    for dim in {d.name: d for nest in nests for d in nest.dims}.values():
        if dim.kind not in (DimKind.PARALLEL, DimKind.REDUCED) or dim.size < 2:
            continue
        alike = all(nest.dim(dim.name).kind is dim.kind for nest in nests if has(nest, dim.name))
        halo = any(dim.name in access.dims[k] for nest in nests for access in nest.writes for k, _ in access.halo)
        parts = _parts(nests, (dim.name,), dim.kind) if alike and not halo else None
        if parts is not None and not any(part.blocks > 1 for side in parts for part in side.values()):
            found[dim.name] = parts
    return found


def _parts(
    nests: Sequence[LoopNest], names: Sequence[str], kind: DimKind, whole: Set[tuple[int, str]] = frozenset()
) -> Parts | None:
    """Parts of reads and writes when those dimensions are cut together, each access having at most one of them.

    Operands of `whole` (positions and dimensions) are read whole nevertheless.
    """
    reads: dict[int, Part] = {}
    writes: dict[int, Part] = {}
    for nest in nests:
        sizes = {d.name: d.size for d in nest.dims}
        inside = any(has(nest, name) for name in names)
        for found, accesses in ((reads, nest.reads), (writes, nest.writes)):
            for access in accesses:
                cuts = [_part(access, name, sizes) for name in names]
                part = next((c for c in cuts if c != REPLICATED), REPLICATED)
                if found is reads and len(names) == 1 and (access.position, names[0]) in whole:
                    part = REPLICATED
                elif kind is DimKind.REDUCED and part == REPLICATED and (found is writes or not inside):
                    part = PARTIAL
                if part is None or found.setdefault(access.position, part) != part:
                    return None
    return reads, writes


def _part(access: Access, name: str, sizes: Mapping[str, int]) -> Part | None:
    """What a cut of the dimension leaves a rank of a tensor; None when that is no layout."""
    hits = [k for k, names in enumerate(access.dims) if name in names]
    if not hits:
        return REPLICATED
    if len(hits) > 1:
        return None
    names = access.dims[hits[0]]
    blocks = math.prod(sizes[n] for n in names[: names.index(name)])
    return Part(hits[0], blocks) if blocks <= MOST_BLOCKS else None


def shrink(nest: LoopNest, name: str, ranks: int) -> LoopNest:
    """The nest that one rank runs: the dimension's size divided, factors of size 1 out of products."""
    dims = tuple(Dim(d.name, -(-d.size // ranks), d.kind) if d.name == name else d for d in nest.dims)
    ones = {d.name for d in dims if d.size == 1 and d.kind is not DimKind.WHOLE}
    reads, writes = (tuple(_without(a, ones) for a in accesses) for accesses in (nest.reads, nest.writes))
    return LoopNest(dims, reads, writes, nest.matrix_flops, nest.vector_flops)


def _without(access: Access, ones: Set[str]) -> Access:
    """An access without factors of size 1 in products; windows stay."""
    if all(len(names) < 2 or ones.isdisjoint(names) for names in access.dims):
        return access
    windows = {k for k, _ in access.halo}
    kept = tuple(
        names if k in windows or len(names) < 2 else tuple(n for n in names if n not in ones) or names[:1]
        for k, names in enumerate(access.dims)
    )
    return Access(access.position, kept, access.halo)


def _share(nests: Sequence[LoopNest], names: Sequence[str], fraction: float) -> float:
    """Part of the work that a rank does: nests without the dimensions run whole on every rank."""
    work = [nest.matrix_flops + nest.vector_flops for nest in nests]
    if not sum(work):
        return fraction
    inside = [any(has(nest, name) for name in names) for nest in nests]
    return sum(w * (fraction if cut else 1.0) for w, cut in zip(work, inside, strict=True)) / sum(work)


def _consistent(call: OpCall, spec: OpSpec, nest: LoopNest, name: str, kind: DimKind, ranks: int) -> bool:
    """Whether a nest has the dimension in that role, and its windows are cut where its results are."""
    if not has(nest, name):
        return True
    if nest.dim(name).kind is not kind:
        return False
    for access in nest.reads:
        tensor = call.inputs[access.position]
        for k, names in enumerate(access.dims):
            if len(names) < 2 or names[0] != name or tensor is None:
                continue
            halo = dict(access.halo).get(k, 0)
            whole = {d.name: d.size for original in spec.nests for d in original.dims}
            if (halo or math.prod(whole[n] for n in names) != tensor.shape[k]) and not _window_fits(
                call, tensor.shape[k], k - 2, whole[name], nest.dim(name).size, halo, ranks
            ):
                return False
    return True


def _window_fits(call: OpCall, extent: int, spatial: int, results: int, local: int, halo: int, ranks: int) -> bool:
    """As many whole strides of input as results, evenly cut once, and neighbours that hold the whole border."""
    strides = call.attributes.get("strides")
    stride = int(strides[spatial]) if isinstance(strides, tuple) and 0 <= spatial < len(strides) else 1
    once = halo == 0 or local == results
    return once and local % ranks == 0 and extent == results * stride and local // ranks * stride >= halo


def _may_ring(call: OpCall, local: Local, ranks: int) -> bool:
    """Attention over its own steps, without a cache, cut once."""
    if rule_of(call.op).joint is not JointCut.RING or len(local.nests) != 1 or Means.RING in local.means:
        return False
    nest = local.nests[0]
    names = {n for access in (*nest.reads, *nest.writes) for term in access.dims for n in term}
    sizes = {d.name: d.size for d in nest.dims}
    fits = {"s", "u"} <= names and "p" not in names and sizes["s"] == sizes["u"] and sizes["s"] % ranks == 0
    return fits and all("t" not in term for access in nest.writes for term in access.dims)


def _dispatched(call: OpCall, local: Local, ranks: int) -> list[str]:
    """The outermost dimension of a mixture's rows that can be cut evenly together with its experts."""
    if rule_of(call.op).joint is not JointCut.EXPERTS:
        return []
    sizes = {d.name: d.size for d in local.nests[0].dims}
    rows = [name for name in sizes if name.startswith("m") and sizes[name] % ranks == 0]
    return rows[:1] if sizes["e"] % ranks == 0 else []


def _pass_partial(local: Local) -> Choice:
    """Partial operands, partial results: sums commute with the operator."""
    reads = {a.position: PARTIAL for nest in local.nests for a in nest.reads}
    writes = {a.position: PARTIAL for nest in local.nests for a in nest.writes}
    return Choice(
        Means.PARTIAL, "partial", reads, writes, Local(local.nests, local.share, (*local.means, Means.PARTIAL))
    )

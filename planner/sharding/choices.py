"""How one mesh axis can run an operator: cut a dimension of its loop nests, or repeat the work on every rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from planner.graph import TensorKind
from planner.operators import Access, Dim, DimKind, JointCut, LoopNest, OpCall, OpSpec, rule_of
from planner.sharding.layout import PARTIAL, REPLICATED, Part
from planner.sharding.mesh import AxisRole
from planner.sums import float_sum

Parts = tuple[dict[int, Part], dict[int, Part]]
"""Parts of an operator's operands, and of its results, by position."""

MOST_BLOCKS = 8
"""Interleaved cuts of more blocks than this are not considered."""


class SplitKind(StrEnum):
    """The way in which an axis runs an operator."""

    REPEAT = "repeat"
    """Every rank does the same work."""
    CUT = "cut"
    """A parallel or reduced dimension is cut."""
    STATISTICS = "statistics"
    """A coupled dimension (of a softmax, a norm) is cut; its statistics are all-reduced over the ranks."""
    RING = "ring"
    """Queries and keys of an attention are cut together; keys and values are passed around a ring."""
    EXPERTS = "experts"
    """Rows and experts of a mixture are cut together; rows are sent to their experts and back."""
    PARTIAL = "partial"
    """Partial sums of operands give partial sums of results."""


@dataclass(frozen=True, slots=True)
class Options:
    """Splits that searches may use.

    Attributes:
        padded: uneven cuts: every rank works on and holds as much as the largest piece. Padding is zeros, so dimensions
            whose statistics are reduced, and factors of a tensor dimension, are not padded.
        coupled: cuts of coupled dimensions with an exchange of statistics, ring attention, and rows sent to experts.
        partial: partial sums may pass through linear operators.
        replicate: an axis may do the same work on every rank.
        interleaved: interleaved cuts (a fused projection's thirds).
        blocks: numbers of blocks in which plain cuts may be interleaved too, as a neighbouring operator needs it.
        roles: role of each mesh axis; empty where all axes may do anything.
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
        """The axes that deal out samples or steps: weights are replicated along them, but those of experts."""
        return tuple(axis for axis, role in enumerate(self.roles) if role.deals)

    def role(self, axis: int) -> AxisRole:
        """The role of an axis."""
        return self.roles[axis] if self.roles else AxisRole.TENSOR


@dataclass(frozen=True, slots=True)
class LocalNest:
    """The work of one rank after some axes: nests of local sizes, share of the operator's work, kinds of the axes."""

    nests: tuple[LoopNest, ...]
    share: float = 1.0
    kinds: frozenset[SplitKind] = frozenset()

    def then(self, kind: SplitKind) -> LocalNest:
        """The local nest after one more axis, of a kind that does not change the nests."""
        return replace(self, kinds=self.kinds | {kind})


@dataclass(frozen=True, slots=True)
class AxisChoice:
    """How one axis of a strategy runs the operator.

    Attributes:
        kind: how the axis runs the operator.
        name: the dimension that is cut, or the kind for RING, EXPERTS and PARTIAL; "" for REPEAT.
        reads: part of each input by position; inputs that are not listed are replicated.
        writes: part of each output by position.
        left: what one rank runs then.
    """

    kind: SplitKind
    name: str
    reads: Mapping[int, Part]
    writes: Mapping[int, Part]
    left: LocalNest


def has(nest: LoopNest, name: str) -> bool:
    """Whether the nest iterates over that dimension."""
    return any(d.name == name for d in nest.dims)


def divides(size: int, ranks: int, padded: bool) -> bool:
    """Whether a dimension of some size may be cut: evenly, or with padding that leaves no rank empty."""
    return size % ranks == 0 or (padded and -(-size // ranks) * (ranks - 1) < size)


def _alone(local: LocalNest, name: str) -> bool:
    """Whether every tensor dimension that it indexes is indexed by it alone, not as a factor or window."""
    accesses = [a for nest in local.nests for a in (*nest.reads, *nest.writes)]
    return all(len(names) == 1 for a in accesses for names in a.dims if name in names)


def choices(
    call: OpCall, spec: OpSpec, local: LocalNest, ranks: int, options: Options, role: AxisRole = AxisRole.TENSOR
) -> list[AxisChoice]:
    """All ways in which an axis of `ranks` ranks can run what earlier axes left, repeated work first."""
    possible = _free_choices(call, spec, local, ranks, options)
    if not role.deals:
        return possible
    possible = [c for c in possible if _keeps_weights(call, local.nests, c, role)]
    return [c for c in possible if _deals_samples(call, c)] or possible if role is AxisRole.EXPERT else possible


def _deals_samples(call: OpCall, choice: AxisChoice) -> bool:
    """Whether a choice cuts one of the first two dimensions of an activation: samples, or the rows of experts."""
    reads = (part for p, part in choice.reads.items() if not _is_weight(call, p))
    return any(part.dim in (0, 1) for part in (*reads, *choice.writes.values()))


def _keeps_weights(call: OpCall, nests: Sequence[LoopNest], choice: AxisChoice, role: AxisRole) -> bool:
    """Whether a choice replicates the weights of products, but those of experts, which an expert axis cuts."""
    if not any(nest.matrix_flops for nest in nests):
        return True
    experts = expert_dims(call, nests) if role is AxisRole.EXPERT else {}
    cut = {p: part.dim for p, part in choice.reads.items() if part.cuts and _is_weight(call, p)}
    joint = rule_of(call.op).joint is JointCut.EXPERTS and choice.kind is not SplitKind.EXPERTS
    return not cut if joint else all(experts.get(p) == dim for p, dim in cut.items())


def _is_weight(call: OpCall, position: int) -> bool:
    tensor = call.inputs[position]
    return tensor is not None and tensor.kind is TensorKind.PARAMETER


def expert_dims(call: OpCall, nests: Sequence[LoopNest]) -> dict[int, int]:
    """By position of a weight, the dimension that counts experts.

    It is a dimension that the result and all other operands of a product have too, or the dimension `e` of a mixture in
    one operator. The channels of a depthwise convolution, which sums over a window alone, are no experts.
    """
    joint, dim_of = rule_of(call.op).joint is JointCut.EXPERTS, dict[int, int]()
    for nest in nests:
        sides = [*nest.reads, *nest.writes]
        summed = {(d.name,) for d in nest.dims if d.kind is DimKind.REDUCED}
        if not joint and not all(summed.intersection(access.dims) for access in nest.reads):
            continue
        for access in (a for a in nest.reads if _is_weight(call, a.position) and (joint or nest.matrix_flops)):
            for dim, names in enumerate(access.dims):
                shared = len(names) == 1 and all(any(names[0] in at for at in other.dims) for other in sides)
                if names == ("e",) if joint else shared:
                    dim_of[access.position] = dim
    return dim_of


def _free_choices(call: OpCall, spec: OpSpec, local: LocalNest, ranks: int, options: Options) -> list[AxisChoice]:
    choices = []
    if options.replicate or ranks == 1:
        choices.append(AxisChoice(SplitKind.REPEAT, "", {}, {}, local.then(SplitKind.REPEAT)))
    if ranks == 1:
        return choices
    rule = rule_of(call.op)
    for dim in {d.name: d for nest in local.nests for d in nest.dims}.values():
        if dim.size < 2 or dim.name in rule.uncut or not divides(dim.size, ranks, options.padded):
            continue
        split_kind = SplitKind.CUT
        if dim.kind is DimKind.COUPLED and options.coupled and rule.statistics is not None:
            split_kind = SplitKind.STATISTICS
        elif dim.kind not in (DimKind.PARALLEL, DimKind.REDUCED):
            continue
        if dim.size % ranks and (split_kind is SplitKind.STATISTICS or not _alone(local, dim.name)):
            continue
        if any(not _consistent(call, spec, nest, dim.name, dim.kind, ranks) for nest in local.nests):
            continue
        choices += _cut_choice(call, local, (dim.name,), dim.kind, split_kind, ranks)
    if options.coupled and _may_ring(call, local, ranks):
        choices += _cut_choice(call, local, ("s", "u"), DimKind.PARALLEL, SplitKind.RING, ranks)
    for row in _dispatched(call, local, ranks) if options.coupled else ():
        choices += _cut_choice(call, local, (row, "e"), DimKind.PARALLEL, SplitKind.EXPERTS, ranks)
    if options.partial and rule.linear and local.kinds <= {SplitKind.REPEAT, SplitKind.PARTIAL, SplitKind.CUT}:
        choices.append(_pass_partial(local))
    if not options.interleaved:
        return [c for c in choices if not _interleaves(c)]
    return choices + [v for c in choices for n in options.blocks if (v := _interleaved(c, local, n, ranks)) is not None]


def _interleaves(choice: AxisChoice) -> bool:
    return any(part.blocks > 1 for part in (*choice.reads.values(), *choice.writes.values()))


def _interleaved(choice: AxisChoice, local: LocalNest, blocks: int, ranks: int) -> AxisChoice | None:
    """A choice with its cut interleaved in blocks; None where the dimension does not divide into them."""
    if choice.kind not in (SplitKind.CUT, SplitKind.STATISTICS) or _interleaves(choice):
        return None
    size = next(d.size for nest in local.nests for d in nest.dims if d.name == choice.name)
    if size % (blocks * ranks) or not _alone(local, choice.name):
        return None

    def dealt(parts: Mapping[int, Part]) -> dict[int, Part]:
        return {p: Part(part.dim, blocks) if part.cuts else part for p, part in parts.items()}

    return replace(choice, reads=dealt(choice.reads), writes=dealt(choice.writes))


def _cut_choice(
    call: OpCall, local: LocalNest, names: Sequence[str], kind: DimKind, split_kind: SplitKind, ranks: int
) -> list[AxisChoice]:
    """The choice that cuts some dimensions together; empty when an operand cannot be cut so."""
    parts = _parts(local.nests, names, kind, rule_of(call.op).whole_reads)
    if parts is None:
        return []
    size = next(d.size for nest in local.nests for d in nest.dims if d.name == names[0])
    share = local.share * _share(local.nests, names, -(-size // ranks) / size)
    nests = local.nests
    for name in names:
        nests = tuple(shrink(nest, name, ranks) for nest in nests)
    label = split_kind.value if split_kind in (SplitKind.RING, SplitKind.EXPERTS) else names[0]
    return [AxisChoice(split_kind, label, *parts, LocalNest(nests, share, local.kinds | {split_kind}))]


def splits(nests: Sequence[LoopNest]) -> dict[str, Parts]:
    """By dimension that can be cut, the parts of reads and writes when an operator's nests are cut along it.

    Nests of one operator share dimension names and results. A nest without the dimension adds to the result once (a
    bias under a cut of the reduced dimension), so its operands are partial. Cuts that do not leave one contiguous piece
    of every tensor are left out.
    """
    parts_by_dim = {}
    for dim in {d.name: d for nest in nests for d in nest.dims}.values():
        if dim.kind not in (DimKind.PARALLEL, DimKind.REDUCED) or dim.size < 2:
            continue
        same_kind = all(nest.dim(dim.name).kind is dim.kind for nest in nests if has(nest, dim.name))
        halo = any(dim.name in access.dims[k] for nest in nests for access in nest.writes for k, _ in access.halo)
        parts = _parts(nests, (dim.name,), dim.kind) if same_kind and not halo else None
        if parts is not None and not any(part.blocks > 1 for side in parts for part in side.values()):
            parts_by_dim[dim.name] = parts
    return parts_by_dim


def _parts(
    nests: Sequence[LoopNest], names: Sequence[str], kind: DimKind, whole: Set[tuple[int, str]] = frozenset()
) -> Parts | None:
    """Parts of reads and writes when some dimensions are cut together; each access has at most one of them.

    Operands in `whole` (positions and dimensions) are read in full nevertheless. None when that is no layout.
    """
    reads: dict[int, Part] = {}
    writes: dict[int, Part] = {}
    for nest in nests:
        sizes = {d.name: d.size for d in nest.dims}
        inside = any(has(nest, name) for name in names)
        for side, accesses in ((reads, nest.reads), (writes, nest.writes)):
            for access in accesses:
                cuts = [_part(access, name, sizes) for name in names]
                part = next((c for c in cuts if c != REPLICATED), REPLICATED)
                if side is reads and len(names) == 1 and (access.position, names[0]) in whole:
                    part = REPLICATED
                elif kind is DimKind.REDUCED and part == REPLICATED and (side is writes or not inside):
                    part = PARTIAL
                if part is None or side.setdefault(access.position, part) != part:
                    return None
    return reads, writes


def _part(access: Access, name: str, sizes: Mapping[str, int]) -> Part | None:
    """The part of a tensor on a rank when the dimension is cut; None when that is no layout."""
    hits = [k for k, names in enumerate(access.dims) if name in names]
    if not hits:
        return REPLICATED
    if len(hits) > 1:
        return None
    names = access.dims[hits[0]]
    blocks = math.prod(sizes[n] for n in names[: names.index(name)])
    return Part(hits[0], blocks) if blocks <= MOST_BLOCKS else None


def shrink(nest: LoopNest, name: str, ranks: int) -> LoopNest:
    """The nest that one rank runs: the size of the dimension is divided, and factors of size 1 leave products."""
    dims = tuple(Dim(d.name, -(-d.size // ranks), d.kind) if d.name == name else d for d in nest.dims)
    ones = {d.name for d in dims if d.size == 1 and d.kind is not DimKind.WHOLE}
    reads, writes = (tuple(_without(a, ones) for a in accesses) for accesses in (nest.reads, nest.writes))
    return LoopNest(dims, reads, writes, nest.matrix_flops, nest.vector_flops)


def _without(access: Access, ones: Set[str]) -> Access:
    """An access without the factors of size 1 in products; windows stay."""
    if all(len(names) < 2 or ones.isdisjoint(names) for names in access.dims):
        return access
    windows = {k for k, _ in access.halo}
    kept = tuple(
        names if k in windows or len(names) < 2 else tuple(n for n in names if n not in ones) or names[:1]
        for k, names in enumerate(access.dims)
    )
    return Access(access.position, kept, access.halo)


def _share(nests: Sequence[LoopNest], names: Sequence[str], fraction: float) -> float:
    """The fraction of the work that a rank does; nests without the dimensions run in full on every rank."""
    work = [nest.matrix_flops + nest.vector_flops for nest in nests]
    if not float_sum(work):
        return fraction
    inside = [any(has(nest, name) for name in names) for nest in nests]
    return float_sum(w * (fraction if cut else 1.0) for w, cut in zip(work, inside, strict=True)) / float_sum(work)


def _consistent(call: OpCall, spec: OpSpec, nest: LoopNest, name: str, kind: DimKind, ranks: int) -> bool:
    """Whether the dimension has the same kind in a nest, and its windows are cut where its results are."""
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
            full_sizes = {d.name: d.size for original in spec.nests for d in original.dims}
            if (halo or math.prod(full_sizes[n] for n in names) != tensor.shape[k]) and not _window_fits(
                call, tensor.shape[k], k - 2, full_sizes[name], nest.dim(name).size, halo, ranks
            ):
                return False
    return True


def _window_fits(call: OpCall, extent: int, spatial: int, results: int, local: int, halo: int, ranks: int) -> bool:
    """Whether a window can be cut: one stride of input a result, cut evenly and once, borders within a neighbour."""
    strides = call.attributes.get("strides")
    stride = int(strides[spatial]) if isinstance(strides, tuple) and 0 <= spatial < len(strides) else 1
    once = halo == 0 or local == results
    return once and local % ranks == 0 and extent == results * stride and local // ranks * stride >= halo


def _may_ring(call: OpCall, local: LocalNest, ranks: int) -> bool:
    """Whether an operator is self-attention without a cache whose sequence is not yet cut in a ring."""
    if rule_of(call.op).joint is not JointCut.RING or len(local.nests) != 1 or SplitKind.RING in local.kinds:
        return False
    nest = local.nests[0]
    names = {n for access in (*nest.reads, *nest.writes) for term in access.dims for n in term}
    sizes = {d.name: d.size for d in nest.dims}
    fits = {"s", "u"} <= names and "p" not in names and sizes["s"] == sizes["u"] and sizes["s"] % ranks == 0
    return fits and all("t" not in term for access in nest.writes for term in access.dims)


def _dispatched(call: OpCall, local: LocalNest, ranks: int) -> list[str]:
    """The outermost dimension of a mixture's rows that divides evenly together with its experts; empty for none."""
    if rule_of(call.op).joint is not JointCut.EXPERTS:
        return []
    sizes = {d.name: d.size for d in local.nests[0].dims}
    rows = [name for name in sizes if name.startswith("m") and sizes[name] % ranks == 0]
    return rows[:1] if sizes["e"] % ranks == 0 else []


def _pass_partial(local: LocalNest) -> AxisChoice:
    """Partial operands and results: the operator is linear, so sums commute with it."""
    reads = {a.position: PARTIAL for nest in local.nests for a in nest.reads}
    writes = {a.position: PARTIAL for nest in local.nests for a in nest.writes}
    return AxisChoice(SplitKind.PARTIAL, "partial", reads, writes, local.then(SplitKind.PARTIAL))

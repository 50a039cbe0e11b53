"""Views and copies: reshapes cost nothing, everything that moves elements is one read and one write.

A transpose, slice, split or expand is only a strided view where the framework runs eagerly; the copy charged here is
the one that its reader makes. `details["alias"]` marks them: their results own no storage that backward could keep.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from planner.operators.assemble import elements_like, plumbing, streaming, traffic, view
from planner.operators.nest import dim_names, loop_nest
from planner.operators.rules.elementwise import broadcast_nest
from planner.operators.site import Site, rule
from planner.operators.types import Access, Dim, DimKind, LoopNest, OpSpec

ALIAS = {"alias": 1.0}


def reshape_nest(before: tuple[int, ...], after: tuple[int, ...]) -> LoopNest:
    """The common factors of two shapes with equal numbers of elements, row-major.

    `[b*s, h] -> [b, s, h]` gives dims b, s, h with the first tensor's dimension 0 their product. Where the sizes share
    no factorisation (6 x 4 to 8 x 3) the dimensions concerned cannot be split.
    """
    dims: list[Dim] = []
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    i = j = 0
    a, b = (before[0] if before else 1), (after[0] if after else 1)
    while i < len(before) and j < len(after) and 0 not in before:
        factor = min(a, b)
        if max(a, b) % factor:
            break
        if factor > 1:
            name = f"f{len(dims)}"
            dims.append(Dim(name, factor, DimKind.PARALLEL))
            left[i].append(name)
            right[j].append(name)
        a, b = a // factor, b // factor
        if a == 1:
            i += 1
            a = before[i] if i < len(before) else 1
        if b == 1:
            j += 1
            b = after[j] if j < len(after) else 1
    reads = Access(0, tuple(tuple(names) for names in left))
    writes = Access(0, tuple(tuple(names) for names in right))
    # a dimension whose factors were not all found must not be split by those that were
    broken = {
        name
        for names, size in [*zip(left, before, strict=True), *zip(right, after, strict=True)]
        if math.prod(d.size for d in dims if d.name in names) != size
        for name in names
    }
    kept = tuple(Dim(d.name, d.size, DimKind.WHOLE if d.name in broken else d.kind) for d in dims)
    return LoopNest(kept, (reads,), (writes,))


@rule("Reshape", "Squeeze", "Unsqueeze", "Flatten", ports=(0,))
def reshape(site: Site) -> OpSpec:
    """Another shape over the same elements."""
    return view(site, reshape_nest(site.input(0).shape, site.output().shape))


@rule("Identity", "BitCast", "Optional", "OptionalGetElement", ports=(0,))
def identity(site: Site) -> OpSpec:
    """The same tensor under another name."""
    if site.has(0) and site.input(0).shape == site.output().shape:
        return view(site, broadcast_nest(site, (0,), 0.0))
    return view(site)


def aligned_nest(site: Site, positions: Collection[int], whole: Collection[int] = ()) -> LoopNest:
    """Tensors of equal rank whose dimensions correspond; those listed, or of unequal size, cannot be split."""
    rank = len(site.output().shape)
    outputs = [p for p in range(len(site.call.outputs)) if site.has_output(p)]
    shapes = [site.input(p).shape for p in positions] + [site.output(p).shape for p in outputs]
    kinds: dict[str, DimKind] = {}
    columns: list[list[str]] = [[] for _ in shapes]
    for k in range(rank):
        shared = k not in whole and len({shape[k] for shape in shapes}) == 1
        for index, column in enumerate(columns):
            name = f"d{k}" if shared else f"w{k}_{index}"
            column.append(name)
            if not shared:
                kinds[name] = DimKind.WHOLE
    lines = [" ".join(column) for column in columns]
    count = len(list(positions))
    text = f"{', '.join(lines[:count])} -> {', '.join(lines[count:])}"
    return loop_nest(text, site.reads(*positions), site.writes(*outputs), kinds=kinds)


def _result_only(site: Site) -> OpSpec:
    """Reads as many elements as it writes, forward and backward."""
    same_rank = all(len(t.shape) == len(site.input(0).shape) for t in site.results())
    nest = aligned_nest(site, (0,)) if same_rank else LoopNest((), (), ())
    moved = traffic(*site.results())
    for result in site.results():
        moved += elements_like(site.input(0), result.elements)
    back = moved + elements_like(site.input(0), max(0, site.input(0).elements - moved.float_elements / 2))
    return streaming(site, nest, forward=moved, backward=back, extra=ALIAS)


rule("Slice", "CenterCropPad", "com.microsoft.DynamicSlice", ports=(0,))(_result_only)


@rule("Transpose", ports=(0,))
def transpose(site: Site) -> OpSpec:
    """Dimensions in another order; moving only dimensions of size 1 moves nothing."""
    shape = site.input(0).shape
    rank = len(shape)
    order = site.ints("perm", tuple(reversed(range(rank))))
    names = dim_names("d", rank)
    nest = loop_nest(f"{' '.join(names)} -> {' '.join(names[k] for k in order)}", site.reads(0), site.writes(0))
    moved = [k for k in order if shape[k] != 1]
    if moved == sorted(moved):
        return view(site, nest)
    return streaming(site, nest, extra=ALIAS)


@rule("Concat")
def concat(site: Site) -> OpSpec:
    """Tensors one after the other along an axis."""
    positions = tuple(p for p in range(len(site.call.inputs)) if site.has(p))
    axis = site.axis("axis", 0, len(site.output().shape))
    return streaming(site, aligned_nest(site, positions, (axis,)), backward_kernels=max(1, sum(site.needs)))


@rule("Split", "SplitToSequence", ports=(0,))
def split(site: Site) -> OpSpec:
    """A tensor cut along an axis."""
    if any(len(t.shape) != len(site.input(0).shape) for t in site.results()):
        return streaming(site, LoopNest((), (), ()), extra=ALIAS)
    axis = site.axis("axis", 0, len(site.input(0).shape))
    return streaming(site, aligned_nest(site, (0,), (axis,)), kernels=len(site.results()), extra=ALIAS)


@rule("Expand", ports=(0,))
def expand(site: Site) -> OpSpec:
    """Dimensions of size 1 repeated; backward sums them."""
    if site.input(0).elements == site.output().elements and len(site.input(0).shape) == len(site.output().shape):
        return view(site, broadcast_nest(site, (0,), 0.0))
    return streaming(site, broadcast_nest(site, (0,), 0.0), backward_flops=float(site.output().elements), extra=ALIAS)


@rule("Tile", ports=(0,))
def tile(site: Site) -> OpSpec:
    """A tensor repeated; backward sums the repeats."""
    return streaming(site, aligned_nest(site, (0,)), backward_flops=float(site.output().elements))


@rule("Pad", "ReverseSequence", "Trilu", "com.microsoft.Trilu", ports=(0,))
def pad(site: Site) -> OpSpec:
    """A copy with a border, in another order, or with a triangle blanked."""
    whole = {"Trilu": (-2, -1), "ReverseSequence": (0, 1)}.get(site.call.op.split(".")[-1], ())
    rank = len(site.output().shape)
    return streaming(site, aligned_nest(site, (0,), [k % rank for k in whole]))


@rule("SpaceToDepth", "DepthToSpace", ports=(0,))
def block_rearrange(site: Site) -> OpSpec:
    """Blocks of space to channels and back; a copy that only the batch can be split of."""
    names = "n w1 w2 w3 -> n v1 v2 v3"
    kinds = dict.fromkeys(("w1", "w2", "w3", "v1", "v2", "v3"), DimKind.WHOLE)
    return streaming(site, loop_nest(names, site.reads(0), site.writes(0), kinds=kinds))


RESAMPLE_FLOPS = {"nearest": 0.0, "linear": 7.0, "cubic": 35.0}
"""Per result element of a two-dimensional resize."""


@rule("Resize", "Upsample", ports=(0,))
def resize(site: Site) -> OpSpec:
    """Resampling of space; resized dimensions are not split."""
    flops = RESAMPLE_FLOPS.get(site.str_attribute("mode", "nearest"), 7.0) * site.output().elements
    base = aligned_nest(site, (0,))
    nest = LoopNest(base.dims, base.reads, base.writes, vector_flops=flops)
    return streaming(site, nest, backward_flops=flops)


@rule("Cast", "CastLike", ports=(0,))
def cast(site: Site) -> OpSpec:
    """Another element type; a cast to the same type is a view."""
    nest = broadcast_nest(site, (0,), 0.0)
    if site.input(0).dtype is site.output().dtype:
        return view(site, nest)
    moved = traffic(site.input(0), site.output())
    return streaming(site, nest, forward=moved, backward=moved)


@rule("Shape", "Size", "SequenceLength", "OptionalHasElement", "Constant", "SequenceEmpty", ports=())
def shape_arithmetic(site: Site) -> OpSpec:
    """What a framework knows without asking the device."""
    return plumbing(site)


@rule("SequenceConstruct", "SequenceAt", "SequenceErase", "SequenceInsert")
def container(site: Site) -> OpSpec:
    """Lists of tensors: references change hands, no element moves."""
    return plumbing(site)


@rule("ConcatFromSequence")
def concat_sequence(site: Site) -> OpSpec:
    """The tensors of a list one after the other: a copy of the result's size."""
    moved = traffic(site.output()) * 2.0
    return streaming(site, LoopNest((), (), ()), forward=moved, backward=moved)

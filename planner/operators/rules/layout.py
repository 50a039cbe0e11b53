"""Views and copies: reshapes cost nothing, everything that moves elements is one read and one write.

A transpose, slice, split or expand is only a strided view where the framework runs eagerly; the copy charged here is
the one that its reader makes. `details["alias"]` marks them: their results own no storage that backward could keep.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from planner.graph import Node
from planner.operators.assemble import ALIAS, elements_like, plumbing, streaming, traffic, view
from planner.operators.entry import Array, OpCall, Rule, as_first, permutation
from planner.operators.flow import BatchFactor, Flow, along_nests, places
from planner.operators.rules.elementwise import broadcast_nest
from planner.operators.storage import reshaped_strides
from planner.operators.types import Access, Dim, DimKind, LoopNest, OpSpec


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


def _reshape_travel(flow: Flow, i: int, node: Node) -> None:
    """The same elements in row-major order: the batch keeps the number of elements that lie below it.

    Where several dimensions fit, one that a reader has required comes first, then one that is exactly the batch, then
    those that the reshape changes, then the one that it leaves open, then the leftmost; the others are tried where that
    turns out wrong.
    """
    source, output = flow.shape(node.inputs[0]), flow.shape(node.outputs[0])
    target = flow.call(i).constant_ints(1) or ()
    left_open = target.index(-1) if len(target) == len(output) and -1 in target else None
    result: list[BatchFactor | None] = [None] * len(output)
    for d, mark in enumerate(flow.of(node.inputs[0])):
        if mark is None:
            continue
        below = mark.inner * math.prod(source[d + 1 :])
        fitting = [at for at in places(below, flow.batch, output) if result[at[0]] is None]
        if not fitting:
            raise flow.fail(i, f"mixes the batch with other dimensions: {list(source)} -> {list(output)}")
        required = [at for at in fitting if flow.of(node.outputs[0])[at[0]] == at[1]]
        alike = next((k for k in range(d) if source[k] != output[k]), d) if len(output) > d else 0
        fitting.sort(key=lambda at: (at[1] != BatchFactor(), at[0] < alike, at[0] != left_open))
        dim, placed = required[0] if required else flow.guess((source, d, mark, output, left_open), fitting)
        result[dim] = placed
    flow.set(node.outputs[0], result)
    flow.note_shape(i, 1, node.outputs[0])


def _squeeze_travel(flow: Flow, i: int, node: Node) -> None:
    """Dimensions of size 1 removed."""
    shape, marks = flow.shape(node.inputs[0]), flow.of(node.inputs[0])
    axes = flow.call(i).axes("axes", 1, len(shape))
    gone = axes if axes is not None else tuple(d for d, size in enumerate(shape) if size == 1)
    if any(marks[d] for d in gone):
        raise flow.fail(i, "removes the batch dimension, which works for one sample only")
    flow.set(node.outputs[0], [m for d, m in enumerate(marks) if d not in gone])


def _unsqueeze_travel(flow: Flow, i: int, node: Node) -> None:
    """Dimensions of size 1 inserted; where they are computed at run time, the elements stay in row-major order."""
    marks = list(flow.of(node.inputs[0]))
    axes = flow.call(i).axes("axes", 1, len(flow.shape(node.outputs[0])))
    if axes is None:
        _reshape_travel(flow, i, node)
        return
    for axis in axes:
        marks.insert(axis, None)
    flow.set(node.outputs[0], marks)


def _unsqueezed(x: Array, axes: Any) -> Array:  # noqa: ANN401
    return np.expand_dims(x, tuple(np.ravel(axes).tolist()))


def _reshape_strides(call: OpCall, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    return reshaped_strides(call.input(0).shape, strides, call.output().shape)


_VIEW = Rule(ports=(0,), strides=_reshape_strides, hands_on=True, values=(1,), linear=True)


@replace(_VIEW, travel=_reshape_travel, folds=True).of("Reshape")
@replace(_VIEW, travel=_reshape_travel, folds=True).of("Flatten")
@replace(_VIEW, travel=_squeeze_travel, folds=True).of("Squeeze")
@replace(_VIEW, travel=_unsqueeze_travel, folds=True, plain=_unsqueezed).of("Unsqueeze")
def reshape(call: OpCall) -> OpSpec:
    """Another shape over the same elements."""
    return view(call, reshape_nest(call.input(0).shape, call.output().shape))


def _same_strides(call: OpCall, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    return strides if len(call.input(0).shape) == len(call.results()[0].shape) else None


@Rule(ports=(0,), folds=True, strides=_same_strides, hands_on=True, linear=True).of("Identity")
@Rule(ports=(0,)).of("BitCast", "Optional", "OptionalGetElement")
def identity(call: OpCall) -> OpSpec:
    """The same tensor under another name."""
    if call.has(0) and call.input(0).shape == call.output().shape:
        return view(call, broadcast_nest(call, (0,), 0.0))
    return view(call)


def aligned_nest(call: OpCall, positions: Collection[int], whole: Collection[int] = ()) -> LoopNest:
    """Tensors of equal rank whose dimensions correspond; those listed, or of unequal size, cannot be split.

    A listed one along which a tensor is cut into equal parts, or made of them, has the part as a dimension of its own.
    A fused query-key-value projection is followed by a `Split` into thirds: `b s (part d) -> b s d, b s d, b s d` says
    that d may be cut if the input is cut in an interleaved way.
    """
    outputs = [p for p in range(len(call.outputs)) if call.has_output(p)]
    sides = [call.input(p).shape for p in positions], [call.output(p).shape for p in outputs]
    shapes, (few, many) = [*sides[0], *sides[1]], sorted(sides, key=len)
    shared = [len({shape[k] for shape in shapes}) == 1 for k in range(len(call.output().shape))]
    columns = [[f"d{k}" if alike else f"w{k}_{i}" for k, alike in enumerate(shared)] for i in range(len(shapes))]
    fixed = {name for column in columns for k, name in enumerate(column) if not shared[k] or k in whole}
    sizes: dict[str, int] = {}
    for k in whole:
        if {shape[k] * len(many) for shape in many} == {few[0][k]} and not shared[k]:
            sizes = {"part": len(many), f"d{k}": many[0][k]}
            for column, shape in zip(columns, shapes, strict=True):
                column[k] = f"(part d{k})" if shape == few[0] else f"d{k}"
    lines = [f"{p}:{' '.join(column)}" for p, column in zip((*positions, *outputs), columns, strict=True)]
    left, right = ", ".join(lines[: len(positions)]), ", ".join(lines[len(positions) :])
    return call.nest(f"{left} -> {right}", sizes=sizes, whole=" ".join({*fixed, "part"}))


def _result_only(call: OpCall) -> OpSpec:
    """Reads as many elements as it writes, forward and backward."""
    same_rank = all(len(t.shape) == len(call.input(0).shape) for t in call.results())
    nest = aligned_nest(call, (0,)) if same_rank else LoopNest((), (), ())
    moved = traffic(*call.results())
    for result in call.results():
        moved += elements_like(call.input(0), result.elements)
    back = moved + elements_like(call.input(0), max(0, call.input(0).elements - moved.float_elements / 2))
    return streaming(call, nest, forward=moved, backward=back, extra=ALIAS)


def _slice_travel(flow: Flow, i: int, node: Node) -> None:
    """A range along some axes; along the batch only all of it, or the first rows, several for each of many samples."""
    name, output = node.inputs[0], node.outputs[0]
    source, result, marks, call = flow.shape(name), flow.shape(output), list(flow.of(name)), flow.call(i)
    starts, ends, axes = (call.constant_ints(position) for position in (1, 2, 3))
    along = [a % len(marks) for a in axes] if axes is not None else list(range(len(ends or ())))
    for d, (mark, a, b) in enumerate(zip(marks, source, result, strict=True)):
        if mark is not None and a != b:
            first = d in along and starts is not None and starts[along.index(d)] == 0
            if not first or flow.batch == 1 or b % flow.batch:
                raise flow.fail(i, f"takes {b} of {a} along dimension {d}, which follows the batch")
            marks[d] = BatchFactor(1, b // flow.batch)
    flow.set(output, marks)
    if ends is not None and any(marks):
        sizes = zip(along, ends, strict=True)
        flow.edit(i, 2, [marks[d] is not None and end in (source[d], result[d]) for d, end in sizes])


Rule(
    ports=(0,),
    travel=_slice_travel,
    folds=True,
    strides=_same_strides,
    rearranges=True,
    values=(1, 2, 3, 4),
    linear=True,
).register("Slice", build=_result_only)
Rule(ports=(0,), values=(1,)).register("CenterCropPad", build=_result_only)


def _transposed_strides(call: OpCall, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    return tuple(strides[p] for p in permutation(call.attributes, len(strides)))


@Rule(ports=(0,), folds=True, strides=_transposed_strides, rearranges=True, linear=True).of("Transpose")
def transpose(call: OpCall) -> OpSpec:
    """Dimensions in another order; moving only dimensions of size 1 moves nothing."""
    shape = call.input(0).shape
    rank = len(shape)
    order = permutation(call.attributes, rank)
    nest = call.nest(f"d.. -> {' '.join(f'd{k % rank}' for k in order)}")
    moved = [k for k in order if shape[k] != 1]
    if moved == sorted(moved):
        return view(call, nest)
    return streaming(call, nest, extra=ALIAS)


def _concat_travel(flow: Flow, i: int, node: Node) -> None:
    """Joined along an axis; along the batch only when every part follows it."""
    names = [n for n in node.inputs if n]
    rank = len(flow.shape(names[0]))
    axis = flow.call(i).axis("axis", 0, rank)
    parts = [flow.of(name)[axis] for name in names]
    if any(parts) and not all(parts):
        raise flow.fail(i, "joins along the batch with a part that does not follow it")
    marks: list[BatchFactor | None] = [
        flow.share(i, [(n, d) for n in names]) if d != axis else None for d in range(rank)
    ]
    if any(parts):
        marks[axis] = BatchFactor(flow.shape(node.outputs[0])[axis] // flow.batch, 1)
    flow.set(node.outputs[0], marks)


def _concatenated(*parts: Array, axis: int) -> Array:
    return np.concatenate(parts, axis)


@Rule(travel=_concat_travel, folds=True, plain=_concatenated, linear=True).of("Concat")
def concat(call: OpCall) -> OpSpec:
    """Tensors one after the other along an axis."""
    positions = tuple(p for p in range(len(call.inputs)) if call.has(p))
    axis = call.axis("axis", 0, len(call.output().shape))
    return streaming(call, aligned_nest(call, positions, (axis,)), backward_kernels=max(1, sum(call.needs)))


@Rule(
    ports=(0,),
    folds=True,
    strides=_same_strides,
    rearranges=True,
    travel=partial(along_nests, refusal="cuts the batch in parts of fixed size"),
    values=(1,),
    linear=True,
).of("Split", "SplitToSequence")
def split(call: OpCall) -> OpSpec:
    """A tensor cut along an axis."""
    if any(len(t.shape) != len(call.input(0).shape) for t in call.results()):
        return streaming(call, LoopNest((), (), ()), extra=ALIAS)
    axis = call.axis("axis", 0, len(call.input(0).shape))
    return streaming(call, aligned_nest(call, (0,), (axis,)), kernels=len(call.results()), extra=ALIAS)


def _expand_travel(flow: Flow, i: int, node: Node) -> None:
    """Broadcast to a fixed shape."""
    marks = flow.of(node.inputs[0])
    lead = len(flow.shape(node.outputs[0])) - len(marks)
    flow.set(node.outputs[0], [*[None] * lead, *marks])
    flow.note_shape(i, 1, node.outputs[0])


def _expanded_strides(call: OpCall, strides: tuple[int, ...]) -> tuple[int, ...] | None:
    source, result = call.input(0).shape, call.output().shape
    lead = len(result) - len(source)
    inner = (s if a == b else 0 for s, a, b in zip(strides, source, result[lead:], strict=True))
    return (*((0,) * lead), *inner)


@Rule(
    ports=(0,),
    travel=_expand_travel,
    folds=True,
    strides=_expanded_strides,
    hands_on=True,
    values=(1,),
    linear=True,
).of("Expand")
def expand(call: OpCall) -> OpSpec:
    """Dimensions of size 1 repeated; backward sums them."""
    if call.input(0).elements == call.output().elements and len(call.input(0).shape) == len(call.output().shape):
        return view(call, broadcast_nest(call, (0,), 0.0))
    return streaming(call, broadcast_nest(call, (0,), 0.0), backward_flops=float(call.output().elements), extra=ALIAS)


def _tile_travel(flow: Flow, i: int, node: Node) -> None:
    """Repeated along each dimension."""
    source, output = flow.shape(node.inputs[0]), flow.shape(node.outputs[0])
    marks = list(flow.of(node.inputs[0]))
    for d, (mark, a, b) in enumerate(zip(marks, source, output, strict=True)):
        if mark is not None:
            marks[d] = BatchFactor(mark.outer * (b // a), mark.inner)
    flow.set(node.outputs[0], marks)


@Rule(ports=(0,), travel=_tile_travel, folds=True, hands_on=True, values=(1,)).of("Tile")
def tile(call: OpCall) -> OpSpec:
    """A tensor repeated; backward sums the repeats."""
    return streaming(call, aligned_nest(call, (0,)), backward_flops=float(call.output().elements))


@Rule(ports=(0,), rearranges=True, values=(1, 3)).of("Pad")
@Rule(ports=(0,)).of("ReverseSequence")
@Rule(ports=(0,), folds=True, infer=as_first, values=(1,)).of("Trilu", "com.microsoft.Trilu")
def pad(call: OpCall) -> OpSpec:
    """A copy with a border, in another order, or with a triangle blanked."""
    whole = {"Trilu": (-2, -1), "ReverseSequence": (0, 1)}.get(call.op.split(".")[-1], ())
    rank = len(call.output().shape)
    return streaming(call, aligned_nest(call, (0,), [k % rank for k in whole]))


@Rule(ports=(0,)).of("SpaceToDepth", "DepthToSpace")
def block_rearrange(call: OpCall) -> OpSpec:
    """Blocks of space to channels and back; a copy that only the batch can be split of."""
    return streaming(call, call.nest("n w1 w2 w3 -> n v1 v2 v3", whole="w1 w2 w3 v1 v2 v3"))


RESAMPLE_FLOPS = {"nearest": 0.0, "linear": 7.0, "cubic": 35.0}
"""Per result element of a two-dimensional resize."""


def _resize_travel(flow: Flow, i: int, node: Node) -> None:
    """Spatial sizes change, the batch stays."""
    along_nests(flow, i, node)
    flow.note_shape(i, 3, node.outputs[0])


@Rule(ports=(0,), travel=_resize_travel, values=(1, 2, 3)).of("Resize")
@Rule(ports=(0,), values=(1,)).of("Upsample")
def resize(call: OpCall) -> OpSpec:
    """Resampling of space; resized dimensions are not split."""
    flops = RESAMPLE_FLOPS.get(call.str_attribute("mode", "nearest"), 7.0) * call.output().elements
    base = aligned_nest(call, (0,))
    nest = LoopNest(base.dims, base.reads, base.writes, vector_flops=flops)
    return streaming(call, nest, backward_flops=flops)


_CAST = Rule(ports=(0,), folds=True, hands_on=True)


@replace(_CAST, keeps_layout=True, linear=True).of("Cast")
@_CAST.of("CastLike")
def cast(call: OpCall) -> OpSpec:
    """Another element type; a cast to the same type is a view."""
    nest = broadcast_nest(call, (0,), 0.0)
    if call.input(0).dtype is call.output().dtype:
        return view(call, nest)
    moved = traffic(call.input(0), call.output())
    return streaming(call, nest, forward=moved, backward=moved)


@Rule(ports=()).of("Shape", "Size", "SequenceLength", "OptionalHasElement", "Constant", "SequenceEmpty")
def shape_arithmetic(call: OpCall) -> OpSpec:
    """What a framework knows without asking the device."""
    return plumbing(call)


@Rule(values=(1,)).of("SequenceAt", "SequenceConstruct", "SequenceErase", "SequenceInsert")
def container(call: OpCall) -> OpSpec:
    """Lists of tensors: references change hands, no element moves."""
    return plumbing(call)


@Rule().of("ConcatFromSequence")
def concat_sequence(call: OpCall) -> OpSpec:
    """The tensors of a list one after the other: a copy of the result's size."""
    moved = traffic(call.output()) * 2.0
    return streaming(call, LoopNest((), (), ()), forward=moved, backward=moved)

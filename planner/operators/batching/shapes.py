"""How the batch travels through changes of shape: dimensions moved, merged, cut, joined and repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.graph import Node
from planner.operators.batching.flow import Flow, Mark
from planner.operators.batching.operands import axes_of, axis_of, tensor_of


def transpose(flow: Flow, i: int, node: Node) -> None:
    """Dimensions permuted."""
    marks = flow.of(node.inputs[0])
    perm = node.attributes.get("perm")
    order = tuple(int(p) for p in perm) if isinstance(perm, tuple) else tuple(reversed(range(len(marks))))
    flow.set(node.outputs[0], [marks[p] for p in order])


def reshape(flow: Flow, i: int, node: Node) -> None:
    """The same elements in row-major order: the batch keeps the number of elements that lie below it.

    Where several dimensions fit, one that is exactly the batch comes first, then the one that the reshape leaves open,
    then the leftmost; the others are tried where that turns out wrong.
    """
    source, output = tensor_of(flow, node.inputs[0]), tensor_of(flow, node.outputs[0])
    result: list[Mark | None] = [None] * len(output.shape)
    for d, mark in enumerate(flow.of(source.name)):
        if mark is None:
            continue
        below = mark.inner * math.prod(source.shape[d + 1 :])
        fitting = [at for at in places(below, flow.batch, output.shape) if result[at[0]] is None]
        if not fitting:
            raise flow.fail(i, f"mixes the batch with other dimensions: {list(source.shape)} -> {list(output.shape)}")
        left_open = _open_dimension(flow, node, output.name)
        fitting.sort(key=lambda at: (at[1] != Mark(), at[0] != left_open))
        dim, placed = flow.guess((source.shape, d, mark, output.shape, left_open), fitting)
        result[dim] = placed
    flow.set(output.name, result)
    if node.op == "Reshape":
        flow.note_shape(i, 1, output.name)


def _open_dimension(flow: Flow, node: Node, output: str) -> int | None:
    """The dimension that a reshape leaves open (-1), where its target is known."""
    target = flow.graph.constants.get(node.inputs[1]) if node.op == "Reshape" else None
    if target is None or len(target) != len(tensor_of(flow, output).shape) or -1 not in target:
        return None
    return target.index(-1)


def places(below: int, batch: int, shape: Sequence[int]) -> list[tuple[int, Mark]]:
    """The dimensions of a row-major shape that can hold a factor `batch` with `below` elements under it, in order.

    Above 1 at most one dimension fits, up to dimensions of size 1. A batch of 1 fits in many places.
    """
    fitting: list[tuple[int, Mark]] = []
    suffix = math.prod(shape)
    for d, size in enumerate(shape):
        suffix = suffix // size if size else 0
        if not suffix or below % suffix:
            continue
        inner = below // suffix
        if size % (inner * batch) == 0 and inner * batch <= size:
            fitting.append((d, Mark(size // (inner * batch), inner)))
    return fitting


def squeeze(flow: Flow, i: int, node: Node) -> None:
    """Dimensions of size 1 removed."""
    shape, marks = tensor_of(flow, node.inputs[0]).shape, flow.of(node.inputs[0])
    axes = axes_of(flow, node, 1, len(shape))
    gone = axes if axes is not None else tuple(d for d, size in enumerate(shape) if size == 1)
    if any(marks[d] for d in gone):
        raise flow.fail(i, "removes the batch dimension, which works for one sample only")
    flow.set(node.outputs[0], [m for d, m in enumerate(marks) if d not in gone])


def unsqueeze(flow: Flow, i: int, node: Node) -> None:
    """Dimensions of size 1 inserted."""
    marks = list(flow.of(node.inputs[0]))
    axes = axes_of(flow, node, 1, len(tensor_of(flow, node.outputs[0]).shape)) or ()
    for axis in axes:
        marks.insert(axis, None)
    flow.set(node.outputs[0], marks)


def concat(flow: Flow, i: int, node: Node) -> None:
    """Joined along an axis; along the batch only when every part follows it."""
    names = [n for n in node.inputs if n]
    rank = len(tensor_of(flow, names[0]).shape)
    axis = axis_of(node, 0, rank)
    merged: list[Mark | None] = [None] * rank
    for d in range(rank):
        found = [flow.of(n)[d] for n in names]
        if d != axis:
            merged[d] = next((m for m in found if m is not None), None)
            mark = merged[d]
            for name in names:
                if mark is not None:
                    flow.require(i, name, d, mark)
        elif any(found):
            if not all(found):
                raise flow.fail(i, "joins along the batch with a part that does not follow it")
            merged[d] = Mark(tensor_of(flow, node.outputs[0]).shape[d] // flow.batch, 1)
    flow.set(node.outputs[0], merged)


def split(flow: Flow, i: int, node: Node) -> None:
    """Cut along an axis that is not the batch."""
    marks = flow.of(node.inputs[0])
    if marks[axis_of(node, 0, len(marks))] is not None and sum(bool(o) for o in node.outputs) > 1:
        raise flow.fail(i, "cuts the batch in parts of fixed size")
    for output in node.outputs:
        flow.set(output, marks)


def slice_(flow: Flow, i: int, node: Node) -> None:
    """A range along some axes; along the batch only all of it."""
    source, output = tensor_of(flow, node.inputs[0]), tensor_of(flow, node.outputs[0])
    marks = flow.of(source.name)
    for d, (mark, a, b) in enumerate(zip(marks, source.shape, output.shape, strict=True)):
        if mark is not None and a != b:
            raise flow.fail(i, f"takes {b} of {a} along dimension {d}, which follows the batch")
    flow.set(output.name, marks)
    ends = flow.graph.constants.get(node.inputs[2]) if len(node.inputs) > 2 else None
    axes = flow.graph.constants.get(node.inputs[3]) if len(node.inputs) > 3 else None
    if ends is not None and any(marks):
        along = [int(a) % len(marks) for a in axes] if axes is not None else range(len(ends))
        flags = tuple(marks[d] is not None and end == source.shape[d] for d, end in zip(along, ends, strict=True))
        if any(flags):
            flow.edits[(i, 2)] = flags


def expand(flow: Flow, i: int, node: Node) -> None:
    """Broadcast to a fixed shape; a first dimension that grows to the batch size follows the batch."""
    source, output = tensor_of(flow, node.inputs[0]), tensor_of(flow, node.outputs[0])
    lead = len(output.shape) - len(source.shape)
    marks: list[Mark | None] = [*(None for _ in range(lead)), *flow.of(source.name)]
    grows = lead > 0 or source.shape[0] == 1
    if output.shape and output.shape[0] == flow.batch > 1 and grows and not any(marks):
        marks[0] = Mark()
    flow.set(output.name, marks)
    flow.note_shape(i, 1, output.name)


def tile(flow: Flow, i: int, node: Node) -> None:
    """Repeated along each dimension; a first dimension repeated batch times follows the batch."""
    source, output = tensor_of(flow, node.inputs[0]), tensor_of(flow, node.outputs[0])
    marks = list(flow.of(source.name))
    for d, (mark, a, b) in enumerate(zip(marks, source.shape, output.shape, strict=True)):
        if mark is not None:
            marks[d] = Mark(mark.outer * (b // a), mark.inner)
    if output.shape and source.shape[0] == 1 and output.shape[0] == flow.batch > 1 and not any(marks):
        marks[0] = Mark()
        flow.edits[(i, 1)] = tuple(d == 0 for d in range(len(marks)))
    flow.set(output.name, marks)

"""ONNX operators as functions on a graph under construction: each computes the shape of its result."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._graph import ElementType, GraphBuilder, Value


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that numpy broadcasting gives.

    Raises:
        ValueError: two sizes differ and neither is 1.
    """
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = []
    for sizes in zip(*padded, strict=True):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            raise ValueError(f"shapes do not broadcast: {shapes}")
        result.append(wide.pop() if wide else 1)
    return tuple(result)


def unary(g: GraphBuilder, op: str, x: Value) -> Value:
    """An operator that keeps its input's shape (`Relu`, `Tanh`, `Sigmoid`, ...)."""
    return g.node(op, [x], x.shape)


def binary(g: GraphBuilder, op: str, a: Value, b: Value, dtype: ElementType | None = None) -> Value:
    """A broadcasting operator of two inputs (`Add`, `Mul`, `Less`, ...)."""
    return g.node(op, [a, b], broadcast(a.shape, b.shape), dtype)


def add(g: GraphBuilder, a: Value, b: Value) -> Value:
    """Sum, broadcasting."""
    return binary(g, "Add", a, b)


def mul(g: GraphBuilder, a: Value, b: Value) -> Value:
    """Product element by element, broadcasting."""
    return binary(g, "Mul", a, b)


def scale(g: GraphBuilder, x: Value, factor: float) -> Value:
    """Product with a constant."""
    return mul(g, x, g.constant(factor, ElementType.FLOAT))


def where(g: GraphBuilder, condition: Value, a: Value, b: Value) -> Value:
    """`a` where the condition holds, else `b`, broadcasting."""
    return g.node("Where", [condition, a, b], broadcast(condition.shape, a.shape, b.shape), a.dtype)


def cast(g: GraphBuilder, x: Value, dtype: ElementType) -> Value:
    """The same values in another element type."""
    return g.node("Cast", [x], x.shape, dtype, to=int(dtype))


def matmul(g: GraphBuilder, a: Value, b: Value) -> Value:
    """Matrix product over the last two dimensions, the leading ones broadcasting."""
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"matrix product of {a.shape} and {b.shape}")
    return g.node("MatMul", [a, b], (*broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]))


def gemm(g: GraphBuilder, x: Value, weight: Value, bias: Value) -> Value:
    """`x @ weight.T + bias` for a matrix `x`, as exporters write a linear layer on [batch, features]."""
    return g.node("Gemm", [x, weight, bias], (x.shape[0], weight.shape[0]), transB=1)


def transpose(g: GraphBuilder, x: Value, perm: Sequence[int]) -> Value:
    """Dimensions in another order."""
    return g.node("Transpose", [x], [x.shape[i] for i in perm], perm=list(perm))


def reshape(g: GraphBuilder, x: Value, target: Sequence[int]) -> Value:
    """The same elements in another shape; 0 keeps the input's size at that position, -1 takes what remains."""
    shape = [x.shape[i] if size == 0 else size for i, size in enumerate(target)]
    known = math.prod(size for size in shape if size != -1)
    shape = [math.prod(x.shape) // known if size == -1 else size for size in shape]
    if math.prod(shape) != math.prod(x.shape):
        raise ValueError(f"{x.name} of shape {x.shape} does not reshape to {tuple(target)}")
    return g.node("Reshape", [x, g.constant(list(target))], shape)


def unsqueeze(g: GraphBuilder, x: Value, axis: int) -> Value:
    """A dimension of size 1 inserted at a (non-negative) position."""
    return g.node("Unsqueeze", [x, g.constant([axis])], (*x.shape[:axis], 1, *x.shape[axis:]))


def squeeze(g: GraphBuilder, x: Value, axis: int) -> Value:
    """A dimension of size 1 removed."""
    return g.node("Squeeze", [x, g.constant([axis])], (*x.shape[:axis], *x.shape[axis + 1 :]))


def concat(g: GraphBuilder, parts: Sequence[Value], axis: int) -> Value:
    """Tensors joined along a (non-negative) dimension."""
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return g.node("Concat", parts, shape, axis=axis)


def split(g: GraphBuilder, x: Value, sizes: Sequence[int], axis: int) -> tuple[Value, ...]:
    """Consecutive parts of given sizes along a (non-negative) dimension."""
    results = [((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype) for size in sizes]
    return g.node_with("Split", [x, g.constant(list(sizes))], results, attributes={"axis": axis})


def gather(g: GraphBuilder, table: Value, index: Value, axis: int = 0) -> Value:
    """Rows of a table by index: [v, d] and [b, s] give [b, s, d]."""
    shape = (*table.shape[:axis], *index.shape, *table.shape[axis + 1 :])
    return g.node("Gather", [table, index], shape, axis=axis)


def gather_rows(g: GraphBuilder, x: Value, index: Value) -> Value:
    """Rows per batch entry: x [b, s, d] and index [b, n] give [b, n, d]."""
    rows = unsqueeze(g, index, index.rank)
    return g.node("GatherND", [x, rows], (*index.shape, x.shape[-1]), batch_dims=1)


def softmax(g: GraphBuilder, x: Value) -> Value:
    """Softmax over the last dimension."""
    return g.node("Softmax", [x], x.shape, axis=-1)


def reduce_sum(g: GraphBuilder, x: Value, axis: int, *, keepdims: bool = False) -> Value:
    """Sum over one (non-negative) dimension."""
    shape = (*x.shape[:axis], *((1,) if keepdims else ()), *x.shape[axis + 1 :])
    return g.node("ReduceSum", [x, g.constant([axis])], shape, keepdims=int(keepdims))


def arange(g: GraphBuilder, size: int) -> Value:
    """0, 1, ..., size - 1 as int64."""
    return g.node("Range", [g.constant(0), g.constant(size), g.constant(1)], (size,))


def size_of(g: GraphBuilder, x: Value, axis: int) -> Value:
    """The size of one dimension as an int64 vector of length 1, read from the tensor when the graph runs."""
    return g.node("Shape", [x], (1,), ElementType.INT64, start=axis, end=axis + 1)


def expand_batch(g: GraphBuilder, x: Value, like: Value) -> Value:
    """Repeat the leading dimension, of size 1, to another tensor's batch size, read when the graph runs."""
    ones = g.constant([1] * (x.rank - 1))
    shape = g.node("Concat", [size_of(g, like, 0), ones], (x.rank,), ElementType.INT64, axis=0, label="shape_of")
    return g.node("Expand", [x, shape], (like.shape[0], *x.shape[1:]))


def one_hot(g: GraphBuilder, index: Value, depth: int, dtype: ElementType = ElementType.INT64) -> Value:
    """1 at the index along a new last dimension, 0 elsewhere; all 0 where the index is out of range."""
    return g.node("OneHot", [index, g.constant(depth), g.constant([0, 1], dtype)], (*index.shape, depth), dtype)


def conv(g: GraphBuilder, x: Value, weight: Value, bias: Value | None, *, stride: int = 1, pad: int = 0) -> Value:
    """2-D convolution of [n, c, h, w] with a weight [k, c, r, s], the same stride and padding on both sides."""
    rows, columns = weight.shape[2:]
    height, width = (
        (x.shape[2] + 2 * pad - rows) // stride + 1,
        (x.shape[3] + 2 * pad - columns) // stride + 1,
    )
    return g.node(
        "Conv",
        [x, weight] if bias is None else [x, weight, bias],
        (x.shape[0], weight.shape[0], height, width),
        kernel_shape=[rows, columns],
        strides=[stride, stride],
        pads=[pad] * 4,
    )


def max_pool(g: GraphBuilder, x: Value, *, kernel: int, stride: int, pad: int = 0) -> Value:
    """Largest value of each square window."""
    height, width = ((size + 2 * pad - kernel) // stride + 1 for size in x.shape[2:])
    return g.node(
        "MaxPool",
        [x],
        (*x.shape[:2], height, width),
        kernel_shape=[kernel, kernel],
        strides=[stride, stride],
        pads=[pad] * 4,
    )


def flatten(g: GraphBuilder, x: Value) -> Value:
    """All dimensions after the first made one."""
    return g.node("Flatten", [x], (x.shape[0], math.prod(x.shape[1:])), axis=1)

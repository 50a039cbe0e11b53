"""How the batch travels through matrix products and reductions."""

from __future__ import annotations

from planner.graph import Node, TensorKind
from planner.operators.batching.flow import Flow, Mark
from planner.operators.batching.operands import axes_of, axis_of, merge, tensor_of


def _contracted(flow: Flow, i: int, left: tuple[str, int], right: tuple[str, int]) -> None:
    """A sum over the batch needs it on both sides; no weight has it there."""
    for (name, d), (other, o) in ((left, right), (right, left)):
        mark = flow.of(name)[d]
        if mark is None:
            continue
        tensor = tensor_of(flow, other)
        if tensor.kind is TensorKind.PARAMETER and flow.of(other)[o] is None:
            raise flow.fail(i, f"sums over the batch with the weight {other!r}")
        flow.require(i, other, o % len(tensor.shape), mark)


def matmul(flow: Flow, i: int, node: Node) -> None:
    """`... m k, ... k n -> ... m n`, the leading dimensions broadcast."""
    a, b, output = node.inputs[0], node.inputs[3 if node.op == "QLinearMatMul" else 1], node.outputs[0]
    _contracted(flow, i, (a, -1), (b, -2 if len(flow.of(b)) > 1 else -1))
    left, right = flow.of(a), flow.of(b)
    rank = len(tensor_of(flow, output).shape)
    merged: list[Mark | None] = [None] * rank
    wide = len(left) > 1 and len(right) > 1
    if wide or len(left) > 1:
        merged[-2 if wide else -1] = left[-2]
    if len(right) > 1:
        merged[-1] = right[-1]
    for marks in (left, right):
        for d, mark in enumerate(marks[:-2]):
            at = rank - 2 - len(marks[:-2]) + d if wide else d
            merged[at] = merged[at] or mark
    for name, marks in ((a, left), (b, right)):
        for d in range(len(marks) - 2):
            mark = merged[rank - len(marks) + d]
            if mark is not None and tensor_of(flow, name).shape[d] != 1:
                flow.require(i, name, d, mark)
    flow.set(output, merged)


def gemm(flow: Flow, i: int, node: Node) -> None:
    """`m k, k n -> m n`, operands transposed on demand, plus a broadcast bias."""
    turned, other = bool(node.attributes.get("transA")), bool(node.attributes.get("transB"))
    _contracted(flow, i, (node.inputs[0], 0 if turned else 1), (node.inputs[1], 1 if other else 0))
    left, right = flow.of(node.inputs[0]), flow.of(node.inputs[1])
    rows, columns = left[1] if turned else left[0], right[0] if other else right[1]
    flow.set(node.outputs[0], (rows, columns))
    if len(node.inputs) > 2 and node.inputs[2]:
        merge(flow, i, [node.outputs[0], node.inputs[2]], node.outputs[0])


def einsum(flow: Flow, i: int, node: Node) -> None:
    """By the letters of the equation."""
    equation = str(node.attributes.get("equation", "")).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        raise flow.fail(i, f"has an equation that is not followed: {equation!r}")
    found: dict[str, Mark] = {}
    for name, letters in zip(node.inputs, left.split(","), strict=True):
        found.update({c: m for c, m in zip(letters, flow.of(name), strict=True) if m is not None})
    for name, letters in zip(node.inputs, left.split(","), strict=True):
        for d, letter in enumerate(letters):
            if letter in found and tensor_of(flow, name).shape[d] != 1:
                flow.require(i, name, d, found[letter])
    flow.set(node.outputs[0], [found.get(c) for c in right])


def reduce(flow: Flow, i: int, node: Node) -> None:
    """Some dimensions reduced; a sum over the batch no longer follows it."""
    source, output = tensor_of(flow, node.inputs[0]), node.outputs[0]
    marks = flow.of(source.name)
    if node.op in ("ArgMax", "ArgMin"):
        axes: tuple[int, ...] | None = (axis_of(node, 0, len(marks)),)
    else:
        axes = axes_of(flow, node, 1, len(marks))
    gone = set(range(len(marks))) if axes is None else set(axes)
    if len(tensor_of(flow, output).shape) == len(marks):
        flow.set(output, [None if d in gone else m for d, m in enumerate(marks)])
    else:
        flow.set(output, [m for d, m in enumerate(marks) if d not in gone])

"""How the batch travels where results have the dimensions of operands: element-wise work, norms, windows, sequences."""

from __future__ import annotations

from planner.graph import Node, TensorKind
from planner.operators.batching.flow import Flow
from planner.operators.batching.operands import merge, share, tensor_of


def broadcast(flow: Flow, i: int, node: Node) -> None:
    """Element-wise over operands that are broadcast against each other."""
    for output in node.outputs:
        if output and output in flow.graph.tensors:
            merge(flow, i, [n for n in node.inputs if n], output)


def same(flow: Flow, i: int, node: Node) -> None:
    """Results have the first operand's dimensions; where a size differs the dimension must not follow the batch."""
    source = node.inputs[0]
    shape, marks = tensor_of(flow, source).shape, flow.of(source)
    for output in node.outputs:
        if not output or output not in flow.graph.tensors:
            continue
        result = tensor_of(flow, output).shape
        if len(result) != len(shape):
            continue
        kept = [m if a == b else None for m, a, b in zip(marks, shape, result, strict=True)]
        for d, (mark, size) in enumerate(zip(marks, result, strict=True)):
            if mark is not None and kept[d] is None and size != 1:
                raise flow.fail(i, f"changes dimension {d}, which follows the batch, from {shape[d]} to {size}")
        flow.set(output, kept)


def leading(flow: Flow, i: int, node: Node) -> None:
    """Operators without a rule of their own: a first dimension that is the batch stays the first dimension."""
    marked = [n for n in node.inputs if n and any(flow.of(n))]
    if not marked:
        return
    for name in marked:
        if flow.of(name)[0] is None or any(flow.of(name)[1:]):
            raise flow.fail(i, f"is not known, and {name!r} has the batch in a dimension other than the first")
    mark = flow.of(marked[0])[0]
    size = tensor_of(flow, marked[0]).shape[0]
    for name in node.inputs:
        shape = tensor_of(flow, name).shape if name else ()
        if name and mark and tensor_of(flow, name).kind is TensorKind.CONSTANT and shape[:1] == (size,) and size > 1:
            flow.require(i, name, 0, mark)
    for output in node.outputs:
        shape = tensor_of(flow, output).shape if output in flow.graph.tensors else ()
        if shape[:1] == (size,):
            flow.set(output, (mark, *(None,) * (len(shape) - 1)))


def batch_first(flow: Flow, i: int, node: Node) -> None:
    """Convolutions, pools and the like: the first dimension of the first operand is that of the results."""
    marks = flow.of(node.inputs[0])
    if any(marks[1:]):
        raise flow.fail(i, f"has the batch in a dimension of {node.inputs[0]!r} other than the first")
    for output in node.outputs:
        if output in flow.graph.tensors:
            flow.set(output, (marks[0], *(None,) * (len(tensor_of(flow, output).shape) - 1)))


def rotary(flow: Flow, i: int, node: Node) -> None:
    """Position ids [b, s], or without them tables [b, s, d], run with the batch of what is turned.

    The standard has the ids last, com.microsoft in second place.
    """
    same(flow, i, node)
    x = node.inputs[0]
    places = node.inputs[1:2] if node.op.startswith("com.") else node.inputs[3:4]
    ids = [name for name in places if name and len(tensor_of(flow, name).shape) == 2]
    for name in ids or (node.inputs[1:3] if not node.op.startswith("com.") else ()):
        producer = flow.graph.producer.get(name)
        repeated = producer is None or flow.graph.nodes[producer].op in ("Expand", "Tile")
        if repeated and tensor_of(flow, name).shape[0] == tensor_of(flow, x).shape[0]:
            share(flow, i, ((x, 0), (name, 0)))


def recurrent(flow: Flow, i: int, node: Node) -> None:
    """LSTM, GRU, RNN: the batch is the second dimension of the input, the first in layout 1."""
    first = node.attributes.get("layout", 0) == 1
    mark = flow.of(node.inputs[0])[0 if first else 1]
    if mark is None:
        return
    for position, dim in ((4, 0), (5, 0 if first else 1), (6, 0 if first else 1)):
        if position < len(node.inputs) and node.inputs[position]:
            flow.require(i, node.inputs[position], dim, mark)
    for output, dim in zip(node.outputs, (0 if first else 2, *(0 if first else 1,) * 2), strict=False):
        if output in flow.graph.tensors:
            rank = len(tensor_of(flow, output).shape)
            flow.set(output, [mark if d == dim else None for d in range(rank)])


def loss(flow: Flow, i: int, node: Node) -> None:
    """Cross entropy: a mean or sum over the batch, or one value a label; log-probabilities like the scores."""
    if node.attributes.get("reduction", "mean") == "none":
        flow.set(node.outputs[0], flow.of(node.inputs[1]))
    if len(node.outputs) > 1:
        flow.set(node.outputs[1], flow.of(node.inputs[0]))


def resize(flow: Flow, i: int, node: Node) -> None:
    """Spatial sizes change, the batch stays."""
    same(flow, i, node)
    if len(node.inputs) > 3 and node.inputs[3]:
        flow.note_shape(i, 3, node.outputs[0])

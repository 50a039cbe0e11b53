"""How the batch travels through picking and placing by index."""

from __future__ import annotations

from planner.graph import Node
from planner.operators.batching.flow import Flow, Mark
from planner.operators.batching.operands import axis_of, share, tensor_of


def gather(flow: Flow, i: int, node: Node) -> None:
    """Rows picked along an axis: the axis is replaced by the dimensions of the indices."""
    data, indices = flow.of(node.inputs[0]), flow.of(node.inputs[1])
    axis = axis_of(node, 0, len(data))
    if data[axis] is not None and not any(indices):
        raise flow.fail(i, f"picks fixed positions along dimension {axis}, which follows the batch")
    flow.set(node.outputs[0], (*data[:axis], *indices, *data[axis + 1 :]))


def gather_nd(flow: Flow, i: int, node: Node) -> None:
    """Slices picked by index tuples."""
    table, name = node.inputs[0], node.inputs[1]
    depth = tensor_of(flow, name).shape[-1]
    shared = node.attributes.get("batch_dims", 0)
    start = int(shared) if isinstance(shared, int) else 0
    for d in range(start):
        share(flow, i, ((table, d), (name, d)))
    data = flow.of(table)
    if any(data[start : start + depth]) and not any(flow.of(name)):
        if tensor_of(flow, name).shape[0] != flow.batch or len(tensor_of(flow, name).shape) < 2:
            raise flow.fail(i, "picks fixed positions along the batch")
        flow.require(i, name, 0, Mark())
    flow.set(node.outputs[0], (*flow.of(name)[:-1], *data[start + depth :]))


def scatter_nd(flow: Flow, i: int, node: Node) -> None:
    """Slices replaced at index tuples: one tuple an update, each update laid over the trailing dimensions."""
    data, name, updates = node.inputs[:3]
    rows = len(tensor_of(flow, name).shape) - 1
    depth = tensor_of(flow, name).shape[-1]
    for d in range(rows):
        share(flow, i, ((updates, d), (name, d)))
    for d in range(len(tensor_of(flow, data).shape) - depth):
        share(flow, i, ((updates, rows + d), (data, depth + d)))
    flow.set(node.outputs[0], flow.of(data))


def scatter_elements(flow: Flow, i: int, node: Node) -> None:
    """Elements replaced along an axis; in other dimensions of equal size data, indices and updates run together."""
    data, name, updates = node.inputs[:3]
    shape, rows = tensor_of(flow, data).shape, tensor_of(flow, name).shape
    axis = axis_of(node, 0, len(shape))
    for d, (size, count) in enumerate(zip(shape, rows, strict=True)):
        together = ((name, d), (updates, d))
        share(flow, i, ((data, d), *together) if d != axis and size == count else together)
    flow.set(node.outputs[0], flow.of(data))


def like_second(flow: Flow, i: int, node: Node) -> None:
    """Results have the dimensions of the indices (GatherElements)."""
    flow.set(node.outputs[0], flow.of(node.inputs[1]))


def topk(flow: Flow, i: int, node: Node) -> None:
    """The largest along an axis that is not the batch."""
    marks = flow.of(node.inputs[0])
    if marks[axis_of(node, -1, len(marks))] is not None:
        raise flow.fail(i, "picks a fixed number of samples of the batch")
    for output in node.outputs:
        flow.set(output, marks)


def one_hot(flow: Flow, i: int, node: Node) -> None:
    """A new axis beside those of the indices."""
    marks = list(flow.of(node.inputs[0]))
    marks.insert(axis_of(node, -1, len(marks) + 1), None)
    flow.set(node.outputs[0], marks)

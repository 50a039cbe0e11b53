"""Recognise a Loop that sums rows of a table bag by bag, as exporters write an EmbeddingBag.

In each turn the body cuts the rows of one bag out, from one place in a list of offsets to the next, and reduces them;
the loop stacks the results. That is one gather of all rows and one reduction, whatever the bags hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.importers.onnx_graph.order import subgraphs
from planner.importers.onnx_graph.work import TensorType, WorkNode

if TYPE_CHECKING:
    import onnx

    from planner.importers.onnx_graph.resolve import Frame, Resolver

_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax")
_SHAPE = 7


@dataclass(frozen=True, slots=True)
class _Bags:
    """The reduction that a loop body computes in each iteration.

    Attributes:
        reduction: how the rows of a bag become one.
        table: tensor that rows are gathered from; "" where the rows were gathered before the loop.
        rows: what is cut in bags: the rows, or the indices into the table.
        offsets: tensors that say where bags start and end.
    """

    reduction: str
    table: str
    rows: str
    offsets: frozenset[str]


def price_as_bags(resolver: Resolver, node: onnx.NodeProto, body: onnx.GraphProto, frame: Frame) -> bool:
    """Put a gather and a reduction in place of a Loop that sums bags of rows; false for any other Loop."""
    nodes = list(_nodes(body))
    makers = {name: inner for inner in nodes for name in inner.output}
    reductions = {_bags(inner, makers, resolver) for inner in nodes if inner.op_type in _REDUCTIONS}
    bags = max(reductions - {None}, key=lambda each: each.reduction == "ReduceMean", default=None)  # type: ignore[union-attr]
    target = _stacked(node, body, makers)
    if bags is None or None in reductions or not target:
        return False
    lengths = [resolver.type_of(name, node.name).shape[0] for name in bags.offsets]
    count = min(lengths) if len(lengths) > 1 else lengths[0] - 1
    total = resolver.type_of(bags.rows, node.name).shape[0]
    if count < 1 or total % count:
        return False
    like = WorkNode("Loop", [], [target], {}, node.name, frame.scope_of(node), frame.repeat)
    _emit(resolver, bags, count, target, like)
    states = len(node.input) - 2
    for made, inner in zip(node.output[:states], body.output[1:], strict=False):
        if made and makers[inner.name].op_type == "SequenceInsert":
            resolver.sequences[made] = [target]
    resolver.work.fates["plumbing"] += 1
    resolver.work.info(
        "embedding-bag",
        f"Loop {node.name or target!r} reduces {total} rows in {count} bags; priced as one gather and one reduction",
        node.name,
    )
    return True


def _nodes(graph: onnx.GraphProto) -> Iterable[onnx.NodeProto]:
    """Nodes of a body and of the branches inside it."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from _nodes(inner)


def _bags(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto], resolver: Resolver) -> _Bags | None:
    """What a reduction in a body sums, if it is the rows of a bag."""
    rows = makers.get(node.input[0])
    if rows is not None and rows.op_type == "Mul":  # each row times its own weight
        rows = next((makers[name] for name in rows.input if name in makers), None)
    table = ""
    if rows is not None and rows.op_type == "Gather":
        table, rows = rows.input[0], makers.get(rows.input[1])
    if rows is None or rows.op_type != "Slice" or rows.input[0] not in resolver.work.types:
        return None
    offsets = frozenset(_outer(rows.input[1:3], makers, resolver))
    known = not table or table in resolver.work.types
    return _Bags(node.op_type, table, rows.input[0], offsets) if offsets and known else None


def _outer(names: Iterable[str], makers: Mapping[str, onnx.NodeProto], resolver: Resolver) -> Iterable[str]:
    """Vectors of integers from outside a body, not fixed in the file, that some names in it are computed from."""
    stack, seen = list(names), set[str]()
    while stack:
        name = stack.pop()
        if name in makers and name not in seen:
            seen.add(name)
            stack += makers[name].input
        kind = resolver.work.types.get(name)
        if kind is not None and len(kind.shape) == 1 and name not in resolver.work.values:
            yield name


def _stacked(node: onnx.NodeProto, body: onnx.GraphProto, makers: Mapping[str, onnx.NodeProto]) -> str:
    """Name for the stacked results: the output that collects them, or one beside the sequence they are put into."""
    states = len(node.input) - 2
    for made, inner in zip(node.output, body.output[1:], strict=False):
        collected = list(node.output).index(made) >= states
        maker = makers.get(inner.name)
        if made and maker is not None and (collected or maker.op_type == "SequenceInsert"):
            return made if collected else f"{made}/bags"
    return ""


def _emit(resolver: Resolver, bags: _Bags, count: int, target: str, like: WorkNode) -> None:
    """Gather all rows, lay them out by bag, reduce each bag."""

    def add(op: str, inputs: list[str], output: str, kind: TensorType, **attributes: int | tuple[int, ...]) -> str:
        resolver.emit(WorkNode(op, inputs, [output], dict(attributes), like.name, like.scope, like.repeat), [kind])
        resolver.work.total_nodes += 1
        return output

    rows = bags.rows
    if bags.table:
        table, indices = (resolver.type_of(name, like.name) for name in (bags.table, rows))
        gathered = TensorType((*indices.shape, *table.shape[1:]), table.element)
        rows = add("Gather", [bags.table, rows], f"{target}/rows", gathered, axis=0)
    kind = resolver.type_of(rows, like.name)
    shape = (count, kind.shape[0] // count, *kind.shape[1:])
    resolver.store(f"{target}/shape", TensorType((len(shape),), _SHAPE), np.array(shape, dtype=np.int64))
    laid = add("Reshape", [rows, f"{target}/shape"], f"{target}/laid", TensorType(shape, kind.element))
    reduced = TensorType((count, *kind.shape[1:]), kind.element)
    add(bags.reduction, [laid], target, reduced, axes=(1,), keepdims=0)

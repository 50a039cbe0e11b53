"""Follow sequences of tensors through the few operators that exporters write, and put plain tensor operators in place.

A sequence is known here as the list of its elements' names; a sequence that enters a loop or an unknown operator cannot
be followed and is an error there.

A Loop that sums rows of a table bag by bag, as exporters write an EmbeddingBag, stacks or collects its results: in each
turn the body cuts the rows of one bag out, from one place in a list of offsets to the next, and reduces them. That is
one gather of all rows and one reduction, whatever the bags hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import ModelError
from planner.importers.onnx_graph.nodes import node_label, plain_attributes, tensor_value
from planner.importers.onnx_graph.work import INT64, Array, TensorType, WorkNode

if TYPE_CHECKING:
    import onnx

    from planner.importers.onnx_graph.resolve import Frame, Handler, Resolver


def _construct(resolver: Resolver, node: onnx.NodeProto, frame: Frame) -> None:
    resolver.work.fates["plumbing"] += 1
    resolver.sequences[node.output[0]] = list(node.input)


def _insert(resolver: Resolver, node: onnx.NodeProto, frame: Frame) -> None:
    resolver.work.fates["plumbing"] += 1
    elements = list(_elements(resolver, node))
    position = len(elements)
    if len(node.input) > 2 and node.input[2]:
        position = _position(resolver, node, node.input[2])
    elements.insert(position, node.input[1])
    resolver.sequences[node.output[0]] = elements


def _erase(resolver: Resolver, node: onnx.NodeProto, frame: Frame) -> None:
    resolver.work.fates["plumbing"] += 1
    elements = list(_elements(resolver, node))
    position = _position(resolver, node, node.input[1]) if len(node.input) > 1 and node.input[1] else -1
    _require_element(resolver, node, elements, position)
    del elements[position]
    resolver.sequences[node.output[0]] = elements


def _at(resolver: Resolver, node: onnx.NodeProto, frame: Frame) -> None:
    resolver.work.fates["plumbing"] += 1
    elements = _elements(resolver, node)
    position = _position(resolver, node, node.input[1])
    _require_element(resolver, node, elements, position)
    resolver.alias(elements[position], node.output[0], frame)


def _length(resolver: Resolver, node: onnx.NodeProto, frame: Frame) -> None:
    resolver.work.fates["plumbing"] += 1
    count = np.array(len(_elements(resolver, node)), dtype=np.int64)
    resolver.store(node.output[0], TensorType((), INT64), count)


def _split(resolver: Resolver, node: onnx.NodeProto, frame: Frame) -> None:
    attributes = plain_attributes(node)
    kind = resolver.type_of(node.input[0], node_label(node))
    axis = resolver.axis(attributes.get("axis", 0), len(kind.shape), node_label(node))
    size, keep = kind.shape[axis], attributes.get("keepdims", 1)
    has_split = len(node.input) > 1 and bool(node.input[1])
    if has_split:
        split = resolver.value(node.input[1])
        if split is None:
            raise _cannot(resolver, node, "the sizes of its parts depend on data")
        sizes = [int(s) for s in split.reshape(-1)]
        if min(sizes, default=0) < (split.ndim == 0) or (split.ndim and sum(sizes) != size):
            raise _cannot(resolver, node, f"parts of {sizes} do not make {size}")
        if split.ndim == 0:
            sizes = [min(sizes[0], size - start) for start in range(0, size, sizes[0])]
        keep = 1
    else:
        sizes = [1] * size
    names = [f"{node.output[0]}/{i}" for i in range(len(sizes))]
    lengths = resolver.store_integers(f"{node.output[0]}/sizes", sizes)
    parts = [TensorType((*kind.shape[:axis], s, *kind.shape[axis + 1 :]), kind.element) for s in sizes]
    base = resolver.work_node(node, frame)
    resolver.emit(
        WorkNode("Split", [node.input[0], lengths], list(names), {"axis": axis}, base.name, base.scope, base.repeat),
        parts,
    )
    if not keep:
        inner = frame.inside(node)
        element = TensorType((*kind.shape[:axis], *kind.shape[axis + 1 :]), kind.element)
        for i, name in enumerate(names):
            where = resolver.store_integers(f"{name}/axis", [axis])
            names[i] = resolver.add("Squeeze", [name, where], f"{name}/element", element, inner)
    resolver.sequences[node.output[0]] = names


def _concat(resolver: Resolver, node: onnx.NodeProto, frame: Frame) -> None:
    elements = _elements(resolver, node)
    if not elements:
        raise _cannot(resolver, node, "the sequence is empty")
    attributes = plain_attributes(node)
    base = resolver.work_node(node, frame)
    kinds = [resolver.type_of(name, base.label) for name in elements]
    new_axis = bool(attributes.get("new_axis", 0))
    rank = len(kinds[0].shape) + new_axis
    axis = resolver.axis(attributes["axis"], rank, base.label)
    if any(len(kind.shape) != len(kinds[0].shape) for kind in kinds):
        raise _cannot(resolver, node, "its elements have different numbers of dimensions")
    inputs = list(elements)
    if new_axis:
        where = resolver.store_integers(f"{node.output[0]}/axis", [axis])
        for i, (name, kind) in enumerate(zip(elements, kinds, strict=True)):
            single = TensorType((*kind.shape[:axis], 1, *kind.shape[axis:]), kind.element)
            inputs[i] = resolver.add("Unsqueeze", [name, where], f"{node.output[0]}/{i}", single, frame.inside(node))
    total = len(elements) if new_axis else sum(kind.shape[axis] for kind in kinds)
    first = kinds[0].shape
    shape = (*first[:axis], total, *first[axis + (not new_axis) :])
    concat = WorkNode("Concat", inputs, [node.output[0]], {"axis": axis}, base.name, base.scope, base.repeat)
    resolver.emit(concat, [TensorType(shape, kinds[0].element)])


def _elements(resolver: Resolver, node: onnx.NodeProto) -> list[str]:
    elements = resolver.sequences.get(node.input[0])
    if elements is None:
        raise _cannot(resolver, node, f"the sequence {node.input[0]!r} comes from an operator that cannot be followed")
    return elements


def _require_element(resolver: Resolver, node: onnx.NodeProto, elements: list[str], position: int) -> None:
    if not -len(elements) <= position < len(elements):
        raise _cannot(resolver, node, f"element {position} of a sequence of {len(elements)}")


def _position(resolver: Resolver, node: onnx.NodeProto, name: str) -> int:
    position = resolver.number(name, node_label(node))
    if position is None:
        raise _cannot(resolver, node, "the position depends on data")
    return position


def _cannot(resolver: Resolver, node: onnx.NodeProto, why: str) -> ModelError:
    return ModelError(
        f"{node_label(node)} works on a sequence and cannot be followed: {why}",
        hint="export the model so that it uses tensors only",
    )


HANDLERS: dict[str, Handler] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": _construct,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceAt": _at,
    "SequenceLength": _length,
    "SplitToSequence": _split,
    "ConcatFromSequence": _concat,
}


_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax")


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
    nodes = list(_nodes(body, {}))
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
    _emit(resolver, bags, count, target, node.name, frame.inside(node))
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


def _nodes(graph: onnx.GraphProto, known: dict[str, Array]) -> Iterable[onnx.NodeProto]:
    """Nodes of a body and of the branches inside it, without branches that a constant condition rules out.

    An exporter that optimises nothing writes a branch for each way to reduce, and the way as a constant.

    Args:
        graph: the body.
        known: values of constants and of comparisons of them; those of the body are added.
    """
    for node in graph.node:
        yield node
        value = _constant(node, known)
        if value is not None:
            known[node.output[0]] = value
        condition = known.get(node.input[0]) if node.op_type == "If" else None
        dead = () if condition is None else ("else_branch" if condition.all() else "then_branch",)
        for attribute in node.attribute:
            if attribute.HasField("g") and attribute.name not in dead:
                yield from _nodes(attribute.g, known)


def _constant(node: onnx.NodeProto, known: Mapping[str, Array]) -> Array | None:
    """The value of a constant, or of a comparison of two."""
    if node.op_type == "Constant":
        held = next((each for each in node.attribute if each.name == "value" and each.HasField("t")), None)
        number = plain_attributes(node).get("value_int")
        return tensor_value(held.t) if held is not None else None if number is None else np.asarray(number)
    if node.op_type == "Equal" and all(name in known for name in node.input):
        first, second = (known[name] for name in node.input)
        return np.asarray(first == second)
    return None


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
    """Vectors of integers from outside a body that some names in it are computed from, as limits of bags."""
    stack, seen = list(names), set[str]()
    while stack:
        name = stack.pop()
        if name in makers and name not in seen:
            seen.add(name)
            stack += makers[name].input
        kind = resolver.work.types.get(name)
        value = resolver.value(name)
        if kind is not None and len(kind.shape) == 1 and (value is None or _ascends(value)):
            yield name


def _ascends(value: Array) -> bool:
    """Whether a vector begins at 0 and grows, as fixed limits of bags do."""
    return value.size > 1 and value[0] == 0 and bool((np.diff(value) > 0).all())


def _stacked(node: onnx.NodeProto, body: onnx.GraphProto, makers: Mapping[str, onnx.NodeProto]) -> str:
    """Name for the stacked results: the output that collects them, or one beside the sequence they are put into."""
    states = len(node.input) - 2
    for made, inner in zip(node.output, body.output[1:], strict=False):
        collected = list(node.output).index(made) >= states
        maker = makers.get(inner.name)
        if made and maker is not None and (collected or maker.op_type == "SequenceInsert"):
            return made if collected else f"{made}/bags"
    return ""


def _emit(resolver: Resolver, bags: _Bags, count: int, target: str, loop: str, frame: Frame) -> None:
    """Gather all rows, lay them out by bag, reduce each bag."""
    rows = bags.rows
    if bags.table:
        table, indices = (resolver.type_of(name, loop) for name in (bags.table, rows))
        gathered = TensorType((*indices.shape, *table.shape[1:]), table.element)
        rows = resolver.add("Gather", [bags.table, rows], f"{target}/rows", gathered, frame, loop, axis=0)
    kind = resolver.type_of(rows, loop)
    shape = (count, kind.shape[0] // count, *kind.shape[1:])
    sizes = resolver.store_integers(f"{target}/shape", shape)
    laid_out = TensorType(shape, kind.element)
    laid = resolver.add("Reshape", [rows, sizes], f"{target}/laid", laid_out, frame, loop)
    reduced = TensorType((count, *kind.shape[1:]), kind.element)
    resolver.add(bags.reduction, [laid], target, reduced, frame, loop, axes=(1,), keepdims=0)

"""What the rules ask of a node's operands, and what several of them do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.graph import Node, Tensor
from planner.operators.batching.flow import Flow, Mark


def tensor_of(flow: Flow, name: str) -> Tensor:
    """The tensor of that name."""
    return flow.graph.tensors[name]


def axis_of(node: Node, default: int, rank: int) -> int:
    """The axis attribute, not negative."""
    value = node.attributes.get("axis", default)
    return (int(value) if isinstance(value, int) else default) % max(rank, 1)


def axes_of(flow: Flow, node: Node, position: int, rank: int) -> tuple[int, ...] | None:
    """Axes by attribute or constant operand, none negative; None where not given."""
    value: object = node.attributes.get("axes")
    if value is None and position < len(node.inputs) and node.inputs[position]:
        value = flow.graph.constants.get(node.inputs[position])
    if isinstance(value, int):
        value = (value,)
    return tuple(sorted(int(a) % rank for a in value)) if isinstance(value, tuple) else None


def merge(flow: Flow, i: int, names: Iterable[str], output: str) -> None:
    """Marks of a result whose dimensions are aligned with its operands' from the right."""
    rank = len(tensor_of(flow, output).shape)
    merged: list[Mark | None] = [None] * rank
    operands = [n for n in dict.fromkeys(names) if len(tensor_of(flow, n).shape) <= rank]
    for name in operands:
        lead = rank - len(tensor_of(flow, name).shape)
        for d, mark in enumerate(flow.of(name)):
            merged[lead + d] = merged[lead + d] or mark
    for name in operands:
        shape = tensor_of(flow, name).shape
        lead = rank - len(shape)
        for d, size in enumerate(shape):
            mark = merged[lead + d]
            if mark is not None and size != 1:
                flow.require(i, name, d, mark)
    flow.set(output, merged)


def share(flow: Flow, i: int, operands: Sequence[tuple[str, int]]) -> Mark | None:
    """Make dimensions (operand, dimension) that run together follow the batch if one of them does; their mark."""
    mark = next((m for name, d in operands if (m := flow.of(name)[d]) is not None), None)
    if mark is not None:
        for name, d in operands:
            flow.require(i, name, d, mark)
    return mark

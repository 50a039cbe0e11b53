"""What ONNX's own checks and inference leave out: malformed equations, ranks of inputs, windows, numbers of heads."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.importers.formats import damaged
from planner.importers.onnx_graph.work import Array, TensorType, WorkNode
from planner.operators import rule_of

if TYPE_CHECKING:
    import onnx

MOST_VERSION = (1 << 31) - 1
"""Largest operator set version that a schema can be asked for."""

_EQUATION = re.compile(r"[A-Za-z., ]*(->[A-Za-z. ]*)?")
"""Form of an Einsum's equation: onnx's inference of another one never ends."""


@functools.lru_cache(maxsize=4096)
def schema_of(op: str, domain: str, version: int) -> Any | None:  # noqa: ANN401
    """ONNX's description of an operator in an operator set; None for one that the standard does not know."""
    from onnx import defs

    try:
        return defs.get_schema(op, version, domain)
    except defs.SchemaError:
        return None


@functools.cache
def newest_version(domain: str) -> int:
    """The newest version of an operator set that the onnx package knows; 0 for one that is not of the standard."""
    from onnx import helper

    name = domain or "ai.onnx"
    return max((version for known, version in helper.OP_SET_ID_VERSION_MAP if known == name), default=0)


def check_call(node: onnx.NodeProto, domain: str, version: int, ir_version: int) -> None:
    """Refuse a node that its operator cannot be called as; of unknown operators only that they compute something.

    Raises:
        ModelError: too few or too many inputs or outputs, one that is needed left out, an attribute that is absent,
            unknown or of another kind.
    """
    from onnx import checker

    if schema_of(node.op_type, domain, version) is None:
        if not (node.output and node.output[0]):
            raise damaged(f"{node.op_type} {node.name!r} has no first output")
        return
    context = checker.C.CheckerContext()
    context.ir_version, context.opset_imports = ir_version, {domain: version}
    try:
        checker.check_node(_without_content(node, domain), context)
    except checker.ValidationError as error:
        label = node.name or next((name for name in node.output if name), "")
        raise damaged(f"{node.op_type} {label!r}: {str(error).strip().splitlines()[0]}") from None


_TENSOR, _GRAPH, _SPARSE = 4, 5, 11


def _without_content(node: onnx.NodeProto, domain: str) -> onnx.NodeProto:
    """The node in a domain without bodies, which are checked when they are walked, and without data."""
    from onnx import GraphProto, NodeProto, TensorProto

    if node.domain == domain and not any(a.type in (_TENSOR, _GRAPH, _SPARSE) for a in node.attribute):
        return node
    bare = NodeProto(op_type=node.op_type, domain=domain, input=node.input, output=node.output)
    empty = {_TENSOR: {"t": TensorProto(data_type=1, dims=[0])}, _GRAPH: {"g": GraphProto(name="body")}}
    for attribute in node.attribute:
        if attribute.type in empty:
            bare.attribute.add(name=attribute.name, type=attribute.type, **empty[attribute.type])
        elif attribute.type != _SPARSE:
            bare.attribute.append(attribute)
    return bare


def _equation_fault(equation: str) -> str:
    """Why an Einsum equation is invalid: its form, or a letter of the result that no operand has or that it has twice;
    "" if valid."""
    if not _EQUATION.fullmatch(equation):
        return f"has the malformed equation {equation!r}"
    operands, _, result = equation.replace(" ", "").replace(".", "").partition("->")
    for letter in result:
        if letter not in operands:
            return f"has the equation {equation!r}, whose result has the letter {letter!r}, which no operand has"
        if result.count(letter) > 1:
            return f"has the equation {equation!r}, whose result has the letter {letter!r} twice"
    return ""


_UNKNOWN = np.ones(1)
_WINDOW = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 2}
"""Entries of a window's attributes for each spatial dimension."""
_COUNTS = ("num_heads", "kv_num_heads", "q_num_heads", "group", "block_size")


def contradiction(node: WorkNode, inputs: Sequence[TensorType | None], values: Mapping[str, Array]) -> str:
    """First contradiction between an operator's input types, known values and attributes, "" if there is none. O(1)."""
    return next(_contradictions(node, inputs, values), "")


def _contradictions(node: WorkNode, inputs: Sequence[TensorType | None], values: Mapping[str, Array]) -> Iterator[str]:
    if node.op == "Einsum" and (fault := _equation_fault(str(node.attributes["equation"]))):
        yield fault
    if node.op == "Range" and not values.get(node.inputs[2], _UNKNOWN).all():
        yield f"counts in steps of 0 ({node.inputs[2]!r})"
    for position, ranks in rule_of(node.op).ranks.items():
        kind = inputs[position] if position < len(inputs) else None
        if kind is not None and len(kind.shape) not in ranks:
            expected = " or ".join(map(str, ranks))
            yield f"reads {node.inputs[position]!r} of {len(kind.shape)} dimensions, where it takes {expected}"
    for name in _COUNTS:
        count = node.attributes.get(name, 1)
        if isinstance(count, int | float) and count < 1 and node.op.startswith(("com.microsoft.", "Conv")):
            yield f"has the attribute {name!r} = {count}"
    parts = node.attributes.get("num_outputs", len(node.outputs)) if node.op == "Split" else len(node.outputs)
    if parts != len(node.outputs):  # onnx's inference would end the whole process
        yield f"splits into {parts} parts and has {len(node.outputs)} outputs"
    slot = rule_of(node.op).window
    if slot is not None and inputs and inputs[0] is not None:
        spatial = len(inputs[0].shape) - 2
        weight = inputs[slot] if 0 <= slot < len(inputs) else None
        if weight is not None and len(weight.shape) != spatial + 2:
            yield f"reads {len(weight.shape)}-dimensional weights, its input has {spatial + 2} dimensions"
        for name, per_dim in _WINDOW.items():
            window = node.attributes.get(name)
            if isinstance(window, tuple) and len(window) != per_dim * spatial:
                yield f"has {len(window)} {name} for {spatial} spatial dimensions"

"""Check the nodes of a file against the signatures of their operators.

Checked are numbers of inputs and outputs and types of attributes, by the standard, and what ONNX's own checker leaves
out: ranks of inputs, window attributes, numbers of heads.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.importers.formats import damaged
from planner.importers.onnx_graph.work import Array, TensorType, WorkNode
from planner.operators import rule_of

if TYPE_CHECKING:
    import onnx

MOST_VERSION = (1 << 31) - 1
"""Largest operator set version that a schema can be asked for."""

_FORMS = {("Einsum", "equation"): re.compile(rb"[A-Za-z., ]*(->[A-Za-z. ]*)?")}
"""Patterns of text attributes that onnx does not check: its inference of a malformed Einsum never ends."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of an operator in the ONNX standard.

    Attributes:
        schema: onnx's own description.
        inputs: fewest and most inputs.
        outputs: fewest and most outputs.
        needed_inputs: positions of inputs that may not be left out.
        needed_outputs: positions of outputs that may not be left out.
        kinds: for each attribute, the number of its type.
        needed_attributes: attributes that must be given.
    """

    schema: Any
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    needed_inputs: tuple[int, ...]
    needed_outputs: tuple[int, ...]
    kinds: Mapping[str, int]
    needed_attributes: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def signature_of(op: str, domain: str, version: int) -> Signature | None:
    """The signature of an operator in an operator set; None for one that the standard does not know."""
    from onnx import defs

    try:
        schema = defs.get_schema(op, version, domain)
    except defs.SchemaError:
        return None
    attributes: Mapping[str, Any] = schema.attributes
    single = defs.OpSchema.FormalParameterOption.Single
    return Signature(
        schema,
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        tuple(i for i, formal in enumerate(schema.inputs) if formal.option == single),
        tuple(i for i, formal in enumerate(schema.outputs) if formal.option == single),
        {name: int(attribute.type.value) for name, attribute in attributes.items()},
        tuple(name for name, attribute in attributes.items() if attribute.required),
    )


@functools.cache
def newest_version(domain: str) -> int:
    """The newest version of an operator set that the onnx package knows; 0 for one that is not of the standard."""
    from onnx import helper

    name = domain or "ai.onnx"
    return max((version for known, version in helper.OP_SET_ID_VERSION_MAP if known == name), default=0)


def check_call(node: onnx.NodeProto, signature: Signature | None) -> None:
    """Refuse a node that its operator cannot be called as; of unknown operators only that they compute something.

    Attributes that the standard does not know are let pass. O(inputs + outputs + attributes).

    Raises:
        ModelError: too few or too many inputs or outputs, one that is needed left out, an attribute of another kind or
            absent.
    """
    fault = _unnamed(node) if signature is None else _fault(node, signature)
    if fault:
        label = node.name or next((name for name in node.output if name), "")
        raise damaged(f"{node.op_type} {label!r} {fault}")


def _unnamed(node: onnx.NodeProto) -> str:
    return "" if node.output and node.output[0] else "has no first output"


def _fault(node: onnx.NodeProto, signature: Signature) -> str:
    """Why a node does not match its operator's signature, "" if it does."""
    sides = (
        ("input", node.input, signature.inputs, signature.needed_inputs),
        ("output", node.output, signature.outputs, signature.needed_outputs),
    )
    for side, names, (least, most), needed in sides:
        if not least <= len(names) <= most:
            limit = f"takes at most {most}" if len(names) > most else f"needs {least}"
            return f"has {len(names)} {side}s, the operator {limit}"
        for position in needed:
            if position < len(names) and not names[position]:
                return f"lacks its {side} {position}"
    given = set()
    for attribute in node.attribute:
        kind = signature.kinds.get(attribute.name)
        if kind is not None and attribute.type != kind:
            actual, expected = (_KINDS.get(number, "none") for number in (attribute.type, kind))
            return f"has the attribute {attribute.name!r} of type {actual}, not {expected}"
        form = _FORMS.get((node.op_type, attribute.name))
        if form and not form.fullmatch(attribute.s):
            return f"has the malformed {attribute.name} {attribute.s.decode('utf-8', 'replace')!r}"
        if form and (letters := _sourceless(attribute.s.decode())):
            return f"has the {attribute.name} {attribute.s.decode()!r}, whose result has {letters}"
        given.add(attribute.name)
    missing = [name for name in signature.needed_attributes if name not in given]
    return f"lacks the attribute {missing[0]!r}" if missing else ""


def _sourceless(equation: str) -> str:
    """Why the result of an Einsum equation is invalid: a letter that no operand has, or one twice; "" if valid."""
    operands, _, result = equation.replace(" ", "").replace(".", "").partition("->")
    for letter in result:
        if letter not in operands:
            return f"the letter {letter!r}, which no operand has"
        if result.count(letter) > 1:
            return f"the letter {letter!r} twice"
    return ""


_KINDS = {
    1: "FLOAT", 2: "INT", 3: "STRING", 4: "TENSOR", 5: "GRAPH", 6: "FLOATS", 7: "INTS", 8: "STRINGS", 9: "TENSORS",
    10: "GRAPHS", 11: "SPARSE_TENSOR", 12: "SPARSE_TENSORS", 13: "TYPE_PROTO", 14: "TYPE_PROTOS",
}  # fmt: skip

_UNKNOWN = np.ones(1)
_WINDOW = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 2}
"""Entries of a window's attributes for each spatial dimension."""
_COUNTS = ("num_heads", "kv_num_heads", "q_num_heads", "group", "block_size")


def contradiction(node: WorkNode, inputs: Sequence[TensorType | None], values: Mapping[str, Array]) -> str:
    """First contradiction between an operator's input types, known values and attributes, "" if there is none. O(1)."""
    return next(_contradictions(node, inputs, values), "")


def _contradictions(node: WorkNode, inputs: Sequence[TensorType | None], values: Mapping[str, Array]) -> Iterator[str]:
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

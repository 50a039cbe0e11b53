"""Types and values of one node's outputs, from what is known of its inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.errors import ModelError
from planner.graph import Tensor, TensorKind
from planner.importers.formats import damaged
from planner.importers.onnx_graph.nodes import check_call, contradiction, schema_of
from planner.importers.onnx_graph.work import (
    ELEMENT_TYPES,
    MAX_CONSTANT_ELEMENTS,
    Array,
    TensorType,
    WorkGraph,
    WorkNode,
)
from planner.operators import OpCall, OutputTypes, evaluate, rule_of

if TYPE_CHECKING:
    import onnx

_NUMPY: dict[int, Any] = {
    1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_,
    10: np.float16, 11: np.float64, 12: np.uint32, 13: np.uint64, 16: np.float32,
}  # fmt: skip
_ELEMENTS = {dtype: number for number, dtype in reversed(ELEMENT_TYPES.items())}
_STANDARD_FORMS = {("com.microsoft", "FusedConv"): "Conv"}
"""Fused operators as the standard one whose shapes they share, by domain and type."""
_MASKS = frozenset(("Equal", "Greater", "OneHot"))
_MERGES = frozenset(("ReduceMax", "ReduceSum"))


@dataclass(frozen=True, slots=True)
class Partial:
    """A type of which some dimensions, the rank or the element type may be open (None)."""

    shape: tuple[int | None, ...] | None
    element: int | None

    @staticmethod
    def of(proto: onnx.TypeProto, dims: Mapping[str, int]) -> Partial:
        """What an ONNX type says; symbolic axes that have a size count as known."""
        tensor = proto.tensor_type
        element = tensor.elem_type if tensor.elem_type in ELEMENT_TYPES else None
        if not tensor.HasField("shape"):
            return Partial(None, element)
        shape = tuple(
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dims.get(dim.dim_param)
            for dim in tensor.shape.dim
        )
        return Partial(shape, element)

    @property
    def complete(self) -> TensorType | None:
        """The type, when nothing is open."""
        if self.shape is None or self.element is None:
            return None
        known = [size for size in self.shape if size is not None]
        return TensorType(tuple(known), self.element) if len(known) == len(self.shape) else None

    def or_else(self, other: Partial | None) -> Partial:
        """What is open here taken from another statement about the same value, where the ranks agree."""
        if other is None:
            return self
        element = self.element if self.element is not None else other.element
        if self.shape is None or other.shape is None or len(self.shape) != len(other.shape):
            return Partial(self.shape if self.shape is not None else other.shape, element)
        pairs = zip(self.shape, other.shape, strict=True)
        return Partial(tuple(mine if mine is not None else theirs for mine, theirs in pairs), element)


class Inference:
    """ONNX's inference of single nodes, our rules behind it, and what the file says behind those.

    Args:
        work: types and values found so far; read, not changed.
        hints: types that the file states for values, by name.
        dims: sizes of symbolic axes.
        versions: operator set versions of the model.
        ir_version: of the model.
    """

    def __init__(
        self, work: WorkGraph, hints: Mapping[str, onnx.TypeProto], dims: Mapping[str, int],
        versions: Mapping[str, int], ir_version: int,
    ) -> None:  # fmt: skip
        self.unknown_operators: Counter[str] = Counter()
        self._work, self._hints, self._dims = work, hints, dims
        self._versions, self._ir_version = versions, ir_version
        self._inferred: dict[Hashable, tuple[list[Partial | None], list[TensorType | None]]] = {}
        self._expert_parts: dict[str, Fraction] = {}

    def outputs(
        self, proto: onnx.NodeProto, node: WorkNode, versions: Mapping[str, int]
    ) -> tuple[list[TensorType | None], list[Array], str]:
        """Infer types and, where small, values of a node's outputs. Equal calls are checked and inferred once.

        Returns:
            Types by position (None if unknown), values, and ONNX's error message.

        Raises:
            ModelError: the operator cannot be called so, the node makes a sequence that cannot be followed, or it
                cannot take what it reads.
        """
        key = self._call_key(proto, node, versions)
        known = self._inferred.get(key) if key is not None else None
        if known is None:
            self.check(proto, versions)
            partial, failure = self._standard(proto, node, versions)
            if failure:
                return [None] * len(node.outputs), [], failure
            known = partial, [p.complete if p is not None else None for p in partial]
            if key is not None:
                self._inferred[key] = known
        partial, kinds = known[0], known[1].copy()
        if None in kinds and any(kind is None for kind, name in zip(kinds, node.outputs, strict=True) if name):
            filled = self._fill_gaps(proto, node, partial, versions)
            kinds = [p.complete if p is not None else None for p in filled]
        held = self._work.types[node.inputs[0]].elements if node.op == "Reshape" else 0
        if held and kinds[0] is not None and kinds[0].elements != held:
            return [None] * len(kinds), [], f"{held:,} elements do not fill {list(kinds[0].shape)}"
        values = self._evaluate(node, kinds, versions.get("", self._work.opset))
        for i, value in enumerate(values[: len(kinds)]):
            kinds[i] = _type_of(value, kinds[i])
        return kinds, values, ""

    def follow_choice(self, node: WorkNode) -> None:
        """Track which results of a typed node select the rows of one expert of a mixture (`rows_of_expert`)."""
        self._expert_parts.update(_expert_parts(node, self._work, self._expert_parts))

    def rows_of_expert(self, node: WorkNode) -> int | None:
        """Rows that a node finds in the mask of one expert, each expert picked equally often; None for other nodes.

        Experts written out as a loop pick their rows with a mask, of which NonZero makes row numbers.
        """
        part = self._expert_parts.get(node.inputs[0]) if node.op == "NonZero" else None
        return None if part is None else math.ceil(part * self._work.types[node.inputs[0]].elements)

    def shape_operands(self, node: WorkNode) -> list[str]:
        """Inputs that a node needs by value to know its output shape."""
        return [name for _, name in self._slots(node)]

    @staticmethod
    def _slots(node: WorkNode) -> list[tuple[int, str]]:
        """Positions and names of the inputs whose values determine the output shape."""
        slots = rule_of(node.op).values
        return [(i, node.inputs[i]) for i in slots if i < len(node.inputs) and node.inputs[i]] if slots else []

    def stated(self, name: str) -> Partial:
        """The type that the file declares for a value; the value must have a hint."""
        return Partial.of(self._hints[name], self._dims)

    def _standard(
        self, proto: onnx.NodeProto, node: WorkNode, versions: Mapping[str, int]
    ) -> tuple[list[Partial | None], str]:
        """Output types by ONNX's own rules; a message where they contradict each other.

        Raises:
            ModelError: the node makes a sequence, or cannot take what it reads.
        """
        from onnx.checker import ValidationError
        from onnx.helper import make_opsetid, make_tensor_type_proto
        from onnx.shape_inference import InferenceError, infer_node_outputs

        fault = contradiction(node, [self._work.types[n] if n else None for n in node.inputs], self._work.values)
        if fault:
            raise damaged(f"{node.label} {fault}")
        nothing: list[Partial | None] = [None] * len(node.outputs)
        proto = _standard_form(proto)
        schema = schema_of(*self._operator(proto, versions))
        if schema is None:
            return nothing, ""
        kinds = {name: self._work.types[name] for name in proto.input if name}
        known = {name: make_tensor_type_proto(kind.element, kind.shape) for name, kind in kinds.items()}
        data, imports = self._operand_values(node), [make_opsetid(*each) for each in versions.items()]
        try:
            inferred = infer_node_outputs(schema, proto, known, data, None, imports, self._ir_version)
        except (InferenceError, ValidationError, RuntimeError, ValueError, TypeError) as error:
            return nothing, str(error).strip().splitlines()[0].removeprefix("[ShapeInferenceError] ")
        results = [inferred.get(name) for name in proto.output]
        if any(kind is not None and kind.WhichOneof("value") == "sequence_type" for kind in results):
            raise ModelError(
                f"{node.label} makes a sequence; sequences cannot be followed through it",
                hint="export the model so that it uses tensors only",
            )
        return [None if kind is None else Partial.of(kind, {}) for kind in results], ""

    def _call_key(self, proto: onnx.NodeProto, node: WorkNode, versions: Mapping[str, int]) -> Hashable:
        """Cache key of a node's inferred outputs: everything that inference depends on, without tensor names.

        None where there are graphs inside, which read values by name, or an input is read twice.
        """
        inputs, values, attributes = node.inputs, self._work.values, proto.attribute
        if len(set(inputs)) < len(inputs):
            return None
        if attributes and any(attribute.HasField("g") or attribute.graphs for attribute in attributes):
            return None
        return (
            proto.op_type,
            proto.domain,
            tuple(versions.items()),
            tuple([attribute.SerializeToString() for attribute in attributes]) if attributes else (),
            tuple(map(self._work.types.get, inputs)),
            tuple(map(bool, node.outputs)),
            tuple([(at, values[name].tobytes()) for at, name in self._slots(node) if name in values]),
        )

    def _fill_gaps(
        self, proto: onnx.NodeProto, node: WorkNode, partial: Sequence[Partial | None], versions: Mapping[str, int]
    ) -> list[Partial | None]:
        """Fill types that ONNX left open from our own rules, then from what the file declares."""
        ours = self.by_rule(node, rule_of(node.op).infer)
        result: list[Partial | None] = []
        for i, name in enumerate(node.outputs):
            merged = partial[i]
            statements = [ours[i]] if ours is not None and i < len(ours) else []
            if name in self._hints:
                statements.append(self.stated(name))
            for statement in statements:
                merged = statement if merged is None else merged.or_else(statement)
            result.append(merged)
        known = ours is not None or schema_of(*self._operator(proto, versions)) is not None
        if not known and result[0] is not None and result[0].complete is not None:
            self.unknown_operators[node.op] += 1
        return result

    def by_rule(self, node: WorkNode, rule: OutputTypes | None) -> list[Partial | None] | None:
        """Output types by the operator's rule; None without a rule, a list of None where the rule does not apply."""
        if rule is None:
            return None
        inputs = tuple(self._tensor(name) if name else None for name in node.inputs)
        values = tuple(self._work.values.get(name) for name in node.inputs)
        constants = tuple(None if value is None else tuple(value.reshape(-1).tolist()) for value in values)
        call = OpCall(node.op, self._work.opset, inputs, (None,) * len(node.outputs), node.attributes, constants)
        try:
            results = rule(call)
        except (ModelError, IndexError, ValueError, ZeroDivisionError):
            return [None] * len(node.outputs)
        return [None if f is None else Partial(f[0], _ELEMENTS[f[1]]) for f in results]

    def _tensor(self, name: str) -> Tensor:
        kind = self._work.types[name]
        return Tensor(name, kind.shape, kind.dtype, TensorKind.ACTIVATION)

    def _evaluate(self, node: WorkNode, kinds: Sequence[TensorType | None], version: int) -> list[Array]:
        """Values of the outputs where the inputs' are known and small, else an empty list."""
        work = self._work
        if node.op in ("Shape", "Size"):
            kind = work.types[node.inputs[0]]
            if node.op == "Size":
                return [np.array(kind.elements, dtype=np.int64)]
            start, end = node.attributes.get("start", 0), node.attributes.get("end", len(kind.shape))
            return [np.array(kind.shape[int(start) : int(end)], dtype=np.int64)]  # type: ignore[arg-type]
        if not node.inputs:
            return []
        for name in node.inputs:
            if name and name not in work.values:
                return []
        first = kinds[0] if kinds else None
        if first is not None and first.elements > MAX_CONSTANT_ELEMENTS:
            return []
        target = _NUMPY.get(first.element) if first is not None else None
        arrays = [work.values[name] if name else None for name in node.inputs]
        return evaluate(node.op, arrays, node.attributes, version, target) or []

    def _operand_values(self, node: WorkNode) -> dict[str, onnx.TensorProto]:
        from onnx import numpy_helper

        operand_values = {}
        for name in self.shape_operands(node):
            if name in self._work.values:
                element = self._work.types[name].element
                array = np.asarray(self._work.values[name], dtype=_NUMPY.get(element))
                operand_values[name] = numpy_helper.from_array(array, name)
        return operand_values

    def check(self, proto: onnx.NodeProto, versions: Mapping[str, int]) -> None:
        """Refuse a node that its operator cannot be called as; `outputs` does so, too.

        Raises:
            ModelError: the number of inputs or outputs, or an attribute.
        """
        check_call(proto, *self._operator(proto, versions)[1:], self._ir_version)

    def _operator(self, proto: onnx.NodeProto, versions: Mapping[str, int]) -> tuple[str, str, int]:
        """Type, domain and operator set version of a node."""
        domain = plain_domain(proto.domain)
        return proto.op_type, domain, versions.get(domain, self._versions.get(domain, 1))


def _standard_form(node: onnx.NodeProto) -> onnx.NodeProto:
    """A fused operator as the standard one whose shapes it shares, for inference; others as they are."""
    standard = _STANDARD_FORMS.get((node.domain, node.op_type))
    if standard is None:
        return node
    from onnx import NodeProto

    kept = [a for a in node.attribute if a.name not in ("activation", "activation_params")]
    return NodeProto(op_type=standard, input=node.input[:3], output=node.output, attribute=kept)


def plain_domain(domain: str) -> str:
    """An operator domain, the standard one always as the empty string."""
    return "" if domain == "ai.onnx" else domain


def _type_of(value: Array, kind: TensorType | None) -> TensorType | None:
    if kind is not None:
        return TensorType(value.shape, kind.element)
    element = next((number for number, dtype in _NUMPY.items() if value.dtype == dtype), None)
    return None if element is None else TensorType(value.shape, element)


def _expert_parts(node: WorkNode, work: WorkGraph, known: Mapping[str, Fraction]) -> dict[str, Fraction]:
    """Parts of a node's results, by name, that concern one expert of a mixture, each being picked equally often.

    Of the places that TopK chooses among E it is 1/E, and so of a one-hot of them or a comparison with one place.
    Results that have nothing to do with a choice among experts are absent; so are the scores that TopK chooses.

    Args:
        node: the node.
        work: types of its operands and results.
        known: parts of what earlier nodes make.
    """
    if not known and node.op != "TopK":
        return {}
    kinds = [work.types.get(name) for name in node.inputs]
    first = kinds[0] if kinds else None
    axis = node.attributes.get("axis", 0 if node.op == "ScatterElements" else -1)
    if first is None or not first.shape or not isinstance(axis, int):
        return {}
    if node.op == "TopK":
        return {name: Fraction(1, max(1, first.shape[axis])) for name in node.outputs[1:] if name}
    if node.op == "ScatterElements" and node.inputs[1] in known and kinds[1] is not None:
        return {node.outputs[0]: min(Fraction(1), known[node.inputs[1]] * kinds[1].shape[axis])}
    part = known.get(node.inputs[0])
    result, rule = work.types.get(node.outputs[0]), rule_of(node.op)
    if part is None or result is None:
        return {}
    if node.op in _MERGES:
        return {node.outputs[0]: min(Fraction(1), part * Fraction(first.elements, max(1, result.elements)))}
    follows = node.op in _MASKS or rule.rearranges or rule.hands_on
    return dict.fromkeys(filter(None, node.outputs), part) if follows else {}

"""Partly known types, and what the importer must know of operators to find shapes: tables, no arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.importers.onnx_graph.work import ELEMENT_TYPES, Array, TensorType, WorkNode

if TYPE_CHECKING:
    import onnx

_REDUCTIONS = (
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum",
    "ReduceLogSumExp", "ReduceSumSquare",
)  # fmt: skip

SHAPE_INPUTS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,), "Expand": (1,), "Slice": (1, 2, 3, 4), "Unsqueeze": (1,), "Squeeze": (1,), "Tile": (1,),
    "ConstantOfShape": (0,), "Range": (0, 1, 2), "Pad": (1, 3), "Resize": (1, 2, 3), "Upsample": (1,), "TopK": (1,),
    "OneHot": (1,), "Split": (1,), "SplitToSequence": (1,), "CenterCropPad": (1,), "Col2Im": (1, 2),
    "MaxUnpool": (2,), "AffineGrid": (1,), "DFT": (1, 2), "STFT": (1, 3), "HannWindow": (0,), "HammingWindow": (0,),
    "BlackmanWindow": (0,), "CumSum": (1,), "Trilu": (1,), "NonMaxSuppression": (2,), "SequenceAt": (1,),
    **dict.fromkeys(_REDUCTIONS, (1,)),
}  # fmt: skip
"""Input positions that carry a shape, an axis, a position or a count: needed by value, never by gradient."""

HEAVY = frozenset({
    "MatMul", "Gemm", "Conv", "ConvTranspose", "ConvInteger", "MatMulInteger", "QLinearMatMul", "QLinearConv", "Einsum",
    "DeformConv", "LSTM", "GRU", "RNN", "Attention", "com.microsoft.Attention", "com.microsoft.MultiHeadAttention",
    "com.microsoft.GroupQueryAttention", "com.microsoft.FusedMatMul", "com.microsoft.FusedGemm",
    "com.microsoft.MatMulNBits", "com.microsoft.MatMulBnb4", "com.microsoft.FusedConv", "com.microsoft.QGemm",
    "com.microsoft.QAttention", "com.microsoft.MatMulIntegerToFloat", "com.microsoft.DynamicQuantizeMatMul",
    "com.microsoft.MoE", "com.microsoft.QMoE", "com.microsoft.LongformerAttention",
    "com.microsoft.PackedAttention", "com.microsoft.DecoderMaskedMultiHeadAttention",
})  # fmt: skip
"""Operators whose work depends on shapes so much that a guess is worse than an error."""

_STANDARD_FORMS = {("com.microsoft", "FusedConv"): "Conv", ("com.microsoft", "Gelu"): "Gelu"}


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


def standard_form(node: onnx.NodeProto) -> onnx.NodeProto:
    """A fused operator as the standard one whose shapes it shares, for inference; others as they are."""
    standard = _STANDARD_FORMS.get((node.domain, node.op_type))
    if standard is None:
        return node
    from onnx import NodeProto

    form = NodeProto()
    form.CopyFrom(node)
    form.domain, form.op_type = "", standard
    if standard == "Conv":
        kept = [a for a in node.attribute if a.name not in ("activation", "activation_params")]
        del form.attribute[:]
        form.attribute.extend(kept)
        del form.input[3:]
    return form


def upper_bound(
    op: str, inputs: Sequence[TensorType | None], values: Mapping[str, Array], node: WorkNode
) -> list[TensorType] | None:
    """Types of operators whose result size depends on data, at its largest; None for all others."""
    first = inputs[0] if inputs else None
    if first is None:
        return None
    if op == "NonZero":
        return [TensorType((len(first.shape), first.elements), 7)]
    if op == "Compress":
        if "axis" not in node.attributes:
            return [TensorType((first.elements,), first.element)]
        return [first]
    if op == "Unique":
        count = first.elements
        if "axis" in node.attributes:
            axis = node.attributes["axis"]
            count = first.shape[axis] if isinstance(axis, int) else count
            return [first, *[TensorType((count,), 7)] * 3]
        return [TensorType((count,), first.element), *[TensorType((count,), 7)] * 3]
    if op == "NonMaxSuppression" and len(inputs) > 1 and inputs[1] is not None:
        batch, classes, boxes = inputs[1].shape
        limit = values.get(node.inputs[2]) if len(node.inputs) > 2 else None
        per_class = min(boxes, int(limit.reshape(-1)[0])) if limit is not None else boxes
        return [TensorType((batch * classes * per_class, 3), 7)]
    return None

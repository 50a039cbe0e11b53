"""Operators on pieces of tensors: which of them a rank can run without the other pieces, with which attributes.

An operator whose window, statistics or order crosses the cut is run by every rank on full tensors, and each rank keeps
its piece: the same result, but more communication than the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from planner.runtime.layouts import Layout, RankMesh, local_shape, piece_start
from planner.runtime.model_file import Step

Shapes = Mapping[str, tuple[int, ...]]
Pieces = list[torch.Tensor | None]


@dataclass(frozen=True)
class CutOperator:
    """An operator whose work is divided over a mesh of ranks.

    Attributes:
        step: the operator.
        reads: layouts of its operands, by position.
        writes: layouts of its results, by position.
        shapes: shapes of full tensors, by name.
        mesh: the group of ranks.
        values: values of integer operands (shapes, axes), by position; None for all other operands.
    """

    step: Step
    reads: tuple[Layout, ...]
    writes: tuple[Layout, ...]
    shapes: Shapes
    mesh: RankMesh
    values: tuple[torch.Tensor | None, ...] = ()

    def cut_dims(self, layout: Layout) -> set[int]:
        """Dimensions that a layout divides."""
        return {part.dim for part in layout if part.kind == "S"}

    def shape(self, position: int) -> tuple[int, ...]:
        """Shape of a full operand."""
        return self.shapes[self.step.inputs[position]]

    def result_shape(self, position: int = 0) -> tuple[int, ...]:
        """Shape of a rank's piece of a result."""
        return local_shape(self.shapes[self.step.outputs[position]], self.writes[position], self.mesh)

    def partial(self) -> bool:
        """Whether the first result comes out as a partial sum."""
        return any(part.kind == "P" for part in self.writes[0])

    def adds(self, position: int) -> bool:
        """Whether this rank contributes an operand to a partial sum: of ranks with equal copies only one does."""
        places = zip(self.writes[0], self.reads[position], self.mesh.coordinates, strict=True)
        return all(at == 0 for written, read, at in places if written.kind == "P" and read.kind != "P")

    def axes(self, position: int, attribute: str) -> list[int] | None:
        """Axes given by an operand or an attribute; None where neither is there."""
        held = self.values[position] if position < len(self.values) else None
        axes = held.reshape(-1).tolist() if held is not None else self.step.attributes.get(attribute)
        rank = len(self.shape(0))
        return None if axes is None else [int(a) % rank for a in axes]


PieceRule = Callable[[CutOperator, Pieces], tuple[Step, Pieces] | None]
"""Gives operator and operands as a rank runs them on its pieces; None where full tensors are needed."""

_RULES: dict[str, PieceRule] = {}


def _for(*names: str) -> Callable[[PieceRule], PieceRule]:
    def add(function: PieceRule) -> PieceRule:
        _RULES.update(dict.fromkeys(names, function))
        return function

    return add


def local_form(cut: CutOperator, pieces: Sequence[torch.Tensor | None]) -> tuple[Step, Pieces] | None:
    """Operator and operands as a rank runs them on its pieces; None where full tensors are needed."""
    rule = _RULES.get(cut.step.op)
    return rule(cut, list(pieces)) if rule else None


ELEMENTWISE = (
    "Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "Cast", "CastLike", "Ceil", "Celu", "Clip",
    "Cos", "Cosh", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid",
    "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish",
    "Mod", "Mul", "Neg", "Not", "Or", "Pow", "PRelu", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid",
    "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu",
    "Where", "Xor", "com.microsoft.BiasGelu", "com.microsoft.FastGelu", "com.microsoft.Gelu", "com.microsoft.QuickGelu",
)  # fmt: skip
"""Operators that compute each element of the result from the elements at the same place of the broadcast operands."""


@_for(
    *ELEMENTWISE, "MatMul", "SwiGLU", "Transpose", "Einsum", "com.microsoft.FusedMatMul", "Squeeze", "Unsqueeze",
)  # fmt: skip
def _as_it_is(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    return cut.step, pieces


def _contracted_alike(cut: CutOperator, dims: tuple[int, int]) -> bool:
    """Whether each mesh axis cuts the summed dimension of both operands, or of none."""
    cuts = [[part.kind == "S" and part.dim == d for part in cut.reads[p]] for p, d in enumerate(dims)]
    return cuts[0] == cuts[1]


@_for("Gemm")
def _gemm(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    attributes = cut.step.attributes
    summed = (0 if attributes.get("transA", 0) else 1, 1 if attributes.get("transB", 0) else 0)
    return _with_bias(cut, pieces) if _contracted_alike(cut, summed) else None


def _with_bias(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces]:
    """The operator as it is; of ranks that have partial sums only one adds the bias."""
    bias = pieces[2] if len(pieces) > 2 else None
    if bias is not None and not cut.adds(2):
        pieces[2] = bias * 0
    return cut.step, pieces


@_for("Conv")
def _conv(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    spatial = cut.cut_dims(cut.reads[0]) - {0, 1} or cut.cut_dims(cut.reads[1]) - {0, 1}
    grouped = cut.step.attributes.get("group", 1) != 1
    by_channel = cut.cut_dims(cut.reads[1]) or 1 in cut.cut_dims(cut.reads[0])
    if spatial or (by_channel if grouped else not _contracted_alike(cut, (1, 1))):
        return None
    return _with_bias(cut, pieces)


@_for("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")
def _pool(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    return None if cut.cut_dims(cut.reads[0]) - {0, 1} else (cut.step, pieces)


@_for("BatchNormalization")
def _batch_norm(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    shared = {1} if cut.step.attributes.get("training_mode", 0) else {0, 1}
    return None if cut.cut_dims(cut.reads[0]) - shared else (cut.step, pieces)


@_for("InstanceNormalization")
def _instance_norm(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    return None if cut.cut_dims(cut.reads[0]) - {0, 1} else (cut.step, pieces)


@_for("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
def _layer_norm(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    rank = len(cut.shape(0))
    return None if any(d >= int(cut.step.attributes.get("axis", -1)) % rank for d in cut.cut_dims(cut.reads[0])) else (
        cut.step, pieces
    )  # fmt: skip


@_for("Softmax", "LogSoftmax", "LpNormalization")
def _softmax(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    axis = int(cut.step.attributes.get("axis", -1)) % len(cut.shape(0))
    old = cut.step.opset < 13 and cut.step.op != "LpNormalization"
    return None if old or axis in cut.cut_dims(cut.reads[0]) else (cut.step, pieces)


@_for("Reshape", "Flatten", "Expand")
def _reshape(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    if cut.step.op == "Flatten":
        step = replace(cut.step, op="Reshape", attributes={"allowzero": 1, "shape": list(cut.result_shape())})
        return step, pieces[:1]
    attributes = {**cut.step.attributes, "allowzero": 1}
    return replace(cut.step, attributes=attributes), [pieces[0], torch.tensor(cut.result_shape())]


@_for("Split")
def _split(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    axis = int(cut.step.attributes.get("axis", 0)) % len(cut.shape(0))
    sizes = [cut.result_shape(k)[axis] for k in range(len(cut.step.outputs))]
    whole = pieces[0]
    if whole is None or sum(sizes) != whole.shape[axis]:
        return None
    runs = {part.runs for part in cut.reads[0] if part.kind == "S" and part.dim == axis}
    if runs and runs != {len(sizes)}:
        return None
    return replace(cut.step, attributes={"axis": axis, "split": sizes}), [whole]


@_for("Concat")
def _concat(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    axis = int(cut.step.attributes["axis"]) % len(cut.shapes[cut.step.outputs[0]])
    return None if any(axis in cut.cut_dims(layout) for layout in cut.reads) else (cut.step, pieces)


@_for("Slice", "Pad")
def _slice(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    rank = len(cut.shape(0))
    axes = cut.axes(3, "axes")
    touched = set(range(rank) if axes is None else axes)
    return None if cut.cut_dims(cut.reads[0]) & touched else (cut.step, pieces)


@_for("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare", "ReduceL2")
def _reduction(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    axes = cut.axes(1, "axes")
    reduced = set(range(len(cut.shape(0)))) if not axes else set(axes)
    additive = cut.step.op in ("ReduceSum", "ReduceSumSquare") and cut.partial()
    return None if cut.cut_dims(cut.reads[0]) & reduced and not additive else (cut.step, pieces)


@_for("Gather")
def _gather(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    axis = int(cut.step.attributes.get("axis", 0)) % len(cut.shape(0))
    table, places = pieces[0], pieces[1]
    if axis not in cut.cut_dims(cut.reads[0]):
        return cut.step, pieces
    if axis or not cut.partial() or table is None or places is None or table.dim() != 2:
        return None
    first = piece_start(cut.shape(0), cut.reads[0], cut.mesh, 0)
    own = (places >= first) & (places < first + table.shape[0])
    # Rows of other ranks are looked up in a row of zeros behind the last one.
    rows = torch.where(own, places - first, torch.full_like(places, table.shape[0]))
    return cut.step, [torch.cat([table, table.new_zeros(1, table.shape[1])]), rows]


@_for("Attention")
def _attention(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    layouts = [layout for layout, name in zip(cut.reads, cut.step.inputs, strict=False) if name]
    if len(cut.shape(0)) != 4 or any(cut.cut_dims(layout) - {0, 1} for layout in layouts[:3]):
        return None
    return (cut.step, pieces) if len({tuple(layout) for layout in layouts[:3]}) == 1 else None


@_for("RotaryEmbedding")
def _rotary(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    if len(cut.shape(0)) != 4 or any(cut.cut_dims(layout) - {0, 1} for layout in cut.reads[:1]):
        return None
    return None if any(cut.cut_dims(layout) for layout in cut.reads[1:]) and len(cut.step.inputs) < 4 else (
        cut.step, pieces
    )  # fmt: skip


@_for("CausalConvWithState")
def _causal_conv(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    return None if cut.cut_dims(cut.reads[0]) - {0, 1} else (cut.step, pieces)


@_for("LinearAttention", "shardplan.StateSpaceScan")
def _scan(cut: CutOperator, pieces: Pieces) -> tuple[Step, Pieces] | None:
    """Samples or heads of a recurrence, each rank with the keys of its heads; attributes count the heads."""
    counts = (
        {"q_num_heads": 0, "kv_num_heads": 1} if cut.step.op == "LinearAttention" else {"num_heads": 0, "num_groups": 1}
    )
    by_head = [cut.cut_dims(layout) for layout in cut.reads[:3]]
    uneven = any(part.runs > 1 for layout in cut.reads[:3] for part in layout)
    if uneven or by_head.count(by_head[0]) < len(by_head) or by_head[0] - {0, 2}:
        return None
    attributes = dict(cut.step.attributes)
    for name, position in counts.items():
        piece, width = pieces[position], cut.shape(position)[2] // int(attributes[name])
        if piece is None or piece.shape[2] % width:
            return None
        attributes[name] = piece.shape[2] // width
    return (replace(cut.step, attributes=attributes), pieces) if all(attributes[name] for name in counts) else None

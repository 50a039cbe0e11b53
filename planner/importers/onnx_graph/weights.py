"""Find the parameters: which stored tensors are trained, who owns them, and what to call them.

The exporter's signature decides where it is stored. Else a tensor is a parameter when it is of a float type (or
quantised), has at least one dimension, and reaches a slot where operators take weights, directly or through constant
nodes that only rearrange it (transpose, slice, cast, dequantise).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from planner.importers.onnx_graph.work import Weight, WorkGraph, WorkNode
from planner.importers.types import ImportOptions

_MATRIX, _BIAS, _TABLE, _ADDED, _SCALE, _OTHER = "weight", "bias", "table", "added", "scale", "other"
_MEAN, _VARIANCE, _QUANTIZATION = "running_mean", "running_var", "quantization"

_RECURRENT = {1: "weight_ih", 2: "weight_hh", 3: _BIAS, 7: "weight_peephole"}
_NORM = {1: "weight", 2: _BIAS}
WEIGHT_SLOTS: dict[str, dict[int, str]] = {
    "MatMul": {0: _MATRIX, 1: _MATRIX}, "Gemm": {0: _MATRIX, 1: _MATRIX, 2: _BIAS},
    "Conv": {1: _MATRIX, 2: _BIAS}, "ConvTranspose": {1: _MATRIX, 2: _BIAS}, "DeformConv": {1: _MATRIX, 3: _BIAS},
    "ConvInteger": {1: _MATRIX}, "MatMulInteger": {0: _MATRIX, 1: _MATRIX},
    "QLinearMatMul": {3: _MATRIX, 4: _QUANTIZATION}, "QLinearConv": {3: _MATRIX, 4: _QUANTIZATION, 8: _BIAS},
    "BatchNormalization": {**_NORM, 3: _MEAN, 4: _VARIANCE}, "InstanceNormalization": _NORM,
    "GroupNormalization": _NORM, "LayerNormalization": _NORM, "RMSNormalization": {1: "weight"},
    "SimplifiedLayerNormalization": {1: "weight"}, "PRelu": {1: "weight"},
    "Gather": {0: _TABLE}, "GatherND": {0: _TABLE}, "GatherElements": {0: _TABLE},
    "LSTM": _RECURRENT, "GRU": _RECURRENT, "RNN": _RECURRENT, "Einsum": dict.fromkeys(range(8), _MATRIX),
    "Add": {0: _ADDED, 1: _ADDED}, "Sub": {1: _ADDED}, "Mul": {0: _SCALE, 1: _SCALE}, "Div": {1: _SCALE},
    "com.microsoft.Attention": {1: _MATRIX, 2: _BIAS}, "com.microsoft.QAttention": {1: _MATRIX, 2: _BIAS},
    "com.microsoft.PackedAttention": {1: _MATRIX, 2: _BIAS}, "com.microsoft.MultiHeadAttention": {3: _BIAS},
    "com.microsoft.SkipLayerNormalization": {2: "weight", 3: _BIAS, 4: _BIAS},
    "com.microsoft.SkipSimplifiedLayerNormalization": {2: "weight", 3: _BIAS},
    "com.microsoft.SimplifiedLayerNormalization": {1: "weight"},
    "com.microsoft.EmbedLayerNormalization": {2: _TABLE, 3: _TABLE, 4: _TABLE, 5: "weight", 6: _BIAS},
    "com.microsoft.GroupNorm": _NORM, "com.microsoft.SkipGroupNorm": {**_NORM, 4: _BIAS},
    "com.microsoft.BiasGelu": {1: _BIAS}, "com.microsoft.FastGelu": {1: _BIAS}, "com.microsoft.BiasAdd": {1: _BIAS},
    "com.microsoft.BiasSplitGelu": {1: _BIAS}, "com.microsoft.BiasDropout": {1: _BIAS},
    "com.microsoft.FusedMatMul": {0: _MATRIX, 1: _MATRIX}, "com.microsoft.TransposeMatMul": {0: _MATRIX, 1: _MATRIX},
    "com.microsoft.FusedMatMulActivation": {0: _MATRIX, 1: _MATRIX},
    "com.microsoft.FusedGemm": {1: _MATRIX, 2: _BIAS}, "com.microsoft.GemmFastGelu": {1: _MATRIX, 2: _BIAS},
    "com.microsoft.FusedConv": {1: _MATRIX, 2: _BIAS},
    "com.microsoft.MatMulNBits": {1: _MATRIX, 2: _QUANTIZATION, 3: _QUANTIZATION, 5: _BIAS},
    "com.microsoft.MatMulBnb4": {1: _MATRIX, 2: _QUANTIZATION},
    "com.microsoft.MatMulIntegerToFloat": {1: _MATRIX, 3: _QUANTIZATION, 6: _BIAS},
    "com.microsoft.DynamicQuantizeMatMul": {1: _MATRIX, 2: _QUANTIZATION, 4: _BIAS},
    "com.microsoft.GatherBlockQuantized": {0: _TABLE, 2: _QUANTIZATION},
    "com.microsoft.MoE": {2: _MATRIX, 3: _BIAS, 4: _MATRIX, 5: _BIAS, 6: _MATRIX, 7: _BIAS},
    "com.microsoft.QMoE": {
        2: _MATRIX, 3: _QUANTIZATION, 4: _BIAS, 5: _MATRIX, 6: _QUANTIZATION, 7: _BIAS, 8: _MATRIX, 9: _QUANTIZATION,
        10: _BIAS,
    },
}  # fmt: skip
"""For each operator, the input positions that take weights and what a weight there is."""

_REARRANGING = frozenset({
    "Identity", "Cast", "CastLike", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Slice", "Expand",
    "Tile", "Pad", "Split", "Gather", "GatherND", "GatherElements", "DequantizeLinear",
    "com.microsoft.DequantizeLinear", "QuantizeLinear",
})  # fmt: skip
_JOINING = frozenset({
    "Concat", "Add", "Sub", "Mul", "Div", "MatMul", "Gemm", "Sum", "Sqrt", "Pow", "Einsum", "ReduceSum", "ReduceMean",
    "ReduceL2", "Neg", "Reciprocal", "Conv",
})  # fmt: skip
_ANONYMOUS = re.compile(r"^(_?val_?\d+|onnx::|\d+$|const|.*Constant(_\d+)?(_output_\d+)?$|ortshared)", re.IGNORECASE)
_DOTTED = re.compile(r"^[A-Za-z_]\w*(\.\w+)+$")
BUFFER_NAMES = re.compile(
    r"(inv_freq|freqs_cis|(cos|sin)_cache|(cos|sin)_cached|position_ids|causal_mask|attn_mask|masked_bias|"
    r"num_batches_tracked|relative_position_index|token_type_ids)"
)
_SUFFIX = {_TABLE: "weight", _ADDED: "bias", _SCALE: "weight", _OTHER: "weight", _QUANTIZATION: "scale"}


@dataclass(frozen=True, slots=True)
class Use:
    """One stored tensor reaching one input of one node."""

    node: WorkNode
    slot: int
    tensor: str
    stored: str
    role: str
    quantized: bool = False
    flipped: bool = False


def find_weights(graph: WorkGraph, options: ImportOptions) -> None:
    """Fill `weights` and `weight_sources` from every constant tensor that a node reads."""
    by_tensor: dict[str, dict[str, None]] = {}
    for use in uses(graph):
        found = graph.weights.get(use.stored) or _weight(graph, use)
        if found is None:
            continue
        graph.weights.setdefault(use.stored, found)
        by_tensor.setdefault(use.tensor, {})[use.stored] = None
    graph.weight_sources = {tensor: tuple(names) for tensor, names in by_tensor.items()}
    frozen = [w for w in graph.weights.values() if not w.trainable and not graph.types[w.name].dtype.is_float]
    if frozen:
        graph.warn(
            "quantised-weights",
            f"quantised integer weights cannot be trained as they are; {len(frozen)} count as frozen",
            frozen[0].name,
        )


def uses(graph: WorkGraph) -> Iterator[Use]:
    """Every stored tensor that reaches a node, in order of nodes."""
    memo: dict[tuple[str, str], tuple[tuple[str, str, bool, bool], ...]] = {}
    for node in graph.nodes:
        slots = WEIGHT_SLOTS.get(node.op, {})
        for slot, tensor in enumerate(node.inputs):
            if tensor and graph.is_constant(tensor):
                role = slots.get(slot, _OTHER)
                for stored, final, quantized, flipped in _trace(graph, tensor, role, memo):
                    yield Use(node, slot, tensor, stored, final, quantized, flipped)


def _trace(
    graph: WorkGraph, tensor: str, role: str, memo: dict[tuple[str, str], tuple[tuple[str, str, bool, bool], ...]]
) -> tuple[tuple[str, str, bool, bool], ...]:
    """Stored tensors behind a constant one: (name, role, dequantised on the way, last two axes swapped on the way)."""
    if tensor not in graph.region:
        return ((tensor, role, False, False),) if tensor in graph.stored else ()
    key = (tensor, role)
    if key in memo:
        return memo[key]
    node = graph.region[tensor]
    if node.op in ("Shape", "Size"):
        return ()
    found: dict[tuple[str, str, bool, bool], None] = {}
    flips = node.op == "Transpose" and _swaps_last(node, len(graph.types[tensor].shape))
    dequantizes = node.op.endswith("DequantizeLinear")
    for slot, name in enumerate(node.inputs):
        if not name:
            continue
        for stored, inner, quantized, flipped in _trace(graph, name, _role_inside(node, slot, role), memo):
            found[stored, inner, quantized or (dequantizes and slot == 0), flipped != flips] = None
    memo[key] = tuple(found)
    return memo[key]


def _role_inside(node: WorkNode, slot: int, role: str) -> str:
    if node.op.endswith("DequantizeLinear") and slot > 0:
        return _QUANTIZATION
    if node.op in _REARRANGING:
        if slot > 0:
            return _OTHER
        return _TABLE if node.op.startswith("Gather") and role in (_ADDED, _OTHER) else role
    return role if node.op in _JOINING else _OTHER


def _swaps_last(node: WorkNode, rank: int) -> bool:
    perm = node.attributes.get("perm", tuple(reversed(range(rank))))
    return isinstance(perm, tuple) and rank >= 2 and perm[-1] != rank - 1


def _weight(graph: WorkGraph, use: Use) -> Weight | None:
    name, kind = use.stored, graph.kinds.get(use.stored, "")
    stored = graph.types[name]
    is_buffer = kind == "BUFFER" or use.role in (_MEAN, _VARIANCE)
    if kind in ("CONSTANT_TENSOR", "TOKEN", "USER_INPUT") or not stored.shape:
        return None
    if kind != "PARAMETER" and not _plausible(graph, use, is_buffer):
        return None
    trainable = stored.dtype.is_float and not is_buffer and use.role != _QUANTIZATION
    label = _label(graph, use)
    module = label.rpartition(".")[0] if is_path(label) else use.node.scope.module or ""
    return Weight(name, label, module, trainable, _is_transposed(graph, use))


def _plausible(graph: WorkGraph, use: Use, is_buffer: bool) -> bool:
    """Whether a tensor that the file does not call a parameter is one, by type, shape, slot and name."""
    stored = graph.types[use.stored]
    quantised = use.quantized or use.role == _QUANTIZATION or use.node.op in _INTEGER_OPERATORS
    if not stored.dtype.is_float and not (quantised and stored.dtype.value.startswith(("int", "uint"))):
        return False
    if use.role in (_MEAN, _VARIANCE):
        return True
    if BUFFER_NAMES.search(use.stored):
        return False
    if use.role == _OTHER:
        return is_path(use.stored) and (use.node.op == "Concat" or use.stored.endswith((".weight", ".bias")))
    vector = sum(size > 1 for size in stored.shape) == 1
    if use.role in (_ADDED, _SCALE):
        if is_buffer or _looks_like_a_mask(graph, use.stored):
            return False
        return vector if not is_path(use.stored) else True
    if use.role == _TABLE:
        return len(stored.shape) >= 2 and not is_buffer
    if use.role == _MATRIX and use.node.op in ("MatMul", "Einsum") and len(stored.shape) >= 3:
        return 1 not in stored.shape[-2:]
    return True


def _looks_like_a_mask(graph: WorkGraph, name: str) -> bool:
    value = graph.values.get(name)
    return value is not None and value.dtype.kind == "f" and bool((value <= _MASKED).any())


_MASKED = -1e4
_INTEGER_OPERATORS = frozenset({
    "ConvInteger", "MatMulInteger", "QLinearMatMul", "QLinearConv", "com.microsoft.MatMulNBits",
    "com.microsoft.MatMulBnb4", "com.microsoft.MatMulIntegerToFloat", "com.microsoft.DynamicQuantizeMatMul",
    "com.microsoft.QAttention", "com.microsoft.QMoE", "com.microsoft.GatherBlockQuantized",
})  # fmt: skip


def is_anonymous(name: str) -> bool:
    """Whether an exporter made the name up."""
    return bool(_ANONYMOUS.match(name))


def is_path(name: str) -> bool:
    """Whether a name is a parameter's path in its model, `h.0.attn.weight`."""
    return bool(_DOTTED.match(name)) and not is_anonymous(name) and not _is_result(name)


def _is_result(name: str) -> bool:
    """Whether a path ends in an operation (`h.0.attn.transpose_3`): an optimiser stored what an operator computed."""
    return re.sub(r"(_\d+)?$", "", name.rpartition(".")[2]).lower() in _operation_names()


@functools.cache
def _operation_names() -> frozenset[str]:
    from onnx import defs

    return frozenset(schema.name.lower() for schema in defs.get_all_schemas())


def _label(graph: WorkGraph, use: Use) -> str:
    origin = graph.origins.get(use.stored, ())
    if len(origin) == 1:
        return origin[0]
    if not is_anonymous(use.stored) or not use.node.scope.module:
        return use.stored
    return own_label(use)


def own_label(use: Use) -> str:
    """What a weight is called after the module of the node that uses it."""
    return f"{use.node.scope.module}.{_SUFFIX.get(use.role, use.role)}"


def _is_transposed(graph: WorkGraph, use: Use) -> bool:
    """Whether the file holds (in, out) where the module has (out, in)."""
    if not is_anonymous(use.stored) or "Conv1D" in use.node.scope.module_class or use.flipped:
        return False
    if use.node.op == "Gemm":
        return use.slot == 1 and not use.node.attributes.get("transB", 0)
    return use.node.op == "MatMul" and use.slot == 1 and len(graph.types[use.stored].shape) == 2

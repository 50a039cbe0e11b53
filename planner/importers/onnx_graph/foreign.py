"""Output shapes of fused operators that ONNX's own inference does not know.

Each rule gets the node and its input types, and returns output types by position (None where it does
not say). Layouts: b batch, s sequence, h hidden, n heads, d head size, as the operators' documentation has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from planner.importers.onnx_graph.shapes import Partial
from planner.importers.onnx_graph.work import TensorType, WorkNode

Inputs = Sequence[TensorType | None]
Rule = Callable[[WorkNode, Inputs], list[Partial | None]]


def infer_foreign(node: WorkNode, inputs: Inputs) -> list[Partial | None] | None:
    """Output types by our own rules; None when there is no rule for the operator or it does not apply."""
    rule = _RULES.get(node.op)
    if rule is None:
        return None
    try:
        return rule(node, inputs)
    except (IndexError, ValueError, KeyError, AttributeError, ZeroDivisionError):
        return [None] * len(node.outputs)


def _like(kind: TensorType | None, shape: Sequence[int | None] | None = None) -> Partial | None:
    if kind is None:
        return None
    return Partial(tuple(kind.shape if shape is None else shape), kind.element)


def _int(node: WorkNode, name: str, default: int = 0) -> int:
    value = node.attributes.get(name, default)
    return value if isinstance(value, int) else default


def _at(inputs: Inputs, position: int) -> TensorType | None:
    return inputs[position] if position < len(inputs) else None


def _need(inputs: Inputs, position: int) -> TensorType:
    kind = _at(inputs, position)
    if kind is None:
        raise ValueError(f"input {position} is absent")
    return kind


def _same(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    return [_like(_need(inputs, 0))]


def _normalization(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    x = _need(inputs, 0)
    axis = _int(node, "axis", -1) % len(x.shape)
    statistics = Partial((*x.shape[:axis], *[1] * (len(x.shape) - axis)), 1)
    return [_like(x), statistics, statistics]


def _skip_normalization(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    x = _need(inputs, 0)
    statistics = Partial((*x.shape[:-1], 1), 1)
    return [_like(x), statistics, statistics, _like(x)]


def _broadcast(a: Sequence[int], b: Sequence[int]) -> list[int]:
    width = max(len(a), len(b))
    pairs = zip([1] * (width - len(a)) + list(a), [1] * (width - len(b)) + list(b), strict=True)
    return [y if x == 1 else x for x, y in pairs]


def _elementwise(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    a, b = _need(inputs, 0), _need(inputs, 1)
    return [_like(a, _broadcast(a.shape, b.shape))]


def _fused_matmul(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    a, b = _need(inputs, 0), _need(inputs, 1)
    left, right = _matrix(a.shape, node, "A"), _matrix(b.shape, node, "B")
    return [_like(a, [*_broadcast(left[:-2], right[:-2]), left[-2], right[-1]])]


def _matrix(shape: tuple[int, ...], node: WorkNode, side: str) -> list[int]:
    dims = list(shape)
    if _int(node, f"transBatch{side}"):
        dims = [*dims[1:-1], dims[0], dims[-1]]
    if _int(node, f"trans{side}"):
        dims[-2], dims[-1] = dims[-1], dims[-2]
    return dims


def _fused_gemm(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    a, b = _need(inputs, 0), _need(inputs, 1)
    rows = a.shape[1] if _int(node, "transA") else a.shape[0]
    columns = b.shape[0] if _int(node, "transB") else b.shape[1]
    return [_like(a, (rows, columns))]


def _matmul_nbits(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    a = _need(inputs, 0)
    return [_like(a, (*a.shape[:-1], _int(node, "N")))]


def _quantized_matmul(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    a, b = _need(inputs, 0), _need(inputs, 1)
    scale = _need(inputs, 2)
    return [_like(scale, [*_broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]])]


def _dynamic_quantize_matmul(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    a, b = _need(inputs, 0), _need(inputs, 1)
    return [_like(a, [*_broadcast(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1]])]


def _attention(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    x, weight = _need(inputs, 0), _at(inputs, 1)
    sizes = node.attributes.get("qkv_hidden_sizes")
    hidden = int(sizes[2]) if isinstance(sizes, tuple) and len(sizes) == 3 else _need(inputs, 1).shape[1] // 3
    batch, sequence = x.shape[0], x.shape[1]
    past = _at(inputs, 4)
    total = sequence + (past.shape[3] if past is not None else 0)
    heads = _int(node, "num_heads", 1)
    present = Partial((2, batch, heads, total, hidden // heads), x.element) if weight is not None else None
    return [_like(x, (batch, sequence, hidden)), present]


def _multi_head_attention(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    query, key, value = _need(inputs, 0), _at(inputs, 1), _at(inputs, 2)
    heads = _int(node, "num_heads", 1)
    if value is not None:
        hidden = value.shape[2] if len(value.shape) == 3 else value.shape[1] * value.shape[3]
        memory = value.shape[1] if len(value.shape) == 3 else value.shape[2]
    elif key is not None:
        hidden, memory = key.shape[2] * key.shape[4], key.shape[1]
    else:
        hidden, memory = query.shape[2] * query.shape[4], query.shape[1]
    past = _at(inputs, 6)
    total = memory + (past.shape[2] if past is not None else 0)
    present = Partial((query.shape[0], heads, total, hidden // heads), query.element)
    return [_like(query, (query.shape[0], query.shape[1], hidden)), present, present]


def _group_query_attention(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    query, key, past = _need(inputs, 0), _at(inputs, 1), _at(inputs, 3)
    heads, groups = _int(node, "num_heads", 1), _int(node, "kv_num_heads", 1)
    batch, sequence, width = query.shape
    head = width // heads if key is not None else width // (heads + 2 * groups)
    total = max(past.shape[2], sequence) if past is not None else sequence
    present = Partial((batch, groups, total, head), query.element)
    return [_like(query, (batch, sequence, heads * head)), present, present]


def _packed_attention(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    x, weight = _need(inputs, 0), _need(inputs, 1)
    return [_like(x, (*x.shape[:-1], weight.shape[1] // 3))]


def _quantized_attention(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    x, weight, scale = _need(inputs, 0), _need(inputs, 1), _need(inputs, 3)
    return [_like(scale, (*x.shape[:-1], weight.shape[1] // 3))]


def _embed_normalization(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    ids, table = _need(inputs, 0), _need(inputs, 2)
    embedded = _like(table, (*ids.shape, table.shape[1]))
    return [embedded, Partial((ids.shape[0],), 6), embedded]


def _split_gelu(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    x = _need(inputs, 0)
    return [_like(x, (*x.shape[:-1], x.shape[-1] // 2))]


def _dropout(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    x = _need(inputs, 0)
    return [_like(x), Partial(x.shape, 9)]


def _gather_quantized(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    data, ids, scales = _need(inputs, 0), _need(inputs, 1), _need(inputs, 2)
    axis = _int(node, "gather_axis") % len(data.shape)
    shape = [*data.shape[:axis], *ids.shape, *data.shape[axis + 1 :]]
    packed = _int(node, "bits", 4) if data.dtype.bits == 8 else 8
    shape[-1] *= 8 // packed
    return [_like(scales, shape)]


def _flat_loss(node: WorkNode, inputs: Inputs) -> list[Partial | None]:
    x = _need(inputs, 0)
    return [Partial((), x.element), Partial((math.prod(x.shape[:-1]), x.shape[-1]), x.element)]


_RULES: dict[str, Rule] = {
    "Dropout": _dropout,
    "SimplifiedLayerNormalization": _normalization,
    "com.microsoft.SimplifiedLayerNormalization": _normalization,
    "com.microsoft.LayerNormalization": _normalization,
    "com.microsoft.SkipLayerNormalization": _skip_normalization,
    "com.microsoft.SkipSimplifiedLayerNormalization": _skip_normalization,
    "com.microsoft.EmbedLayerNormalization": _embed_normalization,
    "com.microsoft.GroupNorm": _same,
    "com.microsoft.SkipGroupNorm": lambda node, inputs: [_like(_need(inputs, 0)), _like(_need(inputs, 0))],
    "com.microsoft.BiasGelu": _same,
    "com.microsoft.FastGelu": _same,
    "com.microsoft.Gelu": _same,
    "com.microsoft.QuickGelu": _same,
    "com.microsoft.BiasAdd": _same,
    "com.microsoft.BiasSplitGelu": _split_gelu,
    "com.microsoft.BiasSoftmax": _same,
    "com.microsoft.BiasDropout": _dropout,
    "com.microsoft.BitmaskDropout": _dropout,
    "com.microsoft.RotaryEmbedding": _same,
    "com.microsoft.FusedMatMul": _fused_matmul,
    "com.microsoft.TransposeMatMul": _fused_matmul,
    "com.microsoft.FusedMatMulActivation": _fused_matmul,
    "com.microsoft.FusedGemm": _fused_gemm,
    "com.microsoft.GemmFastGelu": _dynamic_quantize_matmul,
    "com.microsoft.MatMulNBits": _matmul_nbits,
    "com.microsoft.MatMulBnb4": _matmul_nbits,
    "com.microsoft.MatMulIntegerToFloat": _quantized_matmul,
    "com.microsoft.DynamicQuantizeMatMul": _dynamic_quantize_matmul,
    "com.microsoft.GatherBlockQuantized": _gather_quantized,
    "com.microsoft.Attention": _attention,
    "com.microsoft.QAttention": _quantized_attention,
    "com.microsoft.PackedAttention": _packed_attention,
    "com.microsoft.MultiHeadAttention": _multi_head_attention,
    "com.microsoft.DecoderMaskedMultiHeadAttention": _multi_head_attention,
    "com.microsoft.GroupQueryAttention": _group_query_attention,
    "com.microsoft.SparseAttention": _group_query_attention,
    "com.microsoft.MoE": _same,
    "com.microsoft.QMoE": _same,
    "com.microsoft.Trilu": _same,
    "com.microsoft.Inverse": _same,
    "com.microsoft.QLinearAdd": lambda node, inputs: _elementwise(node, [_need(inputs, 0), _need(inputs, 3)]),
    "com.microsoft.QLinearMul": lambda node, inputs: _elementwise(node, [_need(inputs, 0), _need(inputs, 3)]),
    "com.microsoft.QLinearSigmoid": _same,
    "com.microsoft.QLinearLeakyRelu": _same,
    "com.microsoft.QuantizeLinear": lambda node, inputs: [_quantized(inputs)],
    "com.microsoft.DequantizeLinear": lambda node, inputs: [_like(_need(inputs, 1), _need(inputs, 0).shape)],
    "com.microsoft.SoftmaxCrossEntropyLossInternal": _flat_loss,
}


def _quantized(inputs: Inputs) -> Partial | None:
    zero_point = _at(inputs, 2)
    return Partial(_need(inputs, 0).shape, zero_point.element if zero_point is not None else 2)

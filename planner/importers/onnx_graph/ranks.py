"""Hold tensors and attributes against operators where ONNX does not: dimensions of inputs, windows, counts of heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.importers.onnx_graph.work import TensorType, WorkNode

_Ranks = dict[int, tuple[int, ...]]
_MATRIX: tuple[int, ...] = (2,)
_THREE: tuple[int, ...] = (3,)
_FOUR: tuple[int, ...] = (4,)
_MASK: tuple[int, ...] = (1, 2, 3, 4)
_GROUPED: _Ranks = {0: _THREE, 1: _THREE, 2: _THREE, 3: _FOUR, 4: _FOUR}
_CELL: _Ranks = {0: _THREE, 1: _THREE, 2: _THREE}
_RANKS: dict[str, _Ranks] = {
    "LSTM": _CELL, "GRU": _CELL, "RNN": _CELL,
    "com.microsoft.Attention": {0: _THREE, 1: _MATRIX, 3: _MASK, 4: (5,), 5: _MASK},
    "com.microsoft.QAttention": {0: _THREE, 1: _MATRIX, 5: _MASK, 8: (5,)},
    "com.microsoft.PackedAttention": {0: _MATRIX, 1: _MATRIX},
    "com.microsoft.MultiHeadAttention": {
        0: (3, 5), 1: (3, 4, 5), 2: (3, 4), 4: _MASK, 5: _MASK, 6: _FOUR, 7: _FOUR,
    },
    "com.microsoft.DecoderMaskedMultiHeadAttention": {0: (3, 5), 1: (3, 4, 5), 2: (3, 4)},
    "com.microsoft.GroupQueryAttention": _GROUPED,
    "com.microsoft.SparseAttention": _GROUPED,
    "com.microsoft.EmbedLayerNormalization": {0: _MATRIX, 2: _MATRIX, 3: _MATRIX, 4: _MATRIX},
    "com.microsoft.FusedGemm": {0: _MATRIX, 1: _MATRIX},
    "com.microsoft.MoE": {0: (2, 3), 1: _MATRIX, 2: _THREE, 4: _THREE, 6: _THREE},
    "com.microsoft.QMoE": {0: (2, 3), 1: _MATRIX, 2: _THREE, 5: _THREE, 8: _THREE},
}  # fmt: skip
"""The numbers of dimensions that an input may have, by its position."""

_WINDOWED = {
    "Conv": 1, "ConvTranspose": 1, "ConvInteger": 1, "com.microsoft.FusedConv": 1, "QLinearConv": 3, "MaxPool": None,
    "AveragePool": None, "LpPool": None,
}  # fmt: skip
"""Operators that slide a window over their first input, with the position of its weights."""
_WINDOW = {"kernel_shape": 1, "strides": 1, "dilations": 1, "pads": 2}
"""Entries of a window's attributes for each spatial dimension."""
_COUNTS = ("num_heads", "kv_num_heads", "q_num_heads", "group", "block_size")


def contradiction(node: WorkNode, inputs: Sequence[TensorType | None]) -> str:
    """What an operator cannot do with its inputs and attributes, "" for nothing. O(1)."""
    return next(_contradictions(node, inputs), "")


def _contradictions(node: WorkNode, inputs: Sequence[TensorType | None]) -> Iterator[str]:
    for position, ranks in _RANKS.get(node.op, {}).items():
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
    if node.op in _WINDOWED and inputs and inputs[0] is not None:
        spatial, slot = len(inputs[0].shape) - 2, _WINDOWED[node.op]
        weight = inputs[slot] if slot is not None and slot < len(inputs) else None
        if weight is not None and len(weight.shape) != spatial + 2:
            yield f"reads {len(weight.shape)}-dimensional weights, its input has {spatial + 2} dimensions"
        for name, each in _WINDOW.items():
            window = node.attributes.get(name)
            if isinstance(window, tuple) and len(window) != each * spatial:
                yield f"has {len(window)} {name} for {spatial} spatial dimensions"

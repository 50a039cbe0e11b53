"""Matrix work of products, convolutions, attention and recurrences, each sum written out."""

from __future__ import annotations

import pytest

from planner.errors import ModelError
from planner.operators import OpCall, spec
from tests.operators.calls import call

CASES = {
    "matmul, weight": (call("MatMul", ["x 2 3 4", "w 4 5"], ["x 2 3 5"]), 240, 240, 240),
    "matmul, two activations": (call("MatMul", ["x 2 3 4", "x 2 4 5"], ["x 2 3 5"]), 240, 480, 0),
    "matmul, network input": (call("MatMul", ["i 2 3 4", "w 4 5"], ["x 2 3 5"]), 240, 0, 240),
    "matmul, constant": (call("MatMul", ["x 2 3 4", "c 4 5"], ["x 2 3 5"]), 240, 240, 0),
    "matmul, batch broadcast": (
        call("MatMul", ["x 7 1 3 4", "x 2 4 5"], ["x 7 2 3 5"]),
        2 * 7 * 2 * 3 * 4 * 5,
        3360,
        0,
    ),
    "matmul, vector left": (call("MatMul", ["x 4", "w 4 5"], ["x 5"]), 40, 40, 40),
    "matmul, vector right": (call("MatMul", ["x 2 3 4", "w 4"], ["x 2 3"]), 48, 48, 48),
    "matmul, two vectors": (call("MatMul", ["x 4", "x 4"], ["x"]), 8, 16, 0),
    "gemm": (call("Gemm", ["x 3 4", "w 4 5", "w 5"], ["x 3 5"]), 120, 120, 120),
    "gemm, both transposed": (call("Gemm", ["x 4 3", "w 5 4"], ["x 3 5"], transA=1, transB=1), 120, 120, 120),
    "fused matmul": (
        call("com.microsoft.FusedMatMul", ["x 2 4 3", "x 2 5 4"], ["x 2 3 5"], transA=1, transB=1),
        240,
        480,
        0,
    ),
    "fused matmul, batch inside": (
        call("com.microsoft.FusedMatMul", ["x 3 2 4", "x 2 4 5"], ["x 2 3 5"], transBatchA=1),
        240,
        480,
        0,
    ),
    "matmul of integers": (call("MatMulInteger", ["x:uint8 3 4", "w:int8 4 5"], ["x:int32 3 5"]), 120, 0, 0),
    "matmul, packed weight": (
        call("com.microsoft.MatMulNBits", ["x 1 8 64", "w:uint8 32 2 16", "w 64"], ["x 1 8 32"], K=64, N=32, bits=4),
        2 * 8 * 64 * 32,
        2 * 8 * 64 * 32,
        0,
    ),
    "einsum, attention scores": (
        call("Einsum", ["x 2 5 3 4", "x 2 6 3 4"], ["x 2 3 5 6"], equation="bshd,bthd->bhst"),
        2 * 2 * 3 * 5 * 6 * 4,
        2880,
        0,
    ),
    "einsum, ellipsis": (call("Einsum", ["x 2 3 4", "w 4 5"], ["x 2 3 5"], equation="...i,ij->...j"), 240, 240, 240),
    "einsum, implicit result": (call("Einsum", ["x 3 4", "x 4 5"], ["x 3 5"], equation="ij,jk"), 120, 240, 0),
    "einsum, no shared sum": (call("Einsum", ["x 3", "x 4"], ["x 3 4"], equation="i,j->ij"), 0, 0, 0),
    # (i j)(j k)(k l): 2*2*3*4 + 2*2*4*5, from left to right; only the second product leads to the operand that learns
    "einsum, three operands": (
        call("Einsum", ["c 2 3", "c 3 4", "x 4 5"], ["x 2 5"], equation="ij,jk,kl->il"),
        48 + 80,
        2 * 2 * 4 * 5,
        0,
    ),
    # experts by a weighted sum: btef,efd is one product a row and expert; the scores weigh its results in a second
    "einsum, experts with scores": (
        call("Einsum", ["x 2 8 4 32", "w 4 32 16", "x 2 8 4"], ["x 2 8 16"], equation="bted,edf,bte->btf"),
        2 * 2 * 8 * 4 * 32 * 16 + 2 * 2 * 8 * 4 * 16,
        65536 + 2 * 2048,
        65536,
    ),
    "conv": (
        call("Conv", ["x 2 3 8 8", "w 6 3 3 3", "w 6"], ["x 2 6 8 8"], pads=(1, 1, 1, 1)),
        2 * 2 * 6 * 3 * 64 * 9,
        41472,
        41472,
    ),
    "conv, first layer": (call("Conv", ["i 2 3 8 8", "w 6 3 3 3"], ["x 2 6 6 6"]), 2 * 2 * 6 * 3 * 36 * 9, 0, 23328),
    "conv, stride 2": (
        call("Conv", ["x 1 4 8 8", "w 8 4 3 3"], ["x 1 8 4 4"], pads=(1, 1, 1, 1), strides=(2, 2)),
        2 * 8 * 4 * 16 * 9,
        9216,
        9216,
    ),
    "conv, depthwise": (call("Conv", ["x 1 4 8 8", "w 4 1 3 3"], ["x 1 4 6 6"], group=4), 2 * 4 * 36 * 9, 2592, 2592),
    "conv, one dimension": (call("Conv", ["x 1 4 10", "w 8 4 3"], ["x 1 8 8"]), 2 * 8 * 4 * 8 * 3, 1536, 1536),
    "conv, three dimensions": (
        call("Conv", ["x 1 2 4 4 4", "w 3 2 2 2 2"], ["x 1 3 3 3 3"]),
        2 * 3 * 2 * 27 * 8,
        2592,
        2592,
    ),
    "transposed conv": (
        call("ConvTranspose", ["x 1 4 5 5", "w 4 6 2 2"], ["x 1 6 10 10"], strides=(2, 2)),
        2 * 4 * 6 * 25 * 4,
        4800,
        4800,
    ),
    "conv of integers": (
        call("ConvInteger", ["x:uint8 1 1 3 3", "w:uint8 1 1 2 2"], ["x:int32 1 1 2 2"]),
        2 * 4 * 4,
        0,
        0,
    ),
    "quantised conv": (
        call(
            "QLinearConv",
            ["x:uint8 1 1 7 7", "c", "c:uint8", "w:uint8 1 1 1 1", "c 1", "c:uint8 1", "c", "c:uint8"],
            ["x:uint8 1 1 7 7"],
        ),
        2 * 49,
        0,
        0,
    ),
    # 2 b h s t (d + e); backward twice that
    "attention": (
        call("Attention", ["x 2 8 16 4", "x 2 8 20 4", "x 2 8 20 6"], ["x 2 8 16 6"]),
        2 * 2 * 8 * 16 * 20 * 10,
        102400 * 2,
        0,
    ),
    "attention, grouped heads": (
        call("Attention", ["x 2 8 16 4", "x 2 2 16 4", "x 2 2 16 4"], ["x 2 8 16 4"], is_causal=1),
        2 * 2 * 8 * 16 * 16 * 8,
        131072,
        0,
    ),
    "attention, rank 3": (
        call("Attention", ["x 2 16 32", "x 2 16 8", "x 2 16 8"], ["x 2 16 32"], q_num_heads=8, kv_num_heads=2),
        65536,
        131072,
        0,
    ),
    "attention, past": (
        call(
            "Attention",
            ["x 1 2 1 4", "x 1 2 1 4", "x 1 2 1 4", None, "i 1 2 7 4", "i 1 2 7 4"],
            ["x 1 2 1 4", "x 1 2 8 4", "x 1 2 8 4"],
        ),
        2 * 2 * 8 * 8,
        512,
        0,
    ),
    "attention, keys without gradient": (
        call("Attention", ["x 1 2 3 4", "i 1 2 5 4", "i 1 2 5 4"], ["x 1 2 3 4"]),
        2 * 2 * 3 * 5 * 8,
        480,
        0,
    ),
    "multi-head attention": (
        call("com.microsoft.MultiHeadAttention", ["x 2 16 32", "x 2 16 32", "x 2 16 32"], ["x 2 16 32"], num_heads=8),
        2 * 2 * 8 * 256 * 8,
        131072,
        0,
    ),
    "multi-head attention, packed": (
        call("com.microsoft.MultiHeadAttention", ["x 2 16 8 3 4"], ["x 2 16 32"], num_heads=8),
        65536,
        131072,
        0,
    ),
    "group-query attention, packed": (
        call("com.microsoft.GroupQueryAttention", ["x 2 16 48"], ["x 2 16 32"], num_heads=8, kv_num_heads=2),
        65536,
        131072,
        0,
    ),
    # projection 2*2*16*32*96 and products 65536
    "attention with projections": (
        call("com.microsoft.Attention", ["x 2 16 32", "w 32 96", "w 96"], ["x 2 16 32"], num_heads=8),
        196608 + 65536,
        196608 + 131072,
        196608,
    ),
    # 2 T B D (g h i + g h h); no gradient flows from the first step to the initial state
    "lstm": (
        call("LSTM", ["x 5 2 8", "w 1 64 8", "w 1 64 16"], ["x 5 1 2 16"], hidden_size=16),
        2 * 5 * 2 * (4 * 16 * 8 + 4 * 16 * 16),
        10240 + 20480 * 4 / 5,
        30720,
    ),
    "lstm, both directions": (
        call(
            "LSTM",
            ["x 5 2 8", "w 2 64 8", "w 2 64 16", "w 2 128"],
            ["x 5 2 2 16", "x 2 2 16", "x 2 2 16"],
            hidden_size=16,
        ),
        61440,
        20480 + 40960 * 4 / 5,
        61440,
    ),
    "lstm, network input": (
        call("LSTM", ["i 5 2 8", "w 1 64 8", "w 1 64 16"], ["x 5 1 2 16"], hidden_size=16),
        30720,
        2 * 4 * 2 * 4 * 16 * 16,
        30720,
    ),
    "gru": (
        call("GRU", ["x 5 2 8", "w 1 48 8", "w 1 48 16"], ["x 5 1 2 16"], hidden_size=16),
        2 * 5 * 2 * (384 + 768),
        7680 + 15360 * 4 / 5,
        23040,
    ),
    # 6 rows, 2 of 4 experts each: 2 * 6 * 2 * (8 * 16 + 16 * 8)
    "experts": (
        call("com.microsoft.MoE", ["x 2 3 8", "x 6 4", "w 4 16 8", None, "w 4 8 16"], ["x 2 3 8"], k=2),
        6144,
        6144,
        6144,
    ),
    "rnn, batch first": (
        call("RNN", ["x 2 5 8", "w 1 16 8", "w 1 16 16"], ["x 2 5 1 16"], hidden_size=16, layout=1),
        2 * 5 * 2 * (128 + 256),
        2560 + 5120 * 4 / 5,
        7680,
    ),
}


@pytest.mark.parametrize(("what", "forward", "input_grad", "weight_grad"), CASES.values(), ids=CASES)
def test_matrix_work(what: OpCall, forward: float, input_grad: float, weight_grad: float) -> None:
    found = spec(what)
    assert found.matrix_flops == forward
    assert found.input_grad_matrix_flops == input_grad
    assert found.weight_grad_matrix_flops == weight_grad


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (call("MatMul", ["x 2 3", "w 4 5"], ["x 2 5"]), "should be"),
        (call("MatMul", ["x 2 3"], ["x 2 5"]), "lacks its input 1"),
        (call("Conv", ["x 1 3 8 8", "w 6 4 3 3"], ["x 1 6 6 6"]), "should be"),
        (call("Attention", ["x 1 4 8", "x 1 4 8", "x 1 4 8"], ["x 1 4 8"]), "q_num_heads"),
        (
            call("com.microsoft.MatMulNBits", ["x 8 60", "w:uint8 32 2 16", "w 64"], ["x 8 32"], K=64, N=32),
            "does not fit",
        ),
    ],
)
def test_contradicting_shapes_are_said(what: OpCall, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        spec(what)

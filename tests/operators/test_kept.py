"""What backward keeps, by operator, as torch's autograd keeps it."""

from __future__ import annotations

import pytest

from planner.operators import OpCall, Saved, spec
from tests.operators.calls import call

CUBE = "x 2 3 4"
BITS = "x:bool 2 3 4"


def _short(saved: tuple[Saved, ...]) -> list[str]:
    """`i0` input 0, `o0` output 0, `e24` an extra of 24 bytes; `?` random, `!` independent of the precision."""
    marks = [("?" if s.random else "") + ("!" if s.fixed else "") for s in saved]
    numbers = [s.byte_count if s.source == "extra" else s.position for s in saved]
    return [f"{s.source[0]}{number}{mark}" for s, number, mark in zip(saved, numbers, marks, strict=True)]


CASES = {
    "matmul keeps the activation for the weight's gradient": (call("MatMul", [CUBE, "w 4 5"], ["x 2 3 5"]), ["i0"]),
    "matmul with a constant keeps nothing": (call("MatMul", [CUBE, "c 4 5"], ["x 2 3 5"]), []),
    "matmul of activations keeps both": (call("MatMul", [CUBE, "x 2 4 5"], ["x 2 3 5"]), ["i0", "i1"]),
    "gemm": (call("Gemm", ["x 3 4", "w 4 5", "w 5"], ["x 3 5"]), ["i0"]),
    "conv": (call("Conv", ["i 1 3 8 8", "w 6 3 3 3"], ["x 1 6 6 6"]), ["i0"]),
    "relu": (call("Relu", [CUBE], [CUBE]), ["o0"]),
    "sigmoid": (call("Sigmoid", [CUBE], [CUBE]), ["o0"]),
    "tanh": (call("Tanh", [CUBE], [CUBE]), ["o0"]),
    "exp": (call("Exp", [CUBE], [CUBE]), ["o0"]),
    "gelu": (call("Gelu", [CUBE], [CUBE]), ["i0"]),
    "erf": (call("Erf", [CUBE], [CUBE]), ["i0"]),
    "neg": (call("Neg", [CUBE], [CUBE]), []),
    "add": (call("Add", [CUBE, CUBE], [CUBE]), []),
    "mul keeps both": (call("Mul", [CUBE, CUBE], [CUBE]), ["i0", "i1"]),
    "mul by a constant keeps nothing": (call("Mul", [CUBE, "c"], [CUBE]), []),
    "mul by an input keeps the input": (call("Mul", [CUBE, "i 4"], [CUBE]), ["i1"]),
    "mul by a weight keeps the activation": (call("Mul", [CUBE, "w 4"], [CUBE]), ["i0"]),
    "div": (call("Div", [CUBE, CUBE], [CUBE]), ["i0", "i1"]),
    "div by an input": (call("Div", [CUBE, "i 4"], [CUBE]), ["i1"]),
    "pow": (call("Pow", [CUBE, "c"], [CUBE], constants={1: (3.0,)}), ["i0"]),
    "where": (call("Where", ["i:bool 3 4", CUBE, "c"], [CUBE]), ["i0"]),
    "comparison": (call("Greater", [CUBE, CUBE], [BITS]), []),
    "softmax": (call("Softmax", [CUBE], [CUBE]), ["o0"]),
    "log-softmax": (call("LogSoftmax", [CUBE], [CUBE]), ["o0"]),
    # 2 numbers a row: 6 rows
    "layer norm": (call("LayerNormalization", [CUBE, "w 4", "w 4"], [CUBE]), ["i0", "e48!"]),
    "rms norm": (call("RMSNormalization", [CUBE, "w 4"], [CUBE]), ["i0", "e24!"]),
    "batch norm": (call("BatchNormalization", ["x 2 3 4 4", *["w 3"] * 4], ["x 2 3 4 4"]), ["i0", "e24!"]),
    "group norm": (
        call("GroupNormalization", ["x 2 6 4 4", "w 6", "w 6"], ["x 2 6 4 4"], num_groups=3),
        ["i0", "e48!"],
    ),
    "instance norm": (call("InstanceNormalization", ["x 2 6 4 4", "w 6", "w 6"], ["x 2 6 4 4"]), ["i0", "e96!"]),
    "residual norm makes its sum": (
        call("com.microsoft.SkipLayerNormalization", [CUBE, CUBE, "w 4", "w 4"], [CUBE]),
        ["e96", "e48!"],
    ),
    "residual norm hands its sum out": (
        call("com.microsoft.SkipLayerNormalization", [CUBE, CUBE, "w 4", "w 4"], [CUBE, None, None, CUBE]),
        ["o3", "e48!"],
    ),
    "max pool": (call("MaxPool", ["x 1 2 4 4"], ["x 1 2 2 2"], kernel_shape=(2, 2), strides=(2, 2)), ["i0", "e64!"]),
    "average pool": (call("AveragePool", ["x 1 2 4 4"], ["x 1 2 2 2"], kernel_shape=(2, 2), strides=(2, 2)), ["i0"]),
    "global average": (call("GlobalAveragePool", ["x 1 2 4 4"], ["x 1 2 1 1"]), []),
    "mean": (call("ReduceMean", [CUBE], ["x 2 3 1"], axes=(2,)), []),
    "maximum along an axis": (call("ReduceMax", [CUBE], ["x 2 3 1"], axes=(2,)), ["i0", "o0"]),
    "dropout": (call("Dropout", [CUBE, "c"], [CUBE], constants={1: (0.1,)}), ["e96?"]),
    "dropout of nothing": (call("Dropout", [CUBE, "c"], [CUBE], constants={1: (0.0,)}), []),
    "embedding": (call("Gather", ["w 9 4", "i:int64 2 3"], [CUBE]), ["i1"]),
    "top k": (call("TopK", [CUBE, "c:int64 1"], ["x 2 3 2", "x:int64 2 3 2"]), ["o1"]),
    "reshape": (call("Reshape", [CUBE, "c:int64 2"], ["x 6 4"]), []),
    "transpose": (call("Transpose", [CUBE], ["x 4 3 2"]), []),
    "concat": (call("Concat", [CUBE, CUBE], ["x 2 6 4"], axis=1), []),
    "cast": (call("Cast", [CUBE], ["x:float16 2 3 4"]), []),
    # q, k, v, result and one fp32 number for each of 1*2*3 rows
    "attention": (call("Attention", ["x 1 2 3 4"] * 3, ["x 1 2 3 4"]), ["i0", "i1", "i2", "o0", "e24!"]),
    # gates and cell state: 5 numbers for each of 5*1*2*16 units
    "lstm": (
        call("LSTM", ["x 5 2 8", "w 1 64 8", "w 1 64 16"], ["x 5 1 2 16"], hidden_size=16),
        ["i0", "o0", "e3200"],
    ),
    "loss makes its log-probabilities": (
        call("SoftmaxCrossEntropyLoss", ["x 6 10", "i:int64 6"], ["x"]),
        ["i1", "e240"],
    ),
    "loss hands its log-probabilities out": (
        call("SoftmaxCrossEntropyLoss", ["x 6 10", "i:int64 6"], ["x", "x 6 10"]),
        ["i1", "o1"],
    ),
    "what nobody described keeps its inputs": (call("acme.Frobnicate", [CUBE, "w 4"], [CUBE]), ["i0"]),
}


@pytest.mark.parametrize(("what", "expected"), CASES.values(), ids=CASES)
def test_kept(what: OpCall, expected: list[str]) -> None:
    assert _short(spec(what).saved) == expected


@pytest.mark.parametrize("what", [what for what, _ in CASES.values()], ids=CASES)
def test_nothing_is_kept_without_a_gradient(what: OpCall) -> None:
    found = spec(what, (False,) * len(what.inputs))
    assert found.saved == ()
    assert found.backward.byte_count == found.backward_kernels == found.backward_vector_flops == 0
    assert found.input_grad_matrix_flops == found.weight_grad_matrix_flops == 0

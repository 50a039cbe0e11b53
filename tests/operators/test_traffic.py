"""Memory traffic, element-wise work and kernels, each sum written out."""

from __future__ import annotations

import pytest

from planner.operators import OpCall, Origin, spec
from tests.operators.calls import call

# name: call, forward bytes, backward bytes, kernels, backward kernels, vector flops
CASES = {
    # forward 24+20+30 numbers; weight gradient reads 24+30 writes 20; input gradient reads 20+30 writes 24
    "matmul": (call("MatMul", ["x 2 3 4", "w 4 5"], ["x 2 3 5"]), 4 * 74, 4 * 148, 1, 2, 0),
    "matmul, network input": (call("MatMul", ["i 2 3 4", "w 4 5"], ["x 2 3 5"]), 4 * 74, 4 * 74, 1, 1, 0),
    # 24 in, 24 out; backward: result gradient and kept output in, gradient out
    "relu": (call("Relu", ["x 2 3 4"], ["x 2 3 4"]), 4 * 48, 4 * 72, 1, 1, 24),
    "relu, half": (call("Relu", ["x:float16 2 3 4"], ["x:float16 2 3 4"]), 2 * 48, 2 * 72, 1, 1, 24),
    # operands of full size share the result's gradient
    "residual sum": (call("Add", ["x 2 3 4", "x 2 3 4"], ["x 2 3 4"]), 4 * 72, 0, 1, 0, 24),
    "bias": (call("Add", ["x 2 3 4", "w 4"], ["x 2 3 4"]), 4 * 52, 4 * 28, 1, 1, 24),
    # gradient in twice, kept operands in, gradients out
    "product": (call("Mul", ["x 2 3 4", "x 2 3 4"], ["x 2 3 4"]), 4 * 72, 4 * 144, 1, 2, 24),
    "reshape": (call("Reshape", ["x 2 3 4", "c:int64 2"], ["x 6 4"]), 0, 0, 0, 0, 0),
    "flatten": (call("Flatten", ["x 2 3 4"], ["x 2 12"]), 0, 0, 0, 0, 0),
    "identity": (call("Identity", ["x 2 3 4"], ["x 2 3 4"]), 0, 0, 0, 0, 0),
    "transpose": (call("Transpose", ["x 2 3 4"], ["x 4 3 2"]), 4 * 48, 4 * 48, 1, 1, 0),
    "transpose of size 1": (call("Transpose", ["x 2 1 4"], ["x 1 2 4"], perm=(1, 0, 2)), 0, 0, 0, 0, 0),
    # 6 indices of 8 bytes; rows of 4 numbers read and written; backward: gradient in, indices, rows read and written
    "embedding": (call("Gather", ["w 900 4", "i:int64 2 3"], ["x 2 3 4"]), 48 + 4 * 48, 48 + 4 * 72, 1, 1, 0),
    # ids, scale, shift, rows of two tables, result; backward: gradient and kept sum in, the sum's gradient out, then
    # each table's rows read and written
    "embeddings, normalised": (
        call(
            "com.microsoft.EmbedLayerNormalization",
            ["i:int32 2 3", None, "w 900 4", "w 16 4", None, "w 4", "w 4"],
            ["x 2 3 4"],
        ),
        24 + 4 * (8 + 48 + 24), 4 * (72 + 96), 1, 3, 10 * 24,
    ),
    # data in and out, indices, updates read and written; backward: gradient and data once more, indices, updates twice
    "updates, fewer than the most places that data find": (
        call("ScatterND", ["x 8 4", "c:int64 6 1", "x 3 4"], ["x 8 4"]),
        4 * 64 + 48 + 4 * 24, 4 * 64 + 48 + 48 + 4 * 24, 2, 2, 0,
    ),
    "softmax": (call("Softmax", ["x 2 3 4"], ["x 2 3 4"]), 4 * 48, 4 * 72, 1, 1, 5 * 24),
    "shape": (call("Shape", ["x 2 3 4"], ["x:int64 3"]), 0, 0, 0, 0, 0),
    "packed integers": (call("Transpose", ["c:int4 3 5"], ["c:int4 5 3"]), 15, 0, 1, 0, 0),
    "what nobody described": (call("acme.Frobnicate", ["x 2 3 4"], ["x 2 3"]), 4 * 30, 4 * 54, 1, 1, 24),
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "forward", "backward", "kernels", "backward_kernels", "flops"), CASES.values(), ids=CASES
)
def test_traffic(
    what: OpCall, forward: float, backward: float, kernels: int, backward_kernels: int, flops: float
) -> None:
    found = spec(what)
    assert (found.forward.byte_count, found.backward.byte_count) == (forward, backward)
    assert (found.kernels, found.backward_kernels) == (kernels, backward_kernels)
    assert found.vector_flops == flops


@pytest.mark.parametrize("what", [case[0] for case in CASES.values()], ids=CASES)
def test_traffic_is_float_elements_plus_fixed_bytes(what: OpCall) -> None:
    found = spec(what)
    width = next((t.dtype.bits / 8 for t in what.inputs if t is not None and t.dtype.is_float), 4)
    for each in (found.forward, found.backward):
        assert each.float_elements * width + each.fixed_bytes == pytest.approx(each.byte_count)


def test_an_unknown_operator_is_said_to_be_one() -> None:
    assert spec(call("acme.Frobnicate", ["x 2"], ["x 2"])).origin is Origin.FALLBACK
    assert spec(call("Shape", ["x 2"], ["x:int64 1"])).origin is Origin.PLUMBING
    assert spec(call("Relu", ["x 2"], ["x 2"])).origin is Origin.RULE


def test_views_share_storage() -> None:
    for op in ("Reshape", "Squeeze", "Unsqueeze", "Flatten"):
        assert spec(call(op, ["x 2 3", "c:int64 1"], ["x 6"])).view


def test_old_softmax_normalises_everything_from_its_axis_on() -> None:
    old = spec(call("Softmax", ["x 2 3 4"], ["x 2 3 4"], opset=12)).nests[0]
    new = spec(call("Softmax", ["x 2 3 4"], ["x 2 3 4"], opset=13)).nests[0]
    assert [d.kind.value for d in old.dims] == ["parallel", "coupled", "coupled"]
    assert [d.kind.value for d in new.dims] == ["parallel", "parallel", "coupled"]


def test_recurrence_reads_its_weights_every_step() -> None:
    one = spec(call("LSTM", ["x 1 2 8", "w 1 64 8", "w 1 64 16"], ["x 1 1 2 16"], hidden_size=16))
    five = spec(call("LSTM", ["x 5 2 8", "w 1 64 8", "w 1 64 16"], ["x 5 1 2 16"], hidden_size=16))
    # 4 more steps: inputs 16, results 32, gates twice 128, recurrent weights 1024 numbers each
    assert five.forward.byte_count - one.forward.byte_count == 4 * 4 * (16 + 32 + 2 * 128 + 1024)
    assert (one.kernels, five.kernels) == (3, 11)

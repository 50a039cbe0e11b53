"""Small ONNX models that together use what the importer treats in its own way: the inputs that mutations start from."""

from __future__ import annotations

import functools

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.importers.build import BOOL, I64, absent, ints, model, node, scoped, value

DATA_FILE = "data.bin"
"""Name of the file beside a model that holds its external tensors."""
DATA = np.array([2, -1, 8], dtype=np.int64).tobytes()
MICROSOFT = "com.microsoft"


def _floats(name: str, values: list[float]) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.float32), name)


def perceptron() -> onnx.ModelProto:
    """Two linear layers with module paths, an open batch axis and a final Softmax."""
    nodes = [
        scoped(node("Gemm", ["x", "0.weight", "0.bias"], ["h"], transB=1, alpha=1.0), "0", "aten.addmm"),
        scoped(node("Gelu", ["h"], ["a"], approximate="tanh"), "1", "aten.gelu"),
        scoped(node("MatMul", ["a", "2.weight"], ["logits"], name="/head/MatMul"), "2", "aten.mm"),
        node("Softmax", ["logits"], ["y"], axis=-1),
    ]
    weights = [absent("0.weight", [16, 8]), absent("0.bias", [16]), absent("2.weight", [16, 32])]
    return model(nodes, [value("x", ["batch", 8])], [value("y", ["batch", 32])], weights)


def attention() -> onnx.ModelProto:
    """A table, a norm, attention with sizes computed from shapes as exporters write them, one in a data file."""
    nodes = [
        node("Gather", ["table", "ids"], ["e"], axis=0),
        node("LayerNormalization", ["e", "scale", "bias"], ["n"], axis=-1, epsilon=1e-5),
        node("MatMul", ["n", "w_qkv"], ["qkv"]),
        node("Split", ["qkv"], ["q", "k", "v"], axis=2, num_outputs=3),
        node("Shape", ["q"], ["size"], start=0, end=2),
        node("Concat", ["size", "tail"], ["target"], axis=0),
        node("Reshape", ["q", "target"], ["q4"]),
        node("Reshape", ["k", "target"], ["k4"]),
        node("Reshape", ["v", "outside"], ["v4"], allowzero=0),
        node("Transpose", ["q4"], ["qt"], perm=[0, 2, 1, 3]),
        node("Transpose", ["k4"], ["kt"], perm=[0, 2, 3, 1]),
        node("Unsqueeze", ["v4", "one"], ["vt"]),
        node("MatMul", ["qt", "kt"], ["s"]),
        node("Constant", [], ["root"], value=_floats("root", [2.0])),
        node("Div", ["s", "root"], ["scaled"]),
        node("Trilu", ["scaled"], ["masked"], upper=0),
        node("Softmax", ["masked"], ["p"], axis=-1),
        node("Dropout", ["p", "ratio", "training"], ["d"]),
        node("MatMul", ["d", "vt"], ["c"]),
        node("ReduceMean", ["c", "last"], ["y"], keepdims=0),
    ]
    outside = absent("outside", [3], I64)
    outside.external_data[0].value = DATA_FILE
    outside.external_data.add(key="offset", value="0")
    outside.external_data.add(key="length", value="24")
    stored = [
        absent("table", [64, 8]), _floats("scale", [1.0] * 8), _floats("bias", [0.0] * 8), absent("w_qkv", [8, 24]),
        ints("tail", [2, 4]), outside, ints("one", [1]), ints("last", [-1]), _floats("ratio", [0.1]),
        numpy_helper.from_array(np.array(True), "training"),
    ]  # fmt: skip
    return model(nodes, [value("ids", [2, 4], I64)], [value("y", None)], stored)


def convolutions() -> onnx.ModelProto:
    """Convolutions, norms, pooling, resizing, padding and slicing."""
    nodes = [
        node("Conv", ["x", "c1.weight", "c1.bias"], ["a"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["a", "g", "g", "g", "g"], ["b"], epsilon=1e-5),
        node("Relu", ["b"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=0),
        node("Resize", ["p", "", "scales"], ["up"], mode="nearest"),
        node("Pad", ["up", "pads"], ["padded"], mode="constant"),
        node("Slice", ["padded", "starts", "ends", "axes", "steps"], ["cut"]),
        node("ConvTranspose", ["cut", "t.weight"], ["t"], kernel_shape=[2, 2], group=1),
        node("GlobalAveragePool", ["t"], ["m"]),
        node("Flatten", ["m"], ["f"], axis=1),
        node("TopK", ["f", "k"], ["top", "where"], axis=-1),
        node("Clip", ["top", "low"], ["y"]),
    ]
    stored = [
        absent("c1.weight", [4, 3, 3, 3]), absent("c1.bias", [4]), _floats("g", [1.0] * 4),
        _floats("scales", [1.0, 1.0, 2.0, 2.0]), ints("pads", [0, 0, 1, 1, 0, 0, 1, 1]), ints("starts", [0]),
        ints("ends", [6]), ints("axes", [3]), ints("steps", [1]), absent("t.weight", [4, 4, 2, 2]), ints("k", [2]),
        numpy_helper.from_array(np.float32(0.0), "low"),
    ]  # fmt: skip
    return model(nodes, [value("x", [2, 3, 16, 16])], [value("y", None)], stored, opset=18)


def recurrent() -> onnx.ModelProto:
    """An LSTM, a GRU, an Einsum, and operators whose result's size depends on data."""
    nodes = [
        node("LSTM", ["x", "w", "r", "b"], ["h", "last"], hidden_size=4, direction="bidirectional"),
        node("Reshape", ["h", "flat"], ["f"]),
        node("GRU", ["f", "gw", "gr"], ["g"], hidden_size=4, linear_before_reset=1),
        node("Einsum", ["f", "e"], ["u"], equation="sbd,dk->sbk"),
        node("NonZero", ["u"], ["nz"]),
        node("CumSum", ["u", "axis"], ["c"], exclusive=0),
        node("Cast", ["c"], ["y"], to=TensorProto.FLOAT16),
        node("Cast", ["nz"], ["z"], to=TensorProto.FLOAT),
    ]
    stored = [
        absent("w", [2, 16, 8]), absent("r", [2, 16, 4]), absent("b", [2, 32]), ints("flat", [5, 2, 8]),
        absent("gw", [1, 12, 8]), absent("gr", [1, 12, 4]), absent("e", [8, 6]), ints("axis", 0),
    ]  # fmt: skip
    outputs = [value("y", None), value("z", None), value("g", None)]
    return model(nodes, [value("x", [5, 2, 8])], outputs, stored, opset=14)


def control_flow() -> onnx.ModelProto:
    """An If on data, a Loop and a Scan."""
    then = helper.make_graph([node("MatMul", ["x", "w"], ["t"])], "then", [], [value("t", [4, 8])])
    other = helper.make_graph([node("Relu", ["x"], ["o"])], "other", [], [value("o", [4, 8])])
    step = helper.make_graph(
        [node("MatMul", ["s", "w"], ["n"]), node("Relu", ["n"], ["out"]), node("Identity", ["go"], ["on"])], "step",
        [value("i", [], I64), value("go", [], BOOL), value("s", [4, 8])],
        [value("on", [], BOOL), value("n", [4, 8]), value("out", [4, 8])],
    )  # fmt: skip
    scan = helper.make_graph(
        [node("Add", ["state", "row"], ["next"]), node("Mul", ["next", "row"], ["made"])], "scan",
        [value("state", [8]), value("row", [8])], [value("next", [8]), value("made", [8])],
    )  # fmt: skip
    nodes = [
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Greater", ["sum", "zero"], ["c"]),
        node("If", ["c"], ["picked"], then_branch=then, else_branch=other),
        node("Loop", ["trips", "yes", "picked"], ["looped", "stack"], body=step),
        node("Scan", ["initial", "looped"], ["state_n", "rows"], body=scan, num_scan_inputs=1, scan_input_axes=[0]),
        node("Add", ["rows", "looped"], ["y"]),
    ]
    stored = [
        absent("w", [8, 8]), numpy_helper.from_array(np.float32(0.0), "zero"), ints("trips", 3),
        numpy_helper.from_array(np.array(True), "yes"), _floats("initial", [0.0] * 8),
    ]  # fmt: skip
    return model(nodes, [value("x", [4, 8])], [value("y", [4, 8]), value("stack", None)], stored, opset=17)


def sequences() -> onnx.ModelProto:
    """Tensors that go through sequences, and a model-local function with an attribute reference."""
    body = [node("MatMul", ["a", "b"], ["m"]), node("LeakyRelu", ["m"], ["out"])]
    slope = body[1].attribute.add(name="alpha", type=onnx.AttributeProto.FLOAT)
    slope.ref_attr_name = "slope"
    function = helper.make_function("own", "layer", ["a", "b"], ["out"], body, [helper.make_opsetid("", 17)], ["slope"])
    nodes = [
        node("layer", ["x", "w"], ["h"], domain="own", slope=0.5),
        node("SplitToSequence", ["h", "two"], ["parts"], axis=1),
        node("SequenceAt", ["parts", "at"], ["first"]),
        node("SequenceInsert", ["parts", "first"], ["more"]),
        node("SequenceErase", ["more", "at"], ["fewer"]),
        node("SequenceLength", ["fewer"], ["count"]),
        node("ConcatFromSequence", ["fewer"], ["joined"], axis=1, new_axis=0),
        node("SequenceConstruct", ["first", "first"], ["pair"]),
        node("ConcatFromSequence", ["pair"], ["stacked"], axis=0, new_axis=1),
        node("ReduceMax", ["stacked"], ["most"], axes=[0], keepdims=0),
        node("Where", ["mask", "most", "first"], ["y"]),
    ]
    stored = [absent("w", [8, 8]), ints("two", 2), ints("at", 0), absent("mask", [4, 2], BOOL)]
    return model(
        nodes, [value("x", [4, 8])], [value("y", None), value("joined", None)], stored, opset=17, domains={"own": 1},
        functions=[function],
    )  # fmt: skip


def fused() -> onnx.ModelProto:
    """Operators of ONNX Runtime, quantised weights, and one that nobody knows."""
    nodes = [
        node("EmbedLayerNormalization", ["ids", "", "table", "place", "", "g", "g"], ["e", "m"], domain=MICROSOFT),
        node("Attention", ["e", "w_qkv", "b_qkv"], ["a"], domain=MICROSOFT, num_heads=2),
        node("SkipLayerNormalization", ["a", "e", "g", "g"], ["n", "", "", "sum"], domain=MICROSOFT, epsilon=1e-5),
        node("FusedMatMul", ["n", "w"], ["f"], domain=MICROSOFT, transB=1, alpha=0.5),
        node("BiasGelu", ["f", "b"], ["gl"], domain=MICROSOFT),
        node("MatMulNBits", ["gl", "packed", "scales"], ["q"], domain=MICROSOFT, N=8, K=8, bits=4, block_size=16),
        node("MultiHeadAttention", ["q", "q", "q"], ["mha"], domain=MICROSOFT, num_heads=2),
        node("GroupQueryAttention", ["mha", "q", "q", "", "", "len", "total"], ["gqa", "pk", "pv"], domain=MICROSOFT,
             num_heads=2, kv_num_heads=2),
        node("DequantizeLinear", ["w8", "s8"], ["dq"], axis=0),
        node("MatMul", ["gqa", "dq"], ["o"]),
        node("MoE", ["o", "router", "fc1", "", "fc2"], ["moe"], domain=MICROSOFT, k=1, activation_type="relu"),
        node("Mystery", ["moe"], ["y"], domain="other", times=3),
    ]  # fmt: skip
    stored = [
        absent("table", [16, 8]), absent("place", [4, 8]), _floats("g", [1.0] * 8), absent("w_qkv", [8, 24]),
        _floats("b_qkv", [0.0] * 24), absent("w", [8, 8]), _floats("b", [0.0] * 8),
        absent("packed", [8, 1, 8], TensorProto.UINT8), _floats("scales", [1.0] * 8), ints("len", [3, 3]),
        ints("total", 4), absent("w8", [8, 8], TensorProto.INT8), _floats("s8", [1.0]), absent("router", [8, 2]),
        absent("fc1", [2, 8, 8]), absent("fc2", [2, 8, 8]),
    ]  # fmt: skip
    inputs = [value("ids", [2, 4], TensorProto.INT32)]
    return model(nodes, inputs, [value("y", [2, 4, 8])], stored, opset=19, domains={MICROSOFT: 1, "other": 1})


@functools.cache
def models() -> tuple[onnx.ModelProto, ...]:
    """All of them."""
    makers = (perceptron, attention, convolutions, recurrent, control_flow, sequences, fused)
    return tuple(make() for make in makers)


@functools.cache
def standard_models() -> tuple[onnx.ModelProto, ...]:
    """The standard's own models of single operators; takes seconds to collect."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        collected = collect_testcases(None)
    return tuple(case.model for case in collected if case.model is not None and case.model.ByteSize() < 1 << 16)

"""Shapes across operator sets, behind fused operators, and where only the file or a bound can say them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import pytest
from onnx import TensorProto

from planner.graph import Graph, NoteLevel
from planner.importers import graph_from_proto
from tests.importers.build import F32, I64, absent, ints, model, node, value

MS = {"com.microsoft": 1}


Shapes = dict[str, Sequence[int]]


def fused(op: str, inputs: Shapes, weights: Shapes, order: str, **attributes: Any) -> Graph:
    """Import one com.microsoft operator; its name list says the inputs by position ("-" absent)."""
    names = ["" if name == "-" else name for name in order.split()]
    outputs = attributes.pop("outputs", ["y"])
    call = node(op, names, outputs, domain="com.microsoft", **attributes)
    proto = model(
        [call], [value(n, s) for n, s in inputs.items()], [value(n, None) for n in outputs if n],
        [absent(n, s) for n, s in weights.items()], domains=MS,
    )  # fmt: skip
    return graph_from_proto(proto)


@pytest.mark.parametrize(
    ("op", "inputs", "weights", "order", "attributes", "shape"),
    [
        ("BiasGelu", {"x": [2, 5, 8]}, {"b": [8]}, "x b", {}, (2, 5, 8)),
        ("FastGelu", {"x": [2, 5, 8]}, {"b": [8]}, "x b", {}, (2, 5, 8)),
        ("QuickGelu", {"x": [2, 5, 8]}, {}, "x", {}, (2, 5, 8)),
        ("Gelu", {"x": [2, 5, 8]}, {}, "x", {}, (2, 5, 8)),
        ("SkipLayerNormalization", {"x": [2, 5, 8], "s": [2, 5, 8]}, {"g": [8], "b": [8]}, "x s g b", {}, (2, 5, 8)),
        ("SkipSimplifiedLayerNormalization", {"x": [2, 5, 8], "s": [2, 5, 8]}, {"g": [8]}, "x s g", {}, (2, 5, 8)),
        ("FusedMatMul", {"x": [3, 2, 8]}, {"w": [6, 8]}, "x w", {"transB": 1}, (3, 2, 6)),
        ("FusedMatMul", {"x": [3, 8, 2], "w": [3, 8, 6]}, {}, "x w", {"transA": 1}, (3, 2, 6)),
        ("FusedGemm", {"x": [2, 8]}, {"w": [6, 8], "b": [6]}, "x w b", {"transB": 1}, (2, 6)),
        ("Attention", {"x": [2, 5, 8]}, {"w": [8, 24], "b": [24]}, "x w b", {"num_heads": 2}, (2, 5, 8)),
        (
            "Attention", {"x": [2, 5, 8]}, {"w": [8, 28], "b": [28]}, "x w b",
            {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 12]}, (2, 5, 12),
        ),
        (
            "MultiHeadAttention", {"q": [2, 5, 8], "k": [2, 7, 8], "v": [2, 7, 6]}, {}, "q k v",
            {"num_heads": 2}, (2, 5, 6),
        ),
        ("MultiHeadAttention", {"q": [2, 5, 4, 3, 16]}, {}, "q", {"num_heads": 4}, (2, 5, 64)),
        (
            "GroupQueryAttention", {"q": [2, 5, 32], "k": [2, 5, 8], "v": [2, 5, 8]}, {}, "q k v",
            {"num_heads": 8, "kv_num_heads": 2}, (2, 5, 32),
        ),
        ("GroupQueryAttention", {"q": [2, 5, 48]}, {}, "q", {"num_heads": 8, "kv_num_heads": 2}, (2, 5, 32)),
        ("RotaryEmbedding", {"x": [2, 5, 8], "p": [2, 5]}, {"c": [9, 4], "s": [9, 4]}, "x p c s", {}, (2, 5, 8)),
        (
            "MatMulNBits", {"x": [2, 5, 8]}, {"w": [6, 1, 4], "s": [6]}, "x w s",
            {"K": 8, "N": 6, "block_size": 16}, (2, 5, 6),
        ),
        ("FusedConv", {"x": [1, 3, 8, 8]}, {"w": [4, 3, 3, 3]}, "x w", {"activation": "Relu"}, (1, 4, 6, 6)),
        ("MoE", {"x": [10, 8], "r": [10, 4]}, {"a": [4, 16, 8], "b": [4, 8, 16]}, "x r a - b", {"k": 2}, (10, 8)),
    ],
)  # fmt: skip
def test_fused_operators(
    op: str, inputs: Shapes, weights: Shapes, order: str, attributes: dict[str, Any], shape: tuple[int, ...],
) -> None:  # fmt: skip
    graph = fused(op, inputs, weights, order, **attributes)
    assert graph.tensors["y"].shape == shape
    assert graph.nodes[0].op == f"com.microsoft.{op}"


def test_embedding_layer_normalization() -> None:
    call = node("EmbedLayerNormalization", ["i", "t", "w", "p", "s", "g", "b"], ["y", "m"], domain="com.microsoft")
    stored = [absent("w", [100, 8]), absent("p", [16, 8]), absent("s", [2, 8]), absent("g", [8]), absent("b", [8])]
    inputs = [value("i", [2, 5], TensorProto.INT32), value("t", [2, 5], TensorProto.INT32)]
    graph = graph_from_proto(model([call], inputs, [value("y", None)], stored, domains=MS))
    assert graph.tensors["y"].shape == (2, 5, 8)
    assert graph.tensors["y"].dtype.is_float
    assert graph.parameter_count() == 100 * 8 + 16 * 8 + 2 * 8 + 8 + 8


def test_second_output_of_a_skip_normalization_feeds_the_next() -> None:
    nodes = [
        node("SkipLayerNormalization", ["x", "x", "g", "b"], ["n", "", "", "sum"], domain="com.microsoft"),
        node("Add", ["n", "sum"], ["y"]),
    ]
    proto = model(nodes, [value("x", [2, 5, 8])], [value("y", None)], [absent("g", [8]), absent("b", [8])], domains=MS)
    graph = graph_from_proto(proto)
    assert graph.nodes[0].outputs == ("n", "", "", "sum")
    assert graph.tensors["sum"].shape == (2, 5, 8)


def test_simplified_normalization_in_the_default_domain() -> None:
    call = node("SimplifiedLayerNormalization", ["x", "g"], ["y"], axis=-1)
    graph = graph_from_proto(model([call], [value("x", [2, 5, 8])], [value("y", None)], [absent("g", [8])]))
    assert graph.tensors["y"].shape == (2, 5, 8)


def test_unknown_operator_with_a_shape_in_the_file() -> None:
    nodes = [node("Mystery", ["x"], ["z"], domain="other"), node("MatMul", ["z", "w"], ["y"])]
    proto = model(
        nodes, [value("x", ["batch", 8])], [value("y", None)], [absent("w", [6, 8])], domains={"other": 1},
        value_info=[value("z", ["batch", 6])],
    )  # fmt: skip
    graph = graph_from_proto(proto, dims={"batch": 3})
    assert graph.nodes[0].op == "other.Mystery"
    assert graph.tensors["z"].shape == (3, 6)
    assert any(n.code == "unknown-operator" and "other.Mystery" in n.message for n in graph.report.notes)


def test_unknown_operator_that_feeds_nothing_heavy_is_assumed_and_said() -> None:
    nodes = [node("Mystery", ["x"], ["z"], domain="other"), node("Relu", ["z"], ["y"])]
    graph = graph_from_proto(model(nodes, [value("x", [2, 8])], [value("y", None)], domains={"other": 1}))
    assert graph.tensors["y"].shape == (2, 8)
    assert any(n.code == "assumed-shape" and n.level is NoteLevel.WARNING for n in graph.report.notes)


def test_data_dependent_sizes_are_bounded_and_said() -> None:
    nodes = [
        node("NonZero", ["x"], ["i"]), node("Transpose", ["i"], ["it"]), node("GatherND", ["x", "it"], ["y"]),
    ]  # fmt: skip
    graph = graph_from_proto(model(nodes, [value("x", [4, 5])], [value("y", None)]))
    assert graph.tensors["y"].shape == (20,)
    assert any(n.code == "data-dependent-shape" for n in graph.report.notes)


def test_opset_9_with_axes_as_attributes() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]), node("Slice", ["s"], ["b"], starts=[0], ends=[1], axes=[0]),
        node("Squeeze", ["b"], ["b0"], axes=[0]), node("Unsqueeze", ["b0"], ["b1"], axes=[0]),
        node("Concat", ["b1", "rest"], ["target"], axis=0), node("Reshape", ["x", "target"], ["f"]),
        node("Gemm", ["f", "w", "c"], ["y"], transB=1), node("Upsample", ["x", "scales"], ["u"]),
    ]  # fmt: skip
    import numpy as np
    from onnx import numpy_helper

    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")
    proto = model(
        nodes, [value("x", ["N", 3, 4, 4])], [value("y", None), value("u", None)],
        [ints("rest", [-1]), absent("w", [10, 48]), absent("c", [10]), scales], opset=9, ir_version=3,
    )  # fmt: skip
    graph = graph_from_proto(proto, dims={"N": 2})
    assert graph.tensors["y"].shape == (2, 10)
    assert graph.tensors["u"].shape == (2, 3, 8, 8)
    assert graph.opset == 9


@pytest.mark.parametrize("opset", [23, 24])
def test_attention_of_the_newest_operator_sets(opset: int) -> None:
    nodes = [
        node("RMSNormalization", ["x", "g"], ["n"]),
        node("Attention", ["n", "k", "v"], ["y"], q_num_heads=8, kv_num_heads=2),
    ]
    inputs = [value("x", [2, 5, 64]), value("k", [2, 7, 16]), value("v", [2, 7, 16])]
    graph = graph_from_proto(model(nodes, inputs, [value("y", None)], [absent("g", [64])], opset=opset))
    assert graph.tensors["y"].shape == (2, 5, 64)


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layers(op: str, gates: int) -> None:
    call = node(op, ["x", "w", "r", "b"], ["y", "h"], hidden_size=16, direction="bidirectional")
    stored = [absent("w", [2, gates * 16, 8]), absent("r", [2, gates * 16, 16]), absent("b", [2, 2 * gates * 16])]
    graph = graph_from_proto(model([call], [value("x", [50, 4, 8])], [value("y", None), value("h", None)], stored))
    assert graph.tensors["y"].shape == (50, 2, 4, 16)
    assert [p.label for p in graph.parameters] == ["w", "r", "b"]
    assert graph.parameter_count() == 2 * gates * 16 * (8 + 16 + 2)


def test_nodes_out_of_order_are_put_in_order() -> None:
    nodes = [node("Relu", ["a"], ["y"]), node("Neg", ["x"], ["a"])]
    graph = graph_from_proto(model(nodes, [value("x", [2, 8])], [value("y", None)]))
    assert [n.op for n in graph.nodes] == ["Neg", "Relu"]


def test_the_model_in_memory_is_left_alone() -> None:
    proto = model(
        [node("MatMul", ["x", "w"], ["y"])], [value("x", ["b", 8])], [value("y", None)], [absent("w", [8, 4])]
    )
    before = proto.SerializeToString()
    graph_from_proto(proto, dims={"b": 2})
    assert proto.SerializeToString() == before


def test_quantised_products() -> None:
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]), node("MatMulInteger", ["q", "w", "z"], ["i"]),
        node("Cast", ["i"], ["y"], to=F32),
    ]  # fmt: skip
    graph = graph_from_proto(
        model(nodes, [value("x", [2, 8])], [value("y", None)], [absent("w", [8, 4], TensorProto.INT8)])
    )
    assert graph.tensors["y"].shape == (2, 4)
    assert [(p.name, p.trainable) for p in graph.parameters] == [("w", False)]


def test_inputs_that_are_positions_stay_known_by_value() -> None:
    nodes = [node("Slice", ["x", "starts", "ends", "axes"], ["y"])]
    stored = [ints("starts", [1]), ints("ends", [3]), ints("axes", [1])]
    graph = graph_from_proto(model(nodes, [value("x", [2, 8], I64)], [value("y", None)], stored))
    assert graph.tensors["y"].shape == (2, 2)
    assert graph.constants == {"starts": (1,), "ends": (3,), "axes": (1,)}


def test_every_node_of_onnx_domain_knows_its_set(recwarn: pytest.WarningsRecorder) -> None:
    proto = model(
        [onnx.helper.make_node("Relu", ["x"], ["y"], domain="ai.onnx")], [value("x", [2])], [value("y", None)]
    )
    assert graph_from_proto(proto).nodes[0].op == "Relu"
    assert not recwarn.list

"""Weights in every place where files keep them, and the regions that are computed from them alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from planner.graph import DType, TensorKind
from planner.importers import graph_from_proto, load_graph
from tests.importers.build import F32, I64, absent, ints, model, node, value


def test_initializers_listed_as_inputs_are_no_inputs() -> None:
    proto = model(
        [node("MatMul", ["x", "w"], ["y"])], [value("x", [2, 8]), value("w", [8, 4])], [value("y", None)],
        [absent("w", [8, 4])], ir_version=3, opset=9,
    )  # fmt: skip
    graph = graph_from_proto(proto)
    assert graph.inputs == ("x",)
    assert graph.tensors["w"].kind is TensorKind.PARAMETER


@pytest.mark.parametrize("kind", ["Constant", "ConstantOfShape", "Identity"])
def test_weights_that_nodes_make(kind: str) -> None:
    stored = [ints("shape", [8, 4]), absent("w0", [8, 4])]
    maker = {
        "Constant": node("Constant", [], ["w"], value=numpy_helper.from_array(np.zeros((8, 4), np.float32))),
        "ConstantOfShape": node("ConstantOfShape", ["shape"], ["w"]),
        "Identity": node("Identity", ["w0"], ["w"]),
    }[kind]
    graph = graph_from_proto(
        model([maker, node("MatMul", ["x", "w"], ["y"])], [value("x", [2, 8])], [value("y", None)], stored)
    )
    assert [n.op for n in graph.nodes] == ["MatMul"]
    assert graph.parameter_count() == 32
    assert graph.report.folded_nodes == 1


def test_what_depends_on_weights_alone_is_a_parameter_with_sources() -> None:
    nodes = [
        node("Transpose", ["a"], ["at"], perm=[1, 0]), node("Concat", ["at", "b"], ["ab"], axis=1),
        node("Cast", ["ab"], ["w"], to=TensorProto.FLOAT16), node("MatMul", ["x", "w"], ["y"]),
    ]  # fmt: skip
    proto = model(
        nodes, [value("x", [2, 8], TensorProto.FLOAT16)], [value("y", None)], [absent("a", [3, 8]), absent("b", [8, 5])]
    )
    graph = graph_from_proto(proto)
    assert [n.op for n in graph.nodes] == ["MatMul"]
    assert graph.sources["w"] == ("a", "b")
    assert graph.tensors["w"].kind is TensorKind.PARAMETER
    assert graph.tensors["w"].shape == (8, 8)
    assert graph.tensors["w"].dtype is DType.FLOAT16
    assert graph.report.folded_nodes == 3


def test_tables_masks_and_scalars_are_constants() -> None:
    mask = numpy_helper.from_array(np.triu(np.full((4, 4), -1e9, np.float32)), "mask")
    scale = numpy_helper.from_array(np.float32(0.125), "scale")
    nodes = [node("Mul", ["x", "scale"], ["s"]), node("Add", ["s", "mask"], ["m"]), node("Softmax", ["m"], ["p"])]
    nodes.append(node("MatMul", ["p", "x"], ["y"]))
    graph = graph_from_proto(model(nodes, [value("x", [1, 2, 4, 4])], [value("y", None)], [mask, scale]))
    assert not graph.parameters
    assert graph.tensors["mask"].kind is TensorKind.CONSTANT
    assert graph.constants["scale"] == (0.125,)
    assert len(graph.constants["mask"]) == 16


def test_a_folded_mask_with_a_path_for_a_name_is_no_parameter() -> None:
    mask = numpy_helper.from_array(np.triu(np.full((1, 1, 4, 4), -np.inf, np.float32), 1), "transformer.mask_table")
    graph = graph_from_proto(
        model([node("Add", ["x", mask.name], ["y"])], [value("x", [1, 2, 4, 4])], [value("y", None)], [mask])
    )
    assert not graph.parameters


def test_a_table_named_after_an_operation_is_suspected() -> None:
    stored = [absent("transformer.gather_2", [5, 8])]
    graph = graph_from_proto(
        model([node("Add", ["x", stored[0].name], ["y"])], [value("x", [2, 5, 8])], [value("y", None)], stored)
    )
    assert not graph.parameters
    assert [n.code for n in graph.report.notes] == ["possible-weight"]
    stored = [absent("transformer.position_table", [5, 8])]
    named = graph_from_proto(
        model([node("Add", ["x", stored[0].name], ["y"])], [value("x", [2, 5, 8])], [value("y", None)], stored)
    )
    assert named.parameter_count() == 40


def test_rotary_tables_are_no_parameters() -> None:
    nodes = [
        node("Cos", ["angles"], ["cos"]), node("Mul", ["x", "cos"], ["a"]), node("Add", ["a", "x"], ["y"]),
    ]  # fmt: skip
    graph = graph_from_proto(
        model(nodes, [value("x", [1, 2, 16, 64])], [value("y", None)], [absent("angles", [1, 16, 64])])
    )
    assert not graph.parameters
    assert graph.tensors["cos"].kind is TensorKind.CONSTANT


def test_dequantised_weight_keeps_its_stored_type() -> None:
    nodes = [node("DequantizeLinear", ["q", "scale"], ["w"], axis=0, block_size=4), node("MatMul", ["x", "w"], ["y"])]
    stored = [absent("q", [8, 4], TensorProto.INT4), absent("scale", [2, 4])]
    graph = graph_from_proto(model(nodes, [value("x", [2, 8])], [value("y", None)], stored, opset=21))
    weight = graph.parameters[0]
    assert (weight.name, weight.dtype, weight.trainable) == ("q", DType.INT4, False)
    assert weight.dtype.bits == 4
    assert [n.op for n in graph.nodes] == ["MatMul"]
    assert any(n.code == "quantised-weights" for n in graph.report.notes)


@pytest.mark.parametrize("element", [TensorProto.BFLOAT16, TensorProto.FLOAT16, TensorProto.FLOAT8E4M3FN])
def test_element_types_without_a_numpy_type(element: int) -> None:
    nodes = [node("Cast", ["w"], ["w32"], to=F32), node("MatMul", ["x", "w32"], ["y"])]
    graph = graph_from_proto(
        model(nodes, [value("x", [2, 8])], [value("y", None)], [absent("w", [8, 4], element)], opset=21)
    )
    assert graph.parameters[0].dtype.bits == (8 if element == TensorProto.FLOAT8E4M3FN else 16)


def test_matmul_nbits_knows_its_real_size() -> None:
    call = node("MatMulNBits", ["x", "b", "s"], ["y"], domain="com.microsoft", K=64, N=32, bits=4, block_size=32)
    stored = [absent("b", [32, 2, 16], TensorProto.UINT8), absent("s", [64])]
    graph = graph_from_proto(
        model([call], [value("x", [2, 7, 64])], [value("y", None)], stored, domains={"com.microsoft": 1})
    )
    assert graph.tensors["y"].shape == (2, 7, 32)
    assert [p.name for p in graph.parameters] == ["b", "s"]


def test_large_data_is_neither_kept_nor_needed(tmp_path: Path) -> None:
    proto = model(
        [node("MatMul", ["x", "w"], ["y"])], [value("x", [2, 512])], [value("y", None)],
        [numpy_helper.from_array(np.ones((512, 512), np.float32), "w")],
    )  # fmt: skip
    path = tmp_path / "fat.onnx"
    onnx.save(proto, path)
    assert load_graph(path).fingerprint == graph_from_proto(proto).fingerprint
    assert load_graph(path).parameter_count() == 512 * 512


def test_a_file_larger_than_any_protobuf_message(tmp_path: Path) -> None:
    """3 GiB of weights inside the file, written as a hole so that the test needs no disk."""
    size = 3 << 30
    head = TensorProto(name="w", data_type=F32, dims=[1024, size // 4096])
    tensor = head.SerializeToString() + _key(9, size)
    body = model(
        [node("MatMul", ["x", "w"], ["y"])], [value("x", [2, 1024])], [value("y", [2, size // 4096])]
    )  # fmt: skip
    graph_bytes = body.graph.SerializeToString() + _key(5, len(tensor) + size) + tensor
    body.ClearField("graph")
    path = tmp_path / "huge.onnx"
    with path.open("wb") as stream:
        stream.write(body.SerializeToString() + _key(7, len(graph_bytes) + size) + graph_bytes)
        stream.truncate(stream.tell() + size)
    graph = load_graph(path)
    assert graph.parameter_count() == size // 4


def _key(number: int, length: int) -> bytes:
    encoded = bytearray([number << 3 | 2])
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)


def test_small_integers_are_read_from_a_data_file_that_is_there(tmp_path: Path) -> None:
    target = absent("target", [2], I64)
    target.external_data[0].value = "shapes.bin"
    target.external_data.add(key="offset", value="8")
    (tmp_path / "shapes.bin").write_bytes(np.array([7, 4, 4], np.int64).tobytes())
    proto = model([node("Reshape", ["x", "target"], ["y"])], [value("x", [2, 8])], [value("y", None)], [target])
    onnx.save(proto, tmp_path / "m.onnx")
    assert load_graph(tmp_path / "m.onnx").tensors["y"].shape == (4, 4)


def test_no_ops_and_inference_dropout_collapse_but_training_dropout_stays() -> None:
    nodes = [
        node("Identity", ["x"], ["a"]), node("Cast", ["a"], ["b"], to=F32), node("Dropout", ["b", "ratio"], ["c"]),
        node("Dropout", ["c", "ratio", "on"], ["d"]), node("Relu", ["d"], ["y"]),
    ]  # fmt: skip
    stored = [numpy_helper.from_array(np.float32(0.1), "ratio"), numpy_helper.from_array(np.array(True), "on")]
    graph = graph_from_proto(model(nodes, [value("x", [2, 8])], [value("y", None)], stored))
    assert [n.op for n in graph.nodes] == ["Dropout", "Relu"]
    assert graph.nodes[0].inputs[0] == "x"
    assert graph.report.plumbing_nodes == 3


def test_a_dropout_from_before_training_modes_stays() -> None:
    proto = model(
        [node("Dropout", ["x"], ["y"], ratio=0.5)], [value("x", [2, 8])], [value("y", None)], opset=9, ir_version=3
    )
    assert [n.op for n in graph_from_proto(proto).nodes] == ["Dropout"]


def test_unused_outputs_are_empty() -> None:
    nodes = [node("TopK", ["x", "k"], ["v", "i"]), node("Relu", ["v"], ["y"])]
    graph = graph_from_proto(model(nodes, [value("x", [2, 8])], [value("y", None)], [ints("k", [3])]))
    assert graph.nodes[0].outputs == ("v", "")
    assert graph.tensors["y"].shape == (2, 3)


def test_integers_that_only_say_a_shape_at_run_time_are_cut() -> None:
    nodes = [
        node("NonZero", ["flags"], ["where"]), node("Shape", ["where"], ["s"]), node("Relu", ["x"], ["r"]),
        node("Cast", ["n"], ["n64"], to=I64), node("Reshape", ["r", "n64"], ["y"]),
    ]  # fmt: skip
    proto = model(
        nodes, [value("x", [2, 8]), value("n", [2], TensorProto.INT32), value("flags", [4], TensorProto.BOOL)],
        [value("y", [4, 4])],
    )  # fmt: skip
    graph = graph_from_proto(proto)
    assert [n.op for n in graph.nodes] == ["Relu", "Reshape"]
    assert graph.nodes[1].inputs == ("r", "")
    assert (graph.report.plumbing_nodes, graph.report.dead_nodes) == (1, 2)


def test_final_softmax_is_left_out_and_said() -> None:
    nodes = [node("MatMul", ["x", "w"], ["logits"]), node("Softmax", ["logits"], ["p"])]
    proto = model(nodes, [value("x", [2, 8])], [value("p", None)], [absent("w", [8, 10])])
    graph = graph_from_proto(proto)
    assert [n.op for n in graph.nodes] == ["MatMul"]
    assert graph.outputs == ("logits",)
    assert any(n.code == "final-softmax" for n in graph.report.notes)


def test_a_softmax_that_is_all_there_is_stays() -> None:
    graph = graph_from_proto(model([node("Softmax", ["x"], ["y"])], [value("x", [2, 8])], [value("y", None)]))
    assert [n.op for n in graph.nodes] == ["Softmax"]


def test_a_loss_in_the_graph_stays() -> None:
    nodes = [
        node("MatMul", ["x", "w"], ["logits"]), node("LogSoftmax", ["logits"], ["p"]),
        node("NegativeLogLikelihoodLoss", ["p", "t"], ["loss"]),
    ]  # fmt: skip
    proto = model(nodes, [value("x", [2, 8]), value("t", [2], I64)], [value("loss", None)], [absent("w", [8, 10])])
    assert [n.op for n in graph_from_proto(proto).nodes] == ["MatMul", "LogSoftmax", "NegativeLogLikelihoodLoss"]


def test_attribute_values_are_plain_and_short() -> None:
    call = helper.make_node("LeakyRelu", ["x"], ["y"], alpha=0.1)
    graph = graph_from_proto(model([call], [value("x", [2])], [value("y", None)]))
    assert dict(graph.nodes[0].attributes) == {"alpha": 0.1}


@pytest.mark.parametrize("op", ["Mul", "Div", "Add", "Sub", "Pow"])
def test_arithmetic_that_changes_nothing_is_left_out(op: str) -> None:
    neutral = 0.0 if op in ("Add", "Sub") else 1.0

    def kept(number: float, name: str = "val_1") -> list[str]:
        stored = [absent("w", [8, 4]), numpy_helper.from_array(np.array(number, np.float32), name)]
        nodes = [node("MatMul", ["x", "w"], ["h"]), node(op, ["h", name], ["s"]), node("Relu", ["s"], ["y"])]
        proto = model(nodes, [value("x", [2, 8])], [value("y", None)], stored)
        return [n.op for n in graph_from_proto(proto).nodes]

    assert kept(neutral) == ["MatMul", "Relu"]
    assert kept(2.0) == ["MatMul", op, "Relu"]
    assert kept(neutral, "layer.scale") == ["MatMul", op, "Relu"]


def test_a_number_cast_like_an_activation_is_a_number() -> None:
    stored = [absent("w", [8, 4]), numpy_helper.from_array(np.array(16, np.int64), "size")]
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("CastLike", ["size", "h"], ["f"]), node("Sqrt", ["f"], ["r"]),
        node("Div", ["h", "r"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, [value("x", [2, 8])], [value("y", None)], stored)
    assert [n.op for n in graph_from_proto(proto).nodes] == ["MatMul", "Div"]


def test_an_empty_piece_of_a_concatenation_is_left_out() -> None:
    stored = [absent("w", [8, 4]), ints("four", [4]), ints("last", [-1])]
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Slice", ["h", "four", "four", "last"], ["nothing"]),
        node("Concat", ["h", "nothing"], ["c"], axis=1), node("Relu", ["c"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, [value("x", [2, 8])], [value("y", None)], stored)
    assert [n.op for n in graph_from_proto(proto).nodes] == ["MatMul", "Relu"]


def test_sizes_that_a_fill_of_a_computed_shape_gives_are_known() -> None:
    """As torch writes the amounts of a padding: zeros appended up to twice the rank, in another order."""
    stored = [absent("w", [8, 4]), ints("amounts", [1, 1]), ints("wanted", [4]), ints("order", [2, 0, 3, 1])]
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Shape", ["amounts"], ["given"]),
        node("Sub", ["wanted", "given"], ["missing"]),
        node("ConstantOfShape", ["missing"], ["zeros"], value=ints("zero", [0])),
        node("Concat", ["amounts", "zeros"], ["all"], axis=0), node("Gather", ["all", "order"], ["pads"]),
        node("Pad", ["h", "pads"], ["p"]), node("MatMul", ["p", "v"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, [value("x", [2, 8])], [value("y", None)], [*stored, absent("v", [6, 3])])
    graph = graph_from_proto(proto)
    assert [graph.tensors[name].shape for name in ("p", "y")] == [(2, 6), (2, 3)]

"""Models that contradict the operator standard or themselves: refused with the node or tensor that is at fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import AttributeProto, helper, numpy_helper

from planner.errors import ModelError
from planner.importers import graph_from_proto, load_graph
from tests.importers.build import I64, absent, ints, model, node, value
from tests.importers.test_bad_files import small_model


def refused(proto: onnx.ModelProto, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        graph_from_proto(proto)
    assert caught.value.exit_code == 3
    assert caught.value.problem.hint


def one(*nodes: onnx.NodeProto, stored: tuple[onnx.TensorProto, ...] = (), **more: Any) -> onnx.ModelProto:
    return model(nodes, [value("x", [4, 8])], [value("y", None)], stored, **more)


def mistyped() -> onnx.NodeProto:
    wrong = node("Softmax", ["x"], ["y"])
    wrong.attribute.append(helper.make_attribute("axis", "last"))
    return wrong


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (node("Relu", [], ["y"]), "Relu 'y': .*input size 0"),
        (node("Relu", ["x", "x"], ["y"]), "Relu 'y': .*input size 2"),
        (node("Relu", [""], ["y"]), "Relu 'y': .*input 0 is marked single"),
        (node("Relu", ["x"], ["y", "z"]), "Relu 'y': .*output size 2"),
        (node("Concat", ["x", "x"], ["y"]), "Concat 'y': Required attribute 'axis' is missing"),
        (mistyped(), "Softmax 'y': .*'INT', actual: 'STRING'"),
        (node("If", ["x"], ["y"]), "If 'y': Required attribute '(else|then)_branch' is missing"),
        (node("SequenceAt", ["x"], ["y"]), "SequenceAt 'y': .*input size 1"),
        (node("Einsum", ["x", "x"], ["y"], equation="ab,bc-"), "Einsum 'y' has the malformed equation 'ab,bc-'"),
        (node("SplitToSequence", ["x"], ["y"], axis=7), "works along axis 7 of a tensor of 2 dimensions"),
    ],
)
def test_calls_that_the_standard_does_not_know(wrong: onnx.NodeProto, message: str) -> None:
    refused(one(wrong), message)


@pytest.mark.parametrize("version", [1 << 40, -1])
def test_versions_of_operator_sets_that_cannot_be(version: int) -> None:
    wrong = small_model()
    wrong.opset_import[0].version = version
    refused(wrong, f"operator set 'ai.onnx' has the version {version}")


def test_a_tensor_that_is_computed_twice() -> None:
    refused(one(node("Relu", ["x"], ["y"]), node("Abs", ["x"], ["y"])), "which Relu 'y' writes too")


@pytest.mark.parametrize("shape", [[-1, 8], [1 << 40, 1 << 40]])
def test_shapes_that_cannot_be(shape: list[int]) -> None:
    refused(one(node("MatMul", ["x", "w"], ["y"]), stored=(absent("w", shape),)), "'w' has the shape")


def test_two_inputs_of_one_name() -> None:
    twice = one(node("Relu", ["x"], ["y"]))
    twice.graph.input.append(value("x", [4]))
    refused(twice, "two inputs are called 'x'")


def test_a_function_that_calls_itself() -> None:
    body = [node("again", ["a"], ["b"], domain="own")]
    function = helper.make_function("own", "again", ["a"], ["b"], body, [helper.make_opsetid("own", 1)])
    call = node("again", ["x"], ["y"], domain="own")
    refused(one(call, functions=[function], domains={"own": 1}), "the function 'again' calls itself")


def test_functions_that_grow_without_bound() -> None:
    """Each of 30 functions calls the next one twice: a thousand million operators."""
    functions = []
    for i in range(30):
        call = f"f{i + 1}" if i < 29 else "leaf"
        body = [node(call, ["a"], ["m"], domain="own"), node(call, ["m"], ["b"], domain="own")]
        functions.append(helper.make_function("own", f"f{i}", ["a"], ["b"], body, [helper.make_opsetid("own", 1)]))
    call = node("f0", ["x"], ["y"], domain="own")
    refused(one(call, functions=functions, domains={"own": 1}), "the model has 1,073,741,824 operators")


def loop(trips: int, inputs: int = 3) -> onnx.ModelProto:
    names = [value("i", [], I64), value("go", [], onnx.TensorProto.BOOL), value("s", [4, 8])][:inputs]
    body = helper.make_graph(
        [node("Relu", ["s"], ["n"]), node("Identity", ["go"], ["on"])], "body", names,
        [value("on", [], onnx.TensorProto.BOOL), value("n", [4, 8])],
    )  # fmt: skip
    return one(node("Loop", ["trips", "", "x"], ["y"], body=body), stored=(ints("trips", trips),))


def test_loops_that_turn_too_often_or_do_not_take_their_states() -> None:
    assert graph_from_proto(loop(3)).nodes
    refused(loop(10_000_000), "Loop 'y' runs 10,000,000 times, at most 1,048,576 can be priced")
    refused(loop(3, inputs=2), "Loop 'y' has a body of 2 inputs and 2 outputs, where 3 and at least 2 are needed")


def test_ranks_of_operators_that_onnx_does_not_check() -> None:
    wrong = node("MoE", ["x", "x", "w", "", "w"], ["y"], domain="com.microsoft")
    refused(one(wrong, stored=(absent("w", [8, 8]),), domains={"com.microsoft": 1}), "reads 'w' of 2 dimensions")


def test_a_position_out_of_an_empty_tensor() -> None:
    nodes = [node("SequenceConstruct", ["x"], ["s"]), node("SequenceAt", ["s", "none"], ["y"])]
    empty = numpy_helper.from_array(numpy_helper.to_array(ints("none", [0]))[:0], "none")
    refused(one(*nodes, stored=(empty,)), "SequenceAt 'y' takes a number from 'none', which has none")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"offset": "x"}, "the offset 'x' is no position"),
        ({"offset": "-8"}, "the offset '-8' is no position"),
        ({"offset": "9" * 400}, "is no position"),
        ({"location": "a\0b"}, "cannot be read"),
        ({"location": "a" * 6000}, "cannot be read: File name too long"),
    ],
)
def test_external_data_that_cannot_be_found(entries: dict[str, str], message: str, tmp_path: Path) -> None:
    target = absent("target", [2], I64)
    del target.external_data[:]
    for key, text in ({"location": "data.bin"} | entries).items():
        target.external_data.add(key=key, value=text)
    path = tmp_path / "m.onnx"
    path.write_bytes(one(node("Reshape", ["x", "target"], ["y"]), stored=(target,)).SerializeToString())
    (tmp_path / "data.bin").write_bytes(bytes(16))
    with pytest.raises(ModelError, match=message) as caught:
        load_graph(path)
    assert "external data of 'target'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(small_model().SerializeToString().replace(b"Relu", b"Re\xff\xfe"))
    with pytest.raises(ModelError, match=r"NodeProto\.op_type holds a text that is not UTF-8"):
        load_graph(path)


def test_attributes_that_the_standard_does_not_know_are_refused() -> None:
    wrong = node("Relu", ["x"], ["y"])
    wrong.attribute.append(AttributeProto(name="sharpness", type=AttributeProto.INT, i=3))
    refused(one(wrong), "Unrecognized attribute: sharpness")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (node("Conv", ["x", "w"], ["y"], strides=[1, 1, 1]), "Conv 'y' has 3 strides for 2 spatial dimensions"),
        (node("Split", ["v"], ["y", "z"], num_outputs=1), "Split 'y' splits into 1 parts and has 2 outputs"),
        (node("Conv", ["x", "v"], ["y"], kernel_shape=[3, 3]), "reads 3-dimensional weights, its input has 4"),
        (node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], pads=[1, 1]), "MaxPool 'y' has 2 pads for 2 spatial"),
        (node("GRU", ["v", "v", "w"], ["y"], hidden_size=3), "GRU 'y' reads 'w' of 4 dimensions, where it takes 3"),
        (
            node("Attention", ["v", "m", "", "c"], ["y"], domain="com.microsoft", num_heads=1),
            "Attention 'y' reads 'c' of 0 dimensions, where it takes 1 or 2 or 3 or 4",
        ),
        (
            node("GroupQueryAttention", ["v", "v", "v"], ["y"], domain="com.microsoft", num_heads=2, kv_num_heads=0),
            r"GroupQueryAttention 'y' has the attribute 'kv_num_heads' = 0",
        ),
    ],
)
def test_windows_ranks_and_counts(wrong: onnx.NodeProto, message: str) -> None:
    inputs = [value("x", [1, 3, 8, 8]), value("v", [4, 1, 3])]
    stored = [absent("w", [3, 3, 3, 3]), absent("m", [3, 9]), absent("c", [])]
    refused(model([wrong], inputs, [value("y", [1, 3, 8, 8])], stored, domains={"com.microsoft": 1}), message)


def test_a_window_larger_than_its_image_is_named_with_both() -> None:
    for height, message in ((1, r"window of \[3, 3\] over an input of \[1, 8\]"), (2, r"shape \[2, 4, 0, 6\]")):
        nodes = [node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3])]
        stored = [absent("w", [4, 3, 3, 3])]
        refused(model(nodes, [value("x", [2, 3, height, 8])], [value("y", None)], stored), message)
    padded = [node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3], pads=[1, 0, 1, 0])]
    graph = graph_from_proto(model(padded, [value("x", [2, 3, 1, 8])], [value("y", None)], [absent("w", [4, 3, 3, 3])]))
    assert graph.tensors["y"].shape == (2, 4, 1, 6)


def test_a_call_with_more_operands_than_the_function_has_is_refused() -> None:
    inner = helper.make_function("own", "F", ["a"], ["b"], [node("Relu", ["a"], ["b"])], [helper.make_opsetid("", 20)])
    for inputs, outputs in ((["x", "x"], ["y"]), (["x"], ["y", "z"])):
        call = node("F", inputs, outputs, domain="own", name="call")
        refused(
            one(call, functions=[inner], domains={"own": 1}),
            r"F 'call' calls a function of 1 (operands|results) with 2",
        )


def test_a_version_of_the_format_that_no_program_writes_is_refused() -> None:
    proto = one(node("Relu", ["x"], ["y"]))
    proto.ir_version = 1 << 40
    refused(proto, "the file has the ONNX version 1099511627776")

"""Functions, If, Loop and Scan: bodies in place, trip counts known, given or asked for, and said."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper

from planner.errors import ModelError
from planner.graph import Graph, NoteLevel, TensorKind
from planner.importers import graph_from_proto
from tests.importers.build import BOOL, I64, absent, ints, model, node, scoped, value
from tests.importers.work import matrix_flops


def ops(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


def note(graph: Graph, code: str) -> str:
    return next(n.message for n in graph.report.notes if n.code == code)


def balanced(graph: Graph) -> bool:
    r = graph.report
    return r.total_nodes == len(graph.nodes) + r.merged_nodes + r.plumbing_nodes + r.folded_nodes + r.dead_nodes


def scan_model() -> onnx.ModelProto:
    steps = [
        node("MatMul", ["h", "R"], ["hr"]),
        node("MatMul", ["x", "W"], ["xw"]),
        node("Add", ["hr", "xw"], ["s"]),
        node("Tanh", ["s"], ["h2"]),
        node("Identity", ["h2"], ["y"]),
    ]
    body = helper.make_graph(
        steps, "body", [value("h", [2, 8]), value("x", [2, 4])], [value("h2", [2, 8]), value("y", [2, 8])]
    )
    scan = node("Scan", ["h0", "X"], ["hT", "Y"], body=body, num_scan_inputs=1)
    weights = [absent("R", [8, 8]), absent("W", [4, 8]), absent("h0", [2, 8])]
    return model([scan], [value("X", [10, 2, 4])], [value("hT", [2, 8]), value("Y", [10, 2, 8])], weights)


def test_scan_runs_once_for_each_element() -> None:
    graph = graph_from_proto(scan_model())
    assert matrix_flops(graph) == 10 * (2 * 2 * 8 * 8 + 2 * 2 * 4 * 8)
    assert graph.tensors["Y"].shape == (10, 2, 8)
    assert [p.name for p in graph.parameters] == ["R", "W"]
    assert "10 times" in note(graph, "loop-trips")
    assert balanced(graph)


def test_a_constant_initial_state_does_not_make_the_recurrence_constant() -> None:
    graph = graph_from_proto(scan_model())
    recurrent = next(n for n in graph.nodes if "R" in n.inputs)
    assert graph.tensors[recurrent.inputs[0]].kind is TensorKind.ACTIVATION


def loop_body() -> onnx.GraphProto:
    nodes = [node("MatMul", ["c", "W"], ["c2"]), node("Relu", ["c2"], ["c3"]), node("Identity", ["go"], ["go2"])]
    inputs = [value("i", [], I64), value("go", [], BOOL), value("c", [2, 8])]
    return helper.make_graph(nodes, "body", inputs, [value("go2", [], BOOL), value("c3", [2, 8]), value("c2", [2, 8])])


def test_loop_with_a_constant_trip_count_and_collected_values() -> None:
    loop = node("Loop", ["trips", "", "x"], ["y", "all"], body=loop_body(), name="repeat")
    proto = model(
        [loop], [value("x", [2, 8])], [value("y", None), value("all", None)], [ints("trips", 5), absent("W", [8, 8])]
    )
    graph = graph_from_proto(proto)
    assert matrix_flops(graph) == 5 * 2 * 2 * 8 * 8
    assert graph.tensors["all"].shape == (5, 2, 8)
    assert balanced(graph)


def test_trip_count_that_is_asked_for_given_and_said() -> None:
    loop = node("Loop", ["trips", "", "x"], ["y", "all"], body=loop_body(), name="repeat")
    inputs = [value("x", [2, 8]), value("trips", [], I64)]
    proto = model([loop], inputs, [value("y", None)], [absent("W", [8, 8])])
    with pytest.raises(ModelError, match="how often Loop 'repeat' runs") as caught:
        graph_from_proto(proto)
    assert "--dim repeat=" in caught.value.problem.hint
    graph = graph_from_proto(proto, dims={"repeat": 7})
    assert [n.repeat for n in graph.nodes] == [7, 7]
    assert "7 times, as given" in note(graph, "loop-trips")


def test_nested_loops_multiply() -> None:
    inner = node("Loop", ["three", "", "c"], ["c3", "ignored"], body=loop_body(), name="inner")
    outer_body = helper.make_graph(
        [inner, node("Identity", ["go"], ["go3"])],
        "outer",
        [value("j", [], I64), value("go", [], BOOL), value("c", [2, 8])],
        [value("go3", [], BOOL), value("c3", [2, 8])],
    )
    for entry, new in zip(inner.attribute[0].g.input, ["i", "g", "s"], strict=True):
        _rename(inner.attribute[0].g, entry.name, new)
    outer = node("Loop", ["four", "", "x"], ["y"], body=outer_body, name="outer")
    proto = model(
        [outer], [value("x", [2, 8])], [value("y", None)], [ints("three", 3), ints("four", 4), absent("W", [8, 8])]
    )
    graph = graph_from_proto(proto)
    assert matrix_flops(graph) == 12 * 2 * 2 * 8 * 8
    assert [p.name for p in graph.parameters] == ["W"]


def _rename(graph: onnx.GraphProto, old: str, new: str) -> None:
    for entry in graph.input:
        entry.name = new if entry.name == old else entry.name
    for inner in graph.node:
        inner.input[:] = [new if name == old else name for name in inner.input]


def if_model(condition: list[onnx.NodeProto], inputs: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
    heavy = helper.make_graph([node("MatMul", ["x", "W"], ["t"])], "then", [], [value("t", [2, 8])])
    cheap = helper.make_graph([node("Relu", ["x"], ["e"])], "else", [], [value("e", [2, 8])])
    choose = node("If", ["c"], ["z"], then_branch=cheap, else_branch=heavy, name="choose")
    weights = [absent("W", [8, 8]), ints("zero", 0), ints("two", 2)]
    return model([*condition, choose, node("Neg", ["z"], ["y"])], inputs, [value("y", None)], weights)


def test_if_on_data_takes_the_costlier_branch_and_says_so() -> None:
    graph = graph_from_proto(if_model([], [value("x", [2, 8]), value("c", [], BOOL)]))
    assert ops(graph) == ["MatMul", "Neg"]
    assert any(n.level is NoteLevel.WARNING and "else_branch" in n.message for n in graph.report.notes)
    assert graph.report.dead_nodes == 1
    assert balanced(graph)


def test_if_on_a_known_shape_takes_the_branch_that_runs() -> None:
    condition = [
        node("Shape", ["x"], ["s"]), node("Gather", ["s", "zero"], ["d"]), node("Equal", ["d", "two"], ["c"]),
    ]  # fmt: skip
    graph = graph_from_proto(if_model(condition, [value("x", [2, 8])]))
    assert ops(graph) == ["Relu", "Neg"]
    assert "then_branch" in note(graph, "if-branch")


def test_a_branch_that_cannot_run_is_not_taken() -> None:
    broken = helper.make_graph([node("MatMul", ["x", "V"], ["t"])], "then", [], [value("t", None)])
    cheap = helper.make_graph([node("Relu", ["x"], ["e"])], "else", [], [value("e", None)])
    choose = node("If", ["c"], ["y"], then_branch=broken, else_branch=cheap)
    inputs = [value("x", [2, 8]), value("c", [], BOOL)]
    graph = graph_from_proto(model([choose], inputs, [value("y", None)], [absent("V", [3, 3])]))
    assert ops(graph) == ["Relu"]
    assert "cannot be followed" in note(graph, "if-branch")
    assert balanced(graph)


def test_scan_of_operator_set_8_is_refused() -> None:
    proto = scan_model()
    proto.opset_import[0].version = 8
    with pytest.raises(ModelError, match="operator set 8"):
        graph_from_proto(proto)


def linear_function() -> onnx.FunctionProto:
    body = [
        node("Transpose", ["w"], ["wt"], perm=[1, 0]),
        node("MatMul", ["a", "wt"], ["mm"]),
        node("LeakyRelu", ["mm"], ["o"]),
    ]
    body[2].attribute.add(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT)
    return helper.make_function("local", "Lin", ["a", "w"], ["o"], body, [helper.make_opsetid("", 20)], ["slope"])


def test_local_functions_are_put_in_place_with_their_attributes_and_modules() -> None:
    calls = [
        scoped(node("Lin", ["x", "W1"], ["h"], domain="local", slope=0.1), "net", "net.fc1", "call"),
        node("Lin", ["h", "W2"], ["y"], domain="local", slope=0.2, name="/net/fc2/Lin"),
    ]
    proto = model(
        calls, [value("x", [2, 8])], [value("y", None)], [absent("W1", [5, 8]), absent("W2", [3, 5])],
        domains={"local": 1}, functions=[linear_function()],
    )  # fmt: skip
    graph = graph_from_proto(proto)
    assert ops(graph) == ["MatMul", "LeakyRelu", "MatMul", "LeakyRelu"]
    assert [n.attributes.get("alpha") for n in graph.nodes if n.op == "LeakyRelu"] == [0.1, 0.2]
    assert [n.module for n in graph.nodes] == ["net.fc1", "net.fc1", "net.fc2", "net.fc2"]
    assert matrix_flops(graph) == 2 * 2 * (8 * 5 + 5 * 3)
    assert [graph.sources[n.inputs[1]] for n in graph.nodes if n.op == "MatMul"] == [("W1",), ("W2",)]
    assert balanced(graph)


def test_weights_stacked_over_layers_and_scanned() -> None:
    """As a framework writes it that scans over layers: one stored tensor holds all layers' weights."""
    body = helper.make_graph(
        [node("MatMul", ["h", "w"], ["m"]), node("Relu", ["m"], ["h2"])],
        "body", [value("h", [2, 8]), value("w", [8, 8])], [value("h2", [2, 8])],
    )  # fmt: skip
    scan = node("Scan", ["x", "stacked"], ["y"], body=body, num_scan_inputs=1)
    graph = graph_from_proto(model([scan], [value("x", [2, 8])], [value("y", None)], [absent("stacked", [6, 8, 8])]))
    assert matrix_flops(graph) == 6 * 2 * 2 * 8 * 8
    assert graph.parameter_count() == 6 * 64


def test_split_to_sequence_becomes_split() -> None:
    nodes = [
        node("SplitToSequence", ["x", "parts"], ["s"], axis=1), node("SequenceAt", ["s", "one"], ["a"]),
        node("Relu", ["a"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, [value("x", [2, 9])], [value("y", None)], [ints("parts", [2, 3, 4]), ints("one", 1)])
    graph = graph_from_proto(proto)
    assert ops(graph) == ["Split", "Relu"]
    assert graph.tensors["y"].shape == (2, 3)


def test_sequences_stacked_again() -> None:
    nodes = [
        node("SplitToSequence", ["x"], ["s"], axis=0, keepdims=0),
        node("ConcatFromSequence", ["s"], ["y"], axis=1, new_axis=1),
    ]
    graph = graph_from_proto(model(nodes, [value("x", [3, 9])], [value("y", None)]))
    assert graph.tensors["y"].shape == (9, 3)
    assert balanced(graph)


def test_sequences_that_come_out_of_a_branch() -> None:
    then = helper.make_graph([node("SequenceConstruct", ["x", "x"], ["s1"])], "then", [], [])
    other = helper.make_graph([node("SequenceConstruct", ["x"], ["s2"])], "else", [], [])
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [3]))
    then.output.append(helper.make_value_info("s1", kind))
    other.output.append(helper.make_value_info("s2", kind))
    nodes = [
        node("If", ["c"], ["s"], then_branch=then, else_branch=other), node("SequenceAt", ["s", "zero"], ["a"]),
        node("Relu", ["a"], ["y"]),
    ]  # fmt: skip
    graph = graph_from_proto(
        model(nodes, [value("x", [3]), value("c", [], BOOL)], [value("y", None)], [ints("zero", 0)])
    )
    assert ops(graph) == ["Relu"]


def test_a_sequence_that_cannot_be_followed_is_named() -> None:
    nodes = [node("SequenceConstruct", ["x", "x"], ["s"]), node("Relu", ["s"], ["y"])]
    with pytest.raises(ModelError, match="reads the sequence 's'"):
        graph_from_proto(model(nodes, [value("x", [3])], [value("y", None)]))

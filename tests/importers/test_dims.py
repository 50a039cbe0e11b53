"""Symbolic axes: bound by name, asked for together, and the batch dimension found."""

from __future__ import annotations

import onnx
import pytest

from planner.errors import ModelError
from planner.importers import graph_from_proto
from tests.importers.build import I64, absent, ints, model, node, value


def dynamic() -> onnx.ModelProto:
    nodes = [
        node("Shape", ["ids"], ["s"]),
        node("Gather", ["s", "one"], ["length"]),
        node("Unsqueeze", ["length", "zero"], ["lengths"]),
        node("Concat", ["minus", "lengths", "width"], ["target"], axis=0),
        node("Gather", ["table", "ids"], ["e"]),
        node("Reshape", ["e", "target"], ["y"]),
        node("MatMul", ["y", "w"], ["z"]),
    ]
    weights = [absent("table", [100, 8]), absent("w", [8, 6]), ints("one", 1), ints("zero", [0])]
    weights += [ints("minus", [-1]), ints("width", [8])]
    return model(nodes, [value("ids", ["batch", "seq"], I64)], [value("z", ["batch", "seq", 6])], weights, opset=17)


def test_bound_axes_reach_every_shape_and_plumbing_goes_away() -> None:
    graph = graph_from_proto(dynamic(), dims={"batch": 4, "seq": 16})
    assert [node.op for node in graph.nodes] == ["Gather", "MatMul"]
    assert graph.tensors["z"].shape == (4, 16, 6)
    assert graph.batch == 4
    assert graph.report.plumbing_nodes == 5  # four that make the shape, and a Reshape to the shape it had
    assert graph.inputs == ("ids",)


def test_constants_hold_computed_shapes() -> None:
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("Slice", ["s", "zero", "one"], ["first"]),
        node("Concat", ["first", "rest"], ["target"], axis=0),
        node("Reshape", ["x", "target"], ["y"]),
    ]
    proto = model(
        nodes, [value("x", ["n", 12])], [value("y", None)], [ints("zero", [0]), ints("one", [1]), ints("rest", [3, -1])]
    )
    graph = graph_from_proto(proto, dims={"n": 5})
    assert graph.constants["target"] == (5, 3, -1)
    assert graph.tensors["y"].shape == (5, 3, 4)


def test_unbound_axes_are_all_named_with_the_option_to_write() -> None:
    proto = model([node("Relu", ["x"], ["y"])], [value("x", ["batch", "rows", "seq"])], [value("y", None)])
    with pytest.raises(ModelError, match="without a size: 'rows', 'seq'") as caught:
        graph_from_proto(proto)
    assert "--dim rows=128 --dim seq=128" in caught.value.problem.hint


@pytest.mark.parametrize(
    ("shapes", "batch"),
    [([["batch", 4]], 1), ([["N", 4]], 1), ([[None, 4]], 1), ([["s77", 4], ["s77", 2]], 1), ([[3, "my_batch"]], 1)],
)
def test_a_batch_without_a_size_is_one_and_that_is_said(shapes: list[list[int | str | None]], batch: int) -> None:
    inputs = [value(f"x{i}", shape) for i, shape in enumerate(shapes)]
    graph = graph_from_proto(model([node("Relu", ["x0"], ["y"])], inputs, [value("y", None)]))
    assert graph.batch == batch
    assert [note.code for note in graph.report.notes] == ["batch-assumed"]


@pytest.mark.parametrize("shape", [[4, "seq"], ["rows", "columns"]])
def test_an_axis_that_may_be_no_batch_needs_a_size(shape: list[int | str | None]) -> None:
    with pytest.raises(ModelError, match="symbolic axes without a size"):
        graph_from_proto(model([node("Relu", ["x"], ["y"])], [value("x", shape)], [value("y", None)]))


def test_unknown_name() -> None:
    with pytest.raises(ModelError, match="no symbolic axis 'bacth'") as caught:
        graph_from_proto(dynamic(), dims={"bacth": 2, "seq": 3})
    assert "'batch'" in caught.value.problem.hint


def test_static_model_takes_no_dims() -> None:
    static = model([node("Relu", ["x"], ["y"])], [value("x", [2, 3])], [value("y", None)])
    with pytest.raises(ModelError) as caught:
        graph_from_proto(static, dims={"batch": 2})
    assert "fixed" in caught.value.problem.hint


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ModelError, match="cannot have size 0"):
        graph_from_proto(dynamic(), dims={"batch": 0, "seq": 3})


def test_axis_without_a_name_goes_by_input_and_position() -> None:
    proto = model([node("Relu", ["x"], ["y"])], [value("x", ["N", None])], [value("y", None)])
    with pytest.raises(ModelError, match=r"without a size: 'x\.1'"):
        graph_from_proto(proto)
    assert graph_from_proto(proto, dims={"N": 2, "x.1": 3}).tensors["y"].shape == (2, 3)


@pytest.mark.parametrize(
    ("inputs", "dims", "batch"),
    [
        ([value("x", [6, 3])], {}, 6),
        ([value("x", ["time", "batch", 3])], {"time": 50, "batch": 8}, 8),
        ([value("x", ["seq", 3]), value("z", ["batch_size", 3])], {"seq": 7, "batch_size": 5}, 5),
        ([value("x", ["s", "my_batch"])], {"s": 7, "my_batch": 9}, 9),
        ([value("x", [])], {}, 0),
    ],
)
def test_batch(inputs: list[onnx.ValueInfoProto], dims: dict[str, int], batch: int) -> None:
    nodes = [node("Relu", [inputs[0].name], ["y"])]
    assert graph_from_proto(model(nodes, inputs, [value("y", None)]), dims=dims).batch == batch


def test_stale_symbolic_shapes_in_the_file_do_no_harm() -> None:
    proto = dynamic()
    proto.graph.value_info.append(value("e", ["batch", "s77", 8]))
    assert graph_from_proto(proto, dims={"batch": 2, "seq": 3}).tensors["z"].shape == (2, 3, 6)

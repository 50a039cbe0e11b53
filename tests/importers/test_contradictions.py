"""Files that contradict themselves are refused, with the node or tensor by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from planner.errors import ModelError
from planner.graph import Graph
from planner.importers import graph_from_proto
from tests.importers.build import absent, ints, model, node, value

WEIGHT = absent("w", [8, 8])


def read(
    nodes: Sequence[onnx.NodeProto],
    stored: Sequence[onnx.TensorProto] = (),
    *,
    x: Sequence[int | str | None] = (2, 8),
    y: Sequence[int | str | None] | None = None,
    **options: Any,
) -> Graph:
    initializers = [WEIGHT, *stored]
    return graph_from_proto(model(nodes, [value("x", x)], [value("y", y)], initializers, **options))


def product(**attributes: Any) -> onnx.NodeProto:
    return node("MatMul", ["x", "w"], ["y"], name="product", **attributes)


@pytest.mark.parametrize("result", ["y", "unused"])
def test_two_nodes_that_write_one_result(result: str) -> None:
    nodes = [
        node("Relu", ["x"], [result], name="first"), node("MatMul", ["x", "w"], [result], name="second"),
        *([] if result == "y" else [product()]),
    ]  # fmt: skip
    with pytest.raises(ModelError, match=f"MatMul 'second' writes '{result}', which Relu 'first' writes too"):
        read(nodes)


def test_a_node_that_writes_an_initializer() -> None:
    with pytest.raises(ModelError, match="MatMul 'again' computes 'w', which is stored already"):
        read([node("MatMul", ["x", "v"], ["w"], name="again"), product()], [absent("v", [8, 8])])


def test_two_initializers_of_one_name() -> None:
    with pytest.raises(ModelError, match="two initializers are called 'w'"):
        read([product()], [absent("w", [8, 4])])


@pytest.mark.parametrize("declared", [[2, 9], [3, 8], [2, 8, 1]])
def test_a_declared_shape_that_the_operator_does_not_make(declared: list[int]) -> None:
    with pytest.raises(ModelError, match=r"product' makes 'y' of shape .2, 8., declared as"):
        read([product()], y=declared)


def test_a_declared_shape_with_sizes_of_the_example_of_a_symbolic_model() -> None:
    proto = model([product()], [value("x", ["batch", 8])], [value("y", [1, 8])], [WEIGHT])
    assert graph_from_proto(proto, dims={"batch": 4}).tensors["y"].shape == (4, 8)


def test_an_operator_set_that_is_newer_than_known() -> None:
    with pytest.raises(ModelError, match=r"operator set 'ai.onnx' has the version 99, newer than") as caught:
        read([product()], opset=99)
    assert "update onnx" in caught.value.problem.hint


@pytest.mark.parametrize(
    ("equation", "fault"), [("ij,jk->iz", "'z', which no operand has"), ("ij,jk->ii", "'i' twice")]
)
def test_an_einsum_whose_result_has_a_letter_without_a_source(equation: str, fault: str) -> None:
    with pytest.raises(ModelError, match=f"Einsum 'sum' has the equation .*{fault}"):
        read([node("Einsum", ["x", "w"], ["y"], equation=equation, name="sum")])


def test_a_range_in_steps_of_zero() -> None:
    nodes = [
        node("Range", ["from", "to", "step"], ["r"], name="count"), node("Cast", ["r"], ["f"], to=1),
        node("Add", ["x", "f"], ["t"]), node("MatMul", ["t", "w"], ["y"]),
    ]  # fmt: skip
    with pytest.raises(ModelError, match="Range 'count' counts in steps of 0"):
        read(nodes, [ints("from", 0), ints("to", 8), ints("step", 0)])


@pytest.mark.parametrize("called", [True, False])
def test_a_function_that_calls_itself(called: bool) -> None:
    body = [node("F", ["a"], ["b"], domain="local", name="inner")]
    function = helper.make_function("local", "F", ["a"], ["b"], body, [helper.make_opsetid("local", 1)])
    call = [node("F", ["x"], ["h"], domain="local"), node("MatMul", ["h", "w"], ["y"])]
    with pytest.raises(ModelError, match="the function 'F' calls itself, at F 'inner'"):
        read(call if called else [product()], domains={"local": 1}, functions=[function])


def test_data_that_is_too_short_for_its_shape() -> None:
    shape = TensorProto(name="shape", data_type=7, dims=[2], raw_data=bytes(8))
    nodes = [node("Reshape", ["x", "shape"], ["h"]), node("MatMul", ["h", "w"], ["y"])]
    with pytest.raises(ModelError, match=r"'shape' holds 8 bytes of data, its shape .2. needs 16"):
        read(nodes, [shape])


def test_a_reshape_that_its_elements_do_not_fill() -> None:
    nodes = [node("Reshape", ["x", "shape"], ["h"], name="fold"), node("MatMul", ["h", "w"], ["y"])]
    with pytest.raises(ModelError, match=r"Reshape 'fold': 16 elements do not fill .5, 8."):
        read(nodes, [ints("shape", [5, 8])])


def test_an_input_without_elements() -> None:
    with pytest.raises(ModelError, match=r"input 'x' of shape .0, 8. has a dimension of size 0"):
        read([product()], x=(0, 8))


def loop(trips: int) -> Graph:
    body = helper.make_graph(
        [node("Identity", ["going"], ["on"]), node("MatMul", ["s", "w"], ["next"])],
        "body",
        [value("turn", [], 7), value("going", [], 9), value("s", [2, 8])],
        [value("on", [], 9), value("next", [2, 8])],
    )
    return read([node("Loop", ["trips", "", "x"], ["y"], body=body, name="turns")], [ints("trips", trips)])


def test_a_loop_that_runs_too_often_is_told_from_one_without_a_limit() -> None:
    with pytest.raises(ModelError, match="Loop 'turns' runs 4,611,686,018,427,387,904 times, at most"):
        loop(1 << 62)
    with pytest.raises(ModelError, match="how often Loop 'turns' runs is not in the file"):
        loop((1 << 63) - 1)


def test_a_node_that_writes_what_it_reads() -> None:
    with pytest.raises(ModelError, match="MatMul 'turn' computes 'x', which is an input or computed already"):
        read([node("MatMul", ["x", "w"], ["x"], name="turn"), product()])


def test_fewer_numbers_than_a_shape_needs() -> None:
    short = TensorProto(name="v", data_type=TensorProto.FLOAT, dims=[8, 8], float_data=[1.0] * 5)
    with pytest.raises(ModelError, match=r"'v' holds 5 numbers, its shape .8, 8. needs 64"):
        read([node("MatMul", ["x", "v"], ["y"])], [short])


def test_a_negative_size() -> None:
    with pytest.raises(ModelError, match=r"'v' has the shape .8, -4."):
        read([node("MatMul", ["x", "v"], ["y"])], [TensorProto(name="v", data_type=1, dims=[8, -4], raw_data=bytes(8))])


def test_an_operator_set_without_a_version() -> None:
    with pytest.raises(ModelError, match=r"operator set 'ai.onnx' has the version 0"):
        read([product()], opset=0)

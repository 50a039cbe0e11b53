"""Loops that reduce rows of a table bag by bag are one gather and one reduction, in both forms that exporters write."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from planner.graph import Graph
from planner.importers import graph_from_proto
from planner.operators import rebatch
from tests.importers.build import BOOL, I64, absent, ints, model, node, value

STORED = [
    absent("table", [100, 16]), absent("w", [16, 4]), ints("zero", 0), ints("one", 1), ints("axis", [0]),
    ints("flat", [-1]), ints("last", [32]), ints("from", [1]), ints("to", [1 << 62]),
    onnx.numpy_helper.from_array(np.array(True), "go"),
]  # fmt: skip


def cut(body: list[onnx.NodeProto], offsets: onnx.NodeProto) -> Graph:
    nodes = [node("Concat", ["offsets", "last"], ["bounds"], axis=0), offsets, *body, node("MatMul", ["z", "w"], ["y"])]
    inputs = [value("indices", [32], I64), value("offsets", [8], I64)]
    return graph_from_proto(model(nodes, inputs, [value("y", None)], STORED, opset=17))


def collected(reduction: str) -> Graph:
    """A Loop over a known number of bags that gathers in its body and stacks what it scans out."""
    body = helper.make_graph(
        [
            node("Gather", ["bounds", "turn"], ["a"]), node("Gather", ["ends", "turn"], ["b"]),
            node("Unsqueeze", ["a", "axis"], ["start"]), node("Unsqueeze", ["b", "axis"], ["end"]),
            node("Slice", ["indices", "start", "end", "axis"], ["row"]), node("Gather", ["table", "row"], ["rows"]),
            node("ReduceSum", ["rows", "axis"], ["bag"], keepdims=0) if reduction == "ReduceSum"
            else node(reduction, ["rows"], ["bag"], axes=[0], keepdims=0),
            node("Identity", ["going"], ["on"]),
        ],
        "body", [value("turn", [], I64), value("going", [], BOOL)], [value("on", [], BOOL), value("bag", None)],
    )  # fmt: skip
    ends = node("Slice", ["bounds", "from", "to", "axis"], ["ends"])
    loop = [
        node("Shape", ["ends"], ["shape"]), node("Gather", ["shape", "zero"], ["bags"]),
        node("Loop", ["bags", "go"], ["z"], body=body, name="bag_loop"),
    ]  # fmt: skip
    return cut(loop, ends)


def counted() -> Graph:
    """A Loop without a number of turns that cuts rows gathered before, and puts what it sums into a sequence."""
    else_branch = helper.make_graph(
        [node("Slice", ["rows", "start", "end"], ["bag_rows"]), node("ReduceSum", ["bag_rows", "axis"], ["sum"])],
        "else", [], [value("sum", None)],
    )  # fmt: skip
    then_branch = helper.make_graph([node("Identity", ["empty"], ["none"])], "then", [], [value("none", None)])
    body = helper.make_graph(
        [
            node("Reshape", ["i", "flat"], ["at"]), node("Add", ["at", "one"], ["after"]),
            node("Add", ["after", "one"], ["later"]), node("Slice", ["bounds", "at", "after"], ["start"]),
            node("Slice", ["bounds", "after", "later"], ["end"]), node("Equal", ["start", "end"], ["is_empty"]),
            node("If", ["is_empty"], ["bag"], then_branch=then_branch, else_branch=else_branch),
            node("SequenceInsert", ["bags", "bag"], ["more"]), node("Add", ["i", "one"], ["next"]),
            node("Less", ["next", "eight"], ["on"]),
        ],
        "body",
        [
            value("turn", [], I64), value("going", [], BOOL),
            helper.make_tensor_sequence_value_info("bags", 1, None), value("i", [], I64),
        ],
        [
            value("on", [], BOOL), helper.make_tensor_sequence_value_info("more", 1, None), value("next", [], I64),
        ],
    )  # fmt: skip
    loop = [
        node("SequenceEmpty", [], ["none_yet"]),
        node("Loop", ["", "go", "none_yet", "zero"], ["summed", "count"], body=body, name="n19_2"),
        node("ConcatFromSequence", ["summed"], ["z"], axis=0),
    ]
    further = [absent("empty", [1, 16]), ints("eight", 8)]
    nodes = [
        node("Concat", ["offsets", "last"], ["bounds"], axis=0), node("Gather", ["table", "indices"], ["rows"]), *loop,
        node("MatMul", ["z", "w"], ["y"]),
    ]  # fmt: skip
    inputs = [value("indices", [32], I64), value("offsets", [8], I64)]
    return graph_from_proto(model(nodes, inputs, [value("y", None)], [*STORED, *further], opset=17))


@pytest.mark.parametrize("reduction", ["ReduceSum", "ReduceMean", "ReduceMax"])
def test_a_loop_that_gathers_and_stacks(reduction: str) -> None:
    graph = collected(reduction)
    assert [n.op for n in graph.nodes] == ["Gather", "Reshape", reduction, "MatMul"]
    assert [graph.tensors[n.outputs[0]].shape for n in graph.nodes] == [(32, 16), (8, 4, 16), (8, 16), (8, 4)]
    assert {n.repeat for n in graph.nodes} == {1}
    assert "embedding-bag" in {note.code for note in graph.report.notes}


def test_a_loop_that_counts_and_fills_a_sequence() -> None:
    graph = counted()
    assert [n.op for n in graph.nodes] == ["Gather", "Reshape", "ReduceSum", "MatMul"]
    assert graph.tensors["y"].shape == (8, 4)
    assert graph.parameter_count() == 100 * 16 + 16 * 4


@pytest.mark.parametrize("graph", [collected("ReduceSum"), counted()], ids=["stacked", "counted"])
def test_indices_follow_the_batch_that_the_result_has(graph: Graph) -> None:
    assert graph.batch == 8
    larger = rebatch(graph, 24)
    assert larger.tensors["indices"].shape == (96,)
    assert larger.tensors["y"].shape == (24, 4)

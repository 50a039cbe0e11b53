"""Loops that reduce rows of a table bag by bag are one gather and one reduction, in both forms that exporters write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import pytest
from onnx import helper

from planner import ModelError, load_graph
from planner.graph import Graph
from planner.importers import graph_from_proto, rebatched_file
from planner.operators import rebatch
from tests.importers.build import BOOL, I64, absent, ints, model, node, value
from tests.shared_data import shared_path

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


def summed_rows() -> list[onnx.NodeProto]:
    """A bag's rows, and their sum."""
    return [node("Slice", ["rows", "start", "end"], ["bag_rows"]), node("ReduceSum", ["bag_rows", "axis"], ["sum"])]


def by_mode(mode: int) -> list[onnx.NodeProto]:
    """As an export that optimises nothing writes it: a branch for sums (0) and one for means (1)."""
    total = helper.make_graph(
        [node("Slice", ["rows", "start", "end"], ["r0"]), node("ReduceSum", ["r0", "axis"], ["total"])],
        "sums", [], [value("total", None)],
    )  # fmt: skip
    first = helper.make_graph([node("Identity", ["rows"], ["all"])], "all", [], [value("all", None)])
    other = helper.make_graph([node("Slice", ["rows", "start", "end"], ["r1"])], "some", [], [value("r1", None)])
    mean = helper.make_graph(
        [
            node("If", ["is_empty"], ["picked"], then_branch=first, else_branch=other),
            node("ReduceMean", ["picked"], ["mean"], axes=[0], keepdims=0),
        ],
        "means", [], [value("mean", None)],
    )  # fmt: skip
    return [
        node("Constant", [], ["mode"], value_int=mode), node("Constant", [], ["sums"], value_int=0),
        node("Equal", ["mode", "sums"], ["is_sum"]),
        node("If", ["is_sum"], ["sum"], then_branch=total, else_branch=mean),
    ]  # fmt: skip


def counted(reduction: Sequence[onnx.NodeProto] = (), dims: Mapping[str, int] | None = None) -> Graph:
    """A Loop without a number of turns that cuts rows gathered before, and puts what it sums into a sequence."""
    else_branch = helper.make_graph(reduction or summed_rows(), "else", [], [value("sum", None)])
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
    return graph_from_proto(model(nodes, inputs, [value("y", None)], [*STORED, *further], opset=17), dims=dims)


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


def test_branches_that_a_constant_rules_out_do_not_count() -> None:
    graph = counted(by_mode(0))
    assert [n.op for n in graph.nodes] == ["Gather", "Reshape", "ReduceSum", "MatMul"]
    assert "embedding-bag" in {note.code for note in graph.report.notes}


@pytest.mark.parametrize("dims", [{}, {"n19_2": 8}])
def test_a_sequence_that_cannot_be_followed_is_refused_at_once(dims: dict[str, int]) -> None:
    """No trip count is asked for: with one the model could be read no more than without."""
    with pytest.raises(ModelError, match="reads the sequence 'none_yet' in a way that cannot be followed"):
        counted(by_mode(1), dims)


@pytest.mark.parametrize("name", ["opt", "noopt"])
def test_what_torch_writes_with_and_without_optimising_is_read(name: str) -> None:
    graph = load_graph(str(shared_path(f"cases/bug-12/bag.{name}.onnx")))
    assert "embedding-bag" in {note.code for note in graph.report.notes}
    assert graph.parameter_count() == 195_434


def test_a_batch_inside_a_loop_cannot_be_written_anew() -> None:
    path = str(shared_path("cases/bug-12/bag.opt.onnx"))
    with pytest.raises(ModelError, match=r"the batch is also in '.*', which is written as other operators in the file"):
        rebatched_file(path, 4)


@pytest.mark.parametrize("graph", [collected("ReduceSum"), counted()], ids=["stacked", "counted"])
def test_indices_follow_the_batch_that_the_result_has(graph: Graph) -> None:
    assert graph.batch == 8
    larger = rebatch(graph, 24)
    assert larger.tensors["indices"].shape == (96,)
    assert larger.tensors["y"].shape == (24, 4)

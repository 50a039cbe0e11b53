"""A mixture of experts in one operator, as exporters emit it: read, given another batch, dealt to ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from planner.graph import Graph
from planner.importers import load_graph
from planner.operators import OpCall, graph_specs, rebatch
from planner.sharding import Reason, Setting, ideal_mesh, layout_text, strategies
from planner.sharding.searches import get


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """Two samples of 16 tokens of width 8; four gated experts of width 32, two a token."""
    shapes = {"gate": (8, 4), "w1": (4, 64, 8), "b1": (4, 64), "w2": (4, 8, 32), "b2": (4, 8)}
    weights = [helper.make_tensor(n, TensorProto.FLOAT, s, np.zeros(s)) for n, s in shapes.items()]
    weights.append(helper.make_tensor("rows", TensorProto.INT64, [2], [-1, 4]))
    given = ["x", "scores", "w1", "b1", "w2", "b2"]
    nodes = [
        helper.make_node("MatMul", ["x", "gate"], ["every"]),
        helper.make_node("Reshape", ["every", "rows"], ["scores"]),
        helper.make_node(
            "MoE", given, ["m"], domain="com.microsoft", k=2, activation_type="swiglu", swiglu_fusion=1
        ),
        helper.make_node("Add", ["x", "m"], ["y"]),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 16, 8]) for n in ("x", "y")]
    graph = helper.make_graph(nodes, "mixture", ends[:1], ends[1:], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    path = tmp_path_factory.mktemp("mixture") / Path("model.onnx")
    onnx.save(helper.make_model(graph, opset_imports=opsets), path)
    return load_graph(path)


def test_work_follows_the_batch(model: Graph) -> None:
    """Each of 32 tokens a pair of samples goes through two experts of 8 x 64 + 32 x 8 weights."""
    for batch in (1, 2, 6):
        sized = rebatch(model, batch)
        assert graph_specs(sized)[2].matrix_flops == 2 * (16 * batch) * 2 * (8 * 64 + 32 * 8)
        assert sized.tensors["scores"].shape == (16 * batch, 4)
        assert sized.tensors["w1"].shape == (4, 64, 8)


def test_experts_are_dealt_where_memory_asks_for_it(model: Graph) -> None:
    """840 numbers an expert with its biases: 53,760 bytes of weights and state for four, a quarter on each rank."""
    sized = rebatch(model, 8)
    times = np.array([1e-6, 0.0, 1e-3, 1e-6])
    setting = Setting(sized, ideal_mesh((4,)), forward_s=times, backward_s=2 * times, saved=((),) * 4)
    answer = get("gshard")(setting, memory_bytes=20_000)
    assert answer.verdict.violations == []
    assert answer.verdict.memory_bytes <= 20_000
    layouts = {n: layout_text(answer.decision[n].weight) for n in ("w1", "w2")}  # type: ignore[union-attr]
    assert all("S" in text for text in layouts.values())


def test_rows_and_experts_cut_together_send_each_row_twice_there_and_back(model: Graph) -> None:
    """32 rows of 8 numbers of 2 bytes a rank, two experts each."""
    sized = rebatch(model, 8)
    call, what = OpCall.of(sized, sized.nodes[2]), graph_specs(sized)[2]
    found = next(s for s in strategies(call, what, ideal_mesh((4,)), 2.0) if s.splits == ("experts",))
    assert [layout_text(layout) for _, layout in found.reads] == ["S0"] * 6
    assert {(e.reason, e.payload_bytes, e.times) for e in found.exchanges} == {(Reason.EXPERTS, 32 * 2 * 8 * 2.0, 2)}
    assert found.share == 1 / 4
    assert {layout_text(layout) for _, layout in found.read_gradients} == {"S0"}

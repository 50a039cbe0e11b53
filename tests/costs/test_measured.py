"""Measured prices: one-node models, the cache, what cannot be run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.costs import measure, passes_profile
from planner.costs.measured import machine_name
from planner.costs.one_node import one_node_model
from planner.errors import ModelError, UsageError
from planner.graph import Graph, Node
from planner.operators import OpCall
from tests.operators import calls

onnxruntime = pytest.importorskip("onnxruntime")


def node(op: str, inputs: str, output: str, **attributes: int) -> Node:
    return Node(output, op, tuple(inputs.split()), (output,), attributes)


def small(size: int = 64) -> Graph:
    """Two equal products with a rectifier between: two distinct calls."""
    shape = f"{size} {size}"
    tensors = {"x": f"x {shape}", "a": f"w {shape}", "h": f"x {shape}", "r": f"x {shape}", "b": f"w {shape}"}
    tensors |= {"y": f"x {shape}", "v": f"x {size * size}"}
    nodes = [node("MatMul", "x a", "h"), node("Relu", "h", "r"), node("MatMul", "r b", "y"), node("Flatten", "y", "v")]
    return replace(calls.graph(tensors, nodes), batch=size, opset=20)


def test_equal_calls_are_run_once_and_views_are_free(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    found = measure(small(), cache_folder=tmp_path, progress=lambda *args: seen.append(args))
    assert [(done, total) for done, total, _ in seen] == [(0, 2), (1, 2)]
    assert found.source == "measured"
    assert found.device == machine_name()
    assert found.forward_s[0] == found.forward_s[2] > 0
    assert found.forward_s[3] == 0.0
    assert found.backward_s[2] == pytest.approx(2 * found.forward_s[2])  # both gradients: twice the work
    assert found.weight_grad_s[2] == pytest.approx(found.forward_s[2])


def test_the_cache_answers_the_second_time(tmp_path: Path) -> None:
    first = measure(small(), cache_folder=tmp_path)
    (file,) = tmp_path.glob("measured-*.json")
    content = json.loads(file.read_text())
    assert content["software"] == f"onnxruntime {onnxruntime.__version__}"
    assert len(content["seconds"]) == 2
    content["seconds"] = {key: [0.125, 0.5] for key in content["seconds"]}
    file.write_text(json.dumps(content))
    second = measure(small(), cache_folder=tmp_path)
    assert second.forward_s[:3].tolist() == [0.125] * 3
    assert second.backward_s[:3].tolist() == [0.5] * 3
    assert first.forward_s[0] != 0.125


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 0}', '{"seconds": 3}'])
def test_a_damaged_cache_is_measured_again(tmp_path: Path, content: str) -> None:
    measure(small(), cache_folder=tmp_path)
    (file,) = tmp_path.glob("measured-*.json")
    file.write_text(content)
    assert measure(small(), cache_folder=tmp_path).forward_s[0] > 0
    assert json.loads(file.read_text())["version"] == 2


def test_calls_over_the_cap_are_scaled_from_the_nearest(tmp_path: Path) -> None:
    tensors = {"x": "x 32 32", "a": "w 32 32", "h": "x 32 32", "b": "w 32 3200", "y": "x 32 3200"}
    made = replace(calls.graph(tensors, [node("MatMul", "x a", "h"), node("MatMul", "h b", "y")]), batch=32, opset=20)
    found = measure(made, cache_folder=tmp_path, memory_cap_bytes=100_000)
    assert found.forward_s[1] == pytest.approx(100 * found.forward_s[0])
    (note,) = [n for n in found.notes if n.code == "not-measured"]
    assert "more than" in note.message
    assert note.where == "y"


def test_operators_that_cannot_be_run_are_said(tmp_path: Path) -> None:
    tensors = {"x": "x 32 32", "a": "w 32 32", "h": "x 32 32", "r": "x 32 32", "y": "x 32 32"}
    nodes = [node("MatMul", "x a", "h"), node("Relu", "h", "r"), node("vendor.Mystery", "r", "y")]
    found = measure(replace(calls.graph(tensors, nodes), batch=32, opset=20), cache_folder=tmp_path)
    assert found.forward_s[2] == pytest.approx(found.forward_s[1])
    assert any("cannot run" in n.message for n in found.notes)


def test_a_model_of_which_nothing_can_be_run(tmp_path: Path) -> None:
    made = calls.graph({"x": "x 4 4", "y": "x 4 4"}, [node("vendor.Mystery", "x", "y")])
    with pytest.raises(ModelError, match="no operator of the model could be run"):
        measure(replace(made, batch=4, opset=20), cache_folder=tmp_path)


def test_without_onnxruntime_the_way_to_get_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UsageError, match="not installed") as caught:
        measure(small(), cache_folder=tmp_path)
    assert "shardplan[measure]" in caught.value.problem.hint


def test_indices_stay_inside_what_they_index() -> None:
    call = calls.call("Gather", ["w 7 4", "i:int64 3 50"], ["x 3 50 4"], axis=0)
    model, feeds = one_node_model(call)
    assert feeds["x1"].min() >= 0
    assert feeds["x1"].max() < 7
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    assert session.run(None, feeds)[0].shape == (3, 50, 4)


def test_known_constants_are_stored_and_half_precision_runs_in_fp32() -> None:
    call = calls.call("Reshape", ["x:bfloat16 4 6", "c:int64 2"], ["x:bfloat16 8 3"], constants={1: (8, 3)})
    model, feeds = one_node_model(call)
    assert set(feeds) == {"x0"}
    assert feeds["x0"].dtype == np.float32
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    assert session.run(None, feeds)[0].shape == (8, 3)


def test_calls_of_equal_signature_share_a_measurement() -> None:
    graph = small()
    first, second = (OpCall.of(graph, graph.nodes[i]).signature() for i in (0, 2))
    assert first == second


def test_every_moment_of_whole_passes_is_counted() -> None:
    """What is not in the graph goes to the next node, the end to the last; y and z are equal calls."""
    tensors = {name: f"{kind} 8 8" for kind, names in (("x", "xhyz"), ("w", "abc")) for name in names}
    nodes = [node("MatMul", "x a", "h"), node("MatMul", "h b", "y"), node("MatMul", "y c", "z")]
    graph = replace(calls.graph(tensors, nodes), batch=8, opset=20)
    seconds = {"h": (1.0, 2.0), "inside": (0.25, 0.5), "y": (1.75, 2.5), "z": (3.0, 4.0), "": (0.5, 1.0)}
    found = passes_profile(graph, seconds, machine="here")
    assert found.device == "here"
    assert found.forward_s.tolist() == [1.0, 2.5, 3.0]
    assert found.backward_s.tolist() == [2.0, 3.5, 4.5]
    assert found.weight_grad_s.tolist() == [2.0, 1.75, 2.25]  # nobody wants the gradient of x


def test_times_within_passes_are_scaled_to_those_of_a_rank() -> None:
    tensors = {name: f"{kind} 8 8" for kind, names in (("x", "xhy"), ("w", "ab")) for name in names}
    nodes = [node("MatMul", "x a", "h"), node("MatMul", "h b", "y")]
    graph = replace(calls.graph(tensors, nodes), batch=8, opset=20)
    seconds = {"h": (1.0, 2.0), "y": (3.0, 4.0)}
    found = passes_profile(graph, seconds, machine="here", rank=(2.0, 3.0, None))
    assert found.forward_s.tolist() == [0.5, 1.5]
    assert found.backward_s.tolist() == [1.0, 2.0]
    assert found.weight_grad_s.tolist() == [1.0, 1.0]  # all of the first, half of the second
    split = passes_profile(graph, seconds, machine="here", rank=(2.0, 3.0, 1.5))
    assert split.weight_grad_s.tolist() == [0.75, 0.75]


def test_passes_of_another_model_are_refused() -> None:
    with pytest.raises(ModelError, match="none of the model's operators was measured"):
        passes_profile(small(), {"elsewhere": (1.0, 1.0)}, machine="here")

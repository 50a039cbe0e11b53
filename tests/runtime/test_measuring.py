"""Operators timed alone in torch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from planner import UsageError, runtime
from planner.costs import measure
from planner.costs.one_node import one_node_model
from planner.graph import Graph, Node
from planner.operators import OpCall
from tests.operators import calls

pytest.importorskip("torch", reason="torch is not installed")


def layers() -> Graph:
    """Two products with trained weights; nothing needs the gradient of what the first reads."""
    tensors = {"x": "x 64 256", "a": "w 256 256", "h": "x 64 256", "b": "w 256 512", "y": "x 64 512"}
    nodes = [Node("h", "MatMul", ("x", "a"), ("h",), {}), Node("y", "MatMul", ("h", "b"), ("y",), {})]
    return replace(calls.graph(tensors, nodes), batch=64, opset=20)


def test_both_passes_are_run_and_kept(tmp_path: Path) -> None:
    runner = runtime.TorchRunner("cpu", "fp32")
    first = measure(layers(), runner=runner, cache_folder=tmp_path)
    assert first.precision == "fp32"
    assert first.device == runner.machine
    assert first.forward_s[1] > 0
    assert first.backward_s[1] > 0
    assert first.weight_grad_s[1] == pytest.approx(first.backward_s[1] / 2)  # both gradients have equal work
    again = measure(layers(), runner=runner, cache_folder=tmp_path)
    assert again.backward_s[1] == first.backward_s[1]


def test_what_has_no_gradient_has_no_backward_pass() -> None:
    made = replace(
        calls.graph({"x": "x 64 256", "y": "i 2"}, [Node("y", "Shape", ("x",), ("y",), {})]), batch=64, opset=20
    )
    found = runtime.TorchRunner("cpu", "fp32").seconds(*one_node_model(OpCall.of(made, made.nodes[0])))
    assert found[0] > 0
    assert math.isnan(found[1])


@pytest.mark.parametrize(
    ("device", "precision", "message"),
    [("abacus", "bf16", "cannot use the device"), ("cpu", "fp8", "not measured in fp8")],
)
def test_devices_and_precisions_that_are_not_there_are_refused(device: str, precision: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        runtime.TorchRunner(device, precision)

"""Micro-batches cut into parts of their sequence: what the matrix of plans does not show."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

torch = pytest.importorskip("torch", reason="torch is not installed")

import planner  # noqa: E402
from planner import runtime  # noqa: E402
from tests.runtime import cases  # noqa: E402

SAMPLES, LENGTH, WIDTH = 2, 4, 6


def _attention(mask: str = "causal", dropout: float = 0.0) -> onnx.ModelProto:
    """Two products, attention written out, samples merged with positions around the products."""
    random = np.random.default_rng(3)
    weights = {name: random.normal(size=(WIDTH, WIDTH)) for name in ("w0", "w1", "w2", "w3")}
    seen = np.tril(np.ones((LENGTH, LENGTH), dtype=bool)) if mask == "causal" else np.ones((LENGTH, LENGTH), dtype=bool)
    constants: dict[str, Any] = {
        **{name: x.astype(np.float32) for name, x in weights.items()}, "bias": np.ones(WIDTH, np.float32), "seen": seen,
        "hidden": np.float32(np.finfo(np.float32).min), "flat": np.array([-1, WIDTH]),
        "back": np.array([SAMPLES, LENGTH, WIDTH]), "ratio": np.float32(dropout), "training": np.array(True),
    }  # fmt: skip
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["rows"]),
        helper.make_node("Gemm", ["rows", "w0", "bias"], ["first"]),
        helper.make_node("Reshape", ["first", "back"], ["h"]),
        helper.make_node("MatMul", ["h", "w1"], ["q"]),
        helper.make_node("MatMul", ["h", "w2"], ["k"]),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Where", ["seen", "scores", "hidden"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["shares"], axis=-1),
        helper.make_node("Dropout", ["shares", "ratio", "training"], ["dropped"]),
        helper.make_node("MatMul", ["dropped", "h"], ["attended"]),
        helper.make_node("MatMul", ["attended", "w3"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [SAMPLES, LENGTH, WIDTH]) for n in ("x", "y")]
    tensors = [numpy_helper.from_array(np.asarray(x), name) for name, x in constants.items()]
    graph = helper.make_graph(nodes, "attention", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _plan(model: onnx.ModelProto, schedule: str) -> planner.Plan:
    graph, cluster = planner.graph_from_proto(model, name="attention"), planner.load_cluster("dgx-a100")
    job = planner.Job(global_batch=2 * SAMPLES, precision="fp32", optimizer="sgd", devices=2)
    return planner.predict(
        graph, cluster, job, planner.Degrees(pipeline=2, micro_batch=SAMPLES, schedule=schedule)
    ).plan


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_that_is_written_out(splits: int, dropout: float) -> None:
    model = _attention(dropout=dropout)
    found = runtime.run(_plan(model, f"seq1f1b:splits={splits}"), model, steps=0, check=True).check
    assert found is not None
    assert found.largest < 1e-12
    assert found.loss == pytest.approx(found.expected_loss, rel=1e-12)


def test_attention_without_a_causal_mask_is_refused_by_its_operator() -> None:
    model = _attention("none")
    with pytest.raises(planner.ModelError, match="shares: Softmax cannot be computed part by part"):
        runtime.run(_plan(model, "seq1f1b"), model)


@pytest.mark.parametrize(
    ("name", "operator"),
    [("bert", "Softmax"), ("mixtral", "TopK"), ("t5", "Softmax")],
)
def test_models_that_look_ahead_are_refused_by_their_operator(name: str, operator: str) -> None:
    plan = cases.plan(cases.Case("", name, 2, {"pipeline": 2, "schedule": "seq1f1b"}, 2))
    with pytest.raises(planner.ModelError, match=rf": {operator} cannot be computed part by part of the sequence"):
        runtime.run(plan, cases.model(name))


def test_a_sequence_that_cannot_be_divided_is_refused() -> None:
    model = _attention()
    with pytest.raises(planner.PlanError, match="a sequence of 4 positions cannot be cut into 3 equal parts"):
        runtime.run(_plan(model, "seq1f1b:splits=3"), model)


@pytest.mark.parametrize(("dtype", "error"), [("float64", 1e-12), ("float32", 1e-5)])
def test_training_by_parts_is_training_by_micro_batches(dtype: str, error: float) -> None:
    losses = []
    for schedule in ("1f1b", "seq1f1b:splits=4"):
        plan = cases.plan(cases.Case("", "gpt, untied", 2, {"pipeline": 2, "schedule": schedule}, 4))
        losses.append(runtime.run(plan, cases.model("gpt, untied"), steps=3, dtype=dtype, learning_rate=0.1).losses)
    assert losses[0] == pytest.approx(losses[1], rel=error)

"""Operators timed inside whole training passes."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

import planner
from cli.main import app
from planner.runtime import measure_passes
from tests.runtime import cases

torch = pytest.importorskip("torch", reason="torch is not installed")


def _plan(name: str) -> planner.Plan:
    graph = cases.graph(name)
    job = planner.Job(graph.batch or 1, precision="fp32", optimizer="sgd", devices=1)
    return planner.predict(graph, planner.load_cluster("dgx-a100"), job, planner.Degrees(micro_batch=graph.batch)).plan


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet"])
def test_all_moments_of_the_passes_are_counted_with_operators(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = measure_passes(_plan(name), cases.model(name), passes=5)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    profile = planner.costs.passes_profile(cases.graph(name), seconds, machine="here")
    assert min(min(times) for times in seconds.values()) >= 0.0
    total = sum(map(sum, seconds.values()))
    assert float(profile.forward_s.sum() + profile.backward_s.sum()) == pytest.approx(total)
    assert 0.0 < total <= spent / 3  # six passes ran in this time; medians may lie above the mean
    products = [i for i, node in enumerate(cases.graph(name).nodes) if node.op in ("MatMul", "Gemm", "Conv")]
    assert profile.forward_s[products].min() > 0.0
    assert profile.backward_s[products].min() > 0.0


def test_a_plan_is_predicted_with_them() -> None:
    graph = cases.graph("gpt")
    seconds = measure_passes(_plan("gpt"), cases.model("gpt"), passes=3)
    profile = planner.costs.passes_profile(graph, seconds, machine="here")
    document = planner.costs.costs_document(graph, profile)
    priced = planner.costs.with_costs(graph, json.dumps(document))
    job = planner.Job(4 * graph.batch, precision="fp32", optimizer="sgd", devices=1)
    plan = planner.predict(priced, planner.load_cluster("dgx-a100"), job, planner.Degrees(micro_batch=graph.batch)).plan
    (stage,) = plan.predictions.stages
    assert stage.forward_s == pytest.approx(float(profile.forward_s.sum()), rel=1e-6)
    assert stage.backward_s == pytest.approx(float(profile.backward_s.sum()), rel=1e-6)


def test_the_command_measures_ranks_too(tmp_path: Path) -> None:
    """Smaller micro-batches, the second half of a split backward, and the update, beside the operators."""
    model, costs = tmp_path / "model.onnx", tmp_path / "costs.json"
    onnx.save(cases.model("gpt"), model)
    words = ["profile", str(model), "--measure", "--device", "cpu", "--micro-batch", "4", "-o", str(costs)]
    assert CliRunner().invoke(app, words).exit_code == 0
    document = json.loads(costs.read_text())
    assert [each["batch"] for each in (*document["smaller"], document)] == [1, 2, 4]
    assert document["update_byte_per_s"] > 0
    for each in (*document["smaller"], document):
        forward_s, backward_s, weight_grad_s = map(sum, zip(*each["operators"].values(), strict=True))
        assert forward_s > 0
        assert 0 < weight_grad_s < backward_s
    priced = planner.costs.with_costs(planner.load_graph(str(model)), costs.read_text())
    found = planner.profile(priced, planner.load_device("a100-sxm-80gb"), micro_batch=4)
    assert float(found.forward_s.sum()) == pytest.approx(sum(row[0] for row in document["operators"].values()))

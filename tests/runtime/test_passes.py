"""Operators timed inside whole training passes."""

from __future__ import annotations

import json
import time

import pytest

import planner
from planner.runtime import measure_passes
from tests.runtime import cases

torch = pytest.importorskip("torch", reason="torch is not installed")


def _plan(name: str) -> planner.Plan:
    graph = cases.graph(name)
    job = planner.Job(graph.batch or 1, precision="fp32", optimizer="sgd", devices=1)
    return planner.predict(graph, planner.load_cluster("dgx-a100"), job, planner.Degrees(micro_batch=graph.batch)).plan


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet"])
def test_all_moments_of_the_passes_are_counted_with_operators(name: str) -> None:
    before, threads = time.thread_time(), torch.get_num_threads()
    seconds = measure_passes(_plan(name), cases.model(name), passes=5)
    spent = time.thread_time() - before
    profile = planner.costs.passes_profile(cases.graph(name), seconds, machine="here")
    assert torch.get_num_threads() == threads
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

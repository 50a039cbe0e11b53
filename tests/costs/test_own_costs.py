"""Costs of operators in a file: written by `profile`, read by `plan`, refused where they are not of the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import planner
from cli.main import app
from planner.costs import costs_document, with_costs

MODEL = ["gpt2", "--dim", "seq=64"]


@pytest.fixture(scope="module")
def graph() -> planner.Graph:
    return planner.load_graph("gpt2", dims={"seq": 64})


@pytest.fixture(scope="module")
def device() -> planner.Device:
    return planner.load_device("a100-sxm-80gb")


def document(graph: planner.Graph, device: planner.Device) -> dict[str, object]:
    return costs_document(graph, planner.profile(graph, device, micro_batch=2))


def test_seconds_come_back_and_grow_with_the_batch(graph: planner.Graph, device: planner.Device) -> None:
    other = planner.load_device("v100-sxm2-32gb")
    written = planner.profile(graph, device, micro_batch=2)
    own = with_costs(graph, json.dumps(document(graph, device)))
    for size, factor in ((2, 1.0), (8, 4.0)):
        read = planner.profile(own, other, micro_batch=size, precision="fp16")
        assert np.allclose(read.forward_s, factor * written.forward_s, rtol=1e-12)
        assert np.allclose(read.backward_s, factor * written.backward_s, rtol=1e-12)
        assert np.allclose(read.at(0.25)[0], read.forward_s / 4, rtol=1e-12)
        by_rule = planner.profile(graph, other, micro_batch=size, precision="fp16")
        assert read.saved == by_rule.saved  # memory and work are the rules'
        assert np.array_equal(read.forward_flops, by_rule.forward_flops)


def test_costs_make_another_model_of_it(graph: planner.Graph, device: planner.Device) -> None:
    text = json.dumps(document(graph, device))
    assert with_costs(graph, text).fingerprint not in (graph.fingerprint, "")
    assert with_costs(graph, text).fingerprint == with_costs(graph, text.encode()).fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "shardplan-costs/9"}, "not a file of costs"),
        ({"model": "0" * 64}, "of another model"),
        ({"batch": 0}, "batch is missing or wrong"),
        ({"operators": {}}, "no three times for operator"),
    ],
)
def test_other_files_are_refused(
    graph: planner.Graph, device: planner.Device, change: dict[str, object], message: str
) -> None:
    with pytest.raises(planner.ModelError, match=message) as caught:
        with_costs(graph, json.dumps({**document(graph, device), **change}), "own.json")
    assert caught.value.problem.where == "own.json"


def test_what_is_not_json_is_refused_with_its_place(graph: planner.Graph) -> None:
    with pytest.raises(planner.ModelError) as caught:
        with_costs(graph, '{"format": ', "own.json")
    assert (caught.value.problem.where or "").startswith("own.json:1:")


def test_profile_plan_and_check_by_the_same_file(tmp_path: Path) -> None:
    costs, made = str(tmp_path / "costs.json"), str(tmp_path / "gpt2.plan.json")
    run = CliRunner().invoke
    profiled = run(app, ["profile", *MODEL, "-d", "a100-sxm-80gb", "--micro-batch", "4", "-o", costs])
    assert profiled.exit_code == 0, profiled.output
    options = ["-H", "dgx-a100", "--devices", "2", "-b", "16", "--tp", "1"]
    planned = run(app, ["plan", *MODEL, *options, "--costs", costs, "-o", made, "-q"])
    assert planned.exit_code == 0, planned.output
    against = ["check", made, "-H", "dgx-a100", "--model", *MODEL]
    assert "model: the plan is for gpt2" in run(app, against).output
    assert ": ok" in run(app, [*against, "--costs", costs]).output

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
from planner.simulate.timeline import times_of

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


def test_times_of_several_batches_are_joined_by_lines(graph: planner.Graph, device: planner.Device) -> None:
    """Forward seconds 3, 5 and 8 of 1, 2 and 4 samples; backward twice that, a third of it for weights."""
    known = {1: 3, 2: 5, 4: 8}
    seconds = {batch: {node.key: [s, 2 * s, 2 * s / 3] for node in graph.nodes} for batch, s in known.items()}
    whole = {**document(graph, device), "batch": 4, "operators": seconds[4]}
    smaller = [{"batch": batch, "operators": seconds[batch]} for batch in (1, 2)]
    own = with_costs(graph, json.dumps({**whole, "smaller": smaller}))

    def forward_s(size: int, share: float = 1.0) -> float:
        forward, backward = planner.profile(own, device, micro_batch=size).at(share)
        assert np.allclose(backward, 2 * forward, rtol=1e-12)
        (found,) = set(forward.round(9).tolist())
        return float(found)

    assert [forward_s(size) for size in (1, 2, 3, 4, 8)] == [3.0, 5.0, 6.5, 8.0, 16.0]
    assert [forward_s(4, share) for share in (0.75, 0.5, 0.25)] == [6.5, 5.0, 3.0]
    assert [forward_s(1, share) for share in (0.5, 0.25)] == [2.0, 1.5]  # on the line through the first two
    weights = planner.profile(own, device, micro_batch=3).weight_grad_s
    assert np.allclose(weights, 2 * 6.5 / 3, rtol=1e-12)


def test_no_share_takes_longer_than_the_whole(graph: planner.Graph, device: planner.Device) -> None:
    seconds = {batch: {node.key: [s, s, 0.0] for node in graph.nodes} for batch, s in ((1, 6), (2, 5))}
    whole = {**document(graph, device), "batch": 2, "operators": seconds[2]}
    own = with_costs(graph, json.dumps({**whole, "smaller": [{"batch": 1, "operators": seconds[1]}]}))
    assert set(planner.profile(own, device, micro_batch=2).at(0.5)[0].tolist()) == {5.0}


@pytest.mark.parametrize(("optimizer", "moved_bytes"), [("adam", 24), ("sgd", 8), ("momentum", 16)])
def test_a_measured_rate_says_what_an_update_takes(
    graph: planner.Graph, device: planner.Device, optimizer: str, moved_bytes: int
) -> None:
    own = with_costs(graph, json.dumps({**document(graph, device), "update_byte_per_s": 2e9}))
    job = planner.Job(4, precision="fp32", optimizer=optimizer, devices=2)
    for degrees in (planner.Degrees(data=1), planner.Degrees(tensor=2)):
        plan = planner.predict(own, planner.load_cluster("dgx-a100"), job, degrees).plan
        (stage,) = plan.predictions.stages
        held = stage.memory.weights_bytes / 4
        update_s = stage.update_s - plan.summed_s(0)
        assert update_s == pytest.approx(moved_bytes * held / 2e9, rel=1e-3)


def test_a_split_backward_takes_what_gradients_of_weights_take(graph: planner.Graph, device: planner.Device) -> None:
    """A third of each backward is for weights: so in the plan, and in its simulation."""
    seconds = {node.key: [1.0, 3.0, 1.0] for node in graph.nodes}
    own = with_costs(graph, json.dumps({**document(graph, device), "operators": seconds}))
    job = planner.Job(8, precision="fp32", devices=2)
    degrees = planner.Degrees(pipeline=2, schedule="zb-h1", micro_batch=2)
    plan = planner.predict(own, planner.load_cluster("dgx-a100"), job, degrees).plan
    for stage in plan.predictions.stages:
        assert stage.weight_grad_s == pytest.approx(stage.backward_s / 3, rel=1e-6)
    times = times_of(plan)
    assert times.weight_grad_s.tolist() == [stage.weight_grad_s for stage in plan.predictions.stages]
    whole = planner.predict(own, planner.load_cluster("dgx-a100"), job, planner.Degrees(pipeline=2, micro_batch=2)).plan
    assert {stage.weight_grad_s for stage in whole.predictions.stages} == {None}


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
        ({"smaller": [{"batch": 1}]}, "smaller is missing or wrong"),
        ({"smaller": [{"batch": 2, "operators": {}}]}, "smaller is missing or wrong"),
        ({"smaller": [{"batch": 1, "operators": {}}]}, "no three times for operator"),
        ({"update_byte_per_s": -1.0}, "update_byte_per_s is missing or wrong"),
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

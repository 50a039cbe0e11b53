"""The figures that people compare training runs by, against figures worked out by hand."""

from __future__ import annotations

import dataclasses
import json

import pytest

import planner
from planner.plans import seal
from tests.plans.sample import make_plan

WEIGHTS = 12 * 768 * (12 * 768) + 768 * 50257
"""Elements of GPT-2 small that a token is multiplied with: 12 d^2 a layer, and the head."""
SCORES = 12 * 2 * 1024 * 768 / 2
"""Multiply-adds of a token with the keys and values of 1,024 tokens that a causal mask leaves, in 12 layers."""
STEP_FLOPS = 64 * 1024 * 6 * (WEIGHTS + SCORES)


@pytest.fixture(scope="module")
def gpt2() -> planner.Plan:
    graph, cluster = planner.load_graph("gpt2"), planner.load_cluster("dgx-h100")
    found: planner.Plan = planner.predict(graph, cluster, planner.Job(64), planner.Degrees(micro_batch=8)).plan
    return found


def test_a_language_model_has_tokens_utilisation_and_a_price(gpt2: planner.Plan) -> None:
    line, step_s = gpt2.headline, gpt2.predictions.reached_s
    assert line is not None
    assert (line.model, line.devices, line.sequence, line.tokens_per_step) == (
        "gpt2",
        {"h100-sxm-80gb": 8},
        1024,
        65536,
    )
    assert line.iteration_s == step_s
    assert line.tokens_per_s_per_device == pytest.approx(65536 / 8 / step_s, rel=1e-8)
    assert line.mfu == pytest.approx(STEP_FLOPS / step_s / (8 * 989e12), rel=1e-4)
    assert line.dollars_per_tera_tokens == pytest.approx(8 * 12.29 / 3600 * step_s / 65536 * 1e12, rel=1e-8)
    assert line.device_bytes == round(79.11 * 2**30)
    assert line.memory_bytes == gpt2.predictions.stages[0].memory.total_bytes


def test_another_price_changes_prices_alone(gpt2: planner.Plan) -> None:
    dearer = planner.with_price(gpt2, 2 * 12.29)
    assert dearer.headline is not None
    assert gpt2.headline is not None
    assert dearer.headline.dollars_per_hour == pytest.approx(2 * 8 * 12.29)
    assert dearer.headline.dollars_per_tera_tokens == pytest.approx(2 * gpt2.headline.dollars_per_tera_tokens)
    assert dataclasses.replace(
        dearer.headline,
        dollars_per_hour=gpt2.headline.dollars_per_hour,
        dollars_per_tera_tokens=gpt2.headline.dollars_per_tera_tokens,
    ) == gpt2.headline  # fmt: skip


def test_a_price_of_ones_own_is_no_finding(gpt2: planner.Plan) -> None:
    graph, cluster = planner.load_graph("gpt2"), planner.load_cluster("dgx-h100")
    assert planner.check_plan(planner.with_price(gpt2, 3.0), graph, cluster).findings == ()
    before = dataclasses.replace(gpt2.provenance, version="0.1.4")
    bare = seal(dataclasses.replace(gpt2, headline=None, provenance=before))  # plans of 0.1 have none
    assert planner.check_plan(bare, graph, cluster).findings == ()
    assert gpt2.headline is not None
    flattering = seal(dataclasses.replace(gpt2, headline=dataclasses.replace(gpt2.headline, mfu=0.9)))
    assert any("mfu" in str(finding) for finding in planner.check_plan(flattering, graph, cluster).findings)


@pytest.mark.parametrize(("name", "batch"), [("resnet18", 256), ("dlrm-kaggle", 512)])
def test_images_and_categories_are_no_tokens(name: str, batch: int) -> None:
    graph, cluster = planner.load_graph(name), planner.load_cluster("dgx-h100")
    line = planner.predict(graph, cluster, planner.Job(batch), planner.Degrees(micro_batch=batch // 8)).plan.headline
    assert line is not None
    assert (line.sequence, line.tokens_per_step, line.dollars_per_tera_tokens) == (0, 0, 0.0)
    assert line.dollars_per_mega_samples == pytest.approx(8 * 12.29 / 3600 * line.iteration_s / batch * 1e6, rel=1e-6)
    assert f"{batch} samples a step: " in str(line)
    assert "per 10^6 samples" in str(line)


def test_the_line_leaves_out_what_is_not_known() -> None:
    plan = make_plan()
    assert str(plan.headline) == (
        "toy, 3 x toy-gpu, 6 samples a step: 500 ms, 4 samples/s/device, 18.0% MFU, 3 of 16 GiB, "
        "5 of 8 devices idle (--devices 3 is as fast)"
    )
    assert "dollars_per_hour" not in json.loads(planner.dump_plan(plan))["headline"]


def test_the_line_has_the_interval_of_measured_runs(gpt2: planner.Plan) -> None:
    assert gpt2.headline is not None
    error = planner.costs.MeasuredError("some class", 5, 0.9, 1.1)
    assert "gpt2, 8 x h100-sxm-80gb, seq 1024, 65,536 tokens a step: 2 s (80 %: 1.8 s to 2.2 s), 4,096 tokens/s" in str(
        gpt2.headline.at(2.0, error)
    )

"""One model through several exporters costs the same: blocks, work, bytes, seconds and plan."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

import planner
from planner import Graph, Job, Plan
from planner.costs import Profile
from planner.graph import build_chain
from planner.operators import SavedOptions, graph_specs, saved_for_backward, unique_bytes
from tests.shared_data import shared_path

SAME = [
    ("families/clip.dynamo", "families/clip.noopt"),
    ("families/clip.legacy14", "families/clip.noopt"),
    ("families/llama_kv.dynamo", "families/llama_kv.noopt"),
    ("families/mobilenet.dynamo", "families/mobilenet.noopt"),
    ("families/mobilenet.legacy14", "families/mobilenet.noopt"),
    ("families/unet_diff.dynamo", "families/unet_diff.legacy14"),
    ("resnet50", "resnet50_legacy_initinputs"),
    ("resnet50_legacy", "resnet50_legacy_initinputs"),
    ("gpt2_124m_metadata", "gpt2_124m_legacy_dyn"),
]


@functools.cache
def imported(name: str) -> Graph:
    dims = {"batch": 1, "seq": 1024} if name.endswith("legacy_dyn") else {}
    return planner.load_graph(shared_path(f"onnx/{name}.onnx"), dims=dims)


@functools.cache
def priced(name: str) -> Profile:
    batch = 8 if name.startswith("resnet") else None
    device = planner.load_cluster("dgx-a100").devices[0]
    return planner.profile(imported(name), device, precision="fp32", micro_batch=batch)


@pytest.mark.parametrize(("one", "other"), SAME)
def test_exports_of_one_model_cost_the_same(one: str, other: str) -> None:
    assert len(build_chain(imported(one)).blocks) == len(build_chain(imported(other)).blocks)
    first, second = priced(one), priced(other)
    counts = [imported(name).parameter_count() for name in (one, other)]
    assert counts[0] == pytest.approx(counts[1], rel=0.01)
    assert first.forward_flops.sum() == second.forward_flops.sum()
    assert first.backward_flops.sum() == second.backward_flops.sum()
    assert unique_bytes(first.saved) == pytest.approx(unique_bytes(second.saved), rel=0.01)
    assert first.forward_s.sum() == pytest.approx(second.forward_s.sum(), rel=0.01)
    assert first.backward_s.sum() == pytest.approx(second.backward_s.sum(), rel=0.01)


def test_an_optimised_export_of_untrained_gpt_neox_merges_its_norms() -> None:
    """Three layers have two norms of one input each; their fresh weights are equal, and one of them is left out."""
    kept = [unique_bytes(priced(f"families/gpt_neox.{exporter}").saved) for exporter in ("dynamo", "noopt")]
    normalised, statistics = 2 * 64 * 128 * 4, 2 * 64 * 2 * 4
    assert kept[1] - kept[0] == 3 * (normalised + statistics)


@functools.cache
def planned(name: str, stages: tuple[int, ...]) -> Plan:
    job = Job(global_batch=64, backends=("any",), pipeline_stages=stages, devices=4)
    return planner.plan(imported(name), planner.load_cluster("dgx-a100"), job)


def shape(plan: Plan) -> list[tuple[tuple[int, int], int]]:
    return [(stage.blocks, len(stage.replicas)) for stage in plan.stages]


PLANNED = [(*pair, ()) for pair in SAME] + [(*pair, (2,)) for pair in SAME[::3] if pair[0].startswith("families")]


@pytest.mark.parametrize(("one", "other", "stages"), PLANNED)
def test_exports_of_one_model_get_one_plan(one: str, other: str, stages: tuple[int, ...]) -> None:
    first, second = planned(one, stages), planned(other, stages)
    assert first.predictions.iteration_s == pytest.approx(second.predictions.iteration_s, rel=0.01)
    assert shape(first) == shape(second)


def test_an_export_that_lost_norms_is_cut_like_the_one_that_has_them() -> None:
    first, second = (planned(f"families/gpt_neox.{exporter}", (2,)) for exporter in ("dynamo", "noopt"))
    assert shape(first) == shape(second)
    flops = [priced(f"families/gpt_neox.{exporter}").forward_flops.sum() for exporter in ("dynamo", "noopt")]
    assert flops[0] == flops[1]


def test_a_loss_in_the_graph_costs_what_an_assumed_loss_costs() -> None:
    """Two exports of one GPT-2: the loss is counted with the logits, or stands as a node of its own. The second has
    dropout and cuts the last word's logits off, which takes time of its own."""
    times = []
    for name in ("gpt2_124m_metadata", "gpt2_124m_loss_train"):
        profile, nodes = priced(name), imported(name).nodes
        last = [i for i, node in enumerate(nodes) if node.op in ("MatMul", "SoftmaxCrossEntropyLoss")]
        assert profile.forward_flops.sum() == priced("gpt2_124m_metadata").forward_flops.sum()
        times.append((len(last), profile.forward_s[last].sum(), profile.backward_s[last].sum()))
    assert [count for count, _, _ in times] == [1, 2]
    assert times[1][1:] == pytest.approx(times[0][1:], rel=0.005)


LEAST = {"gpt_neox.dynamo": 0.92}
"""What is known to be undercounted: a file that holds one of two norms, which were equal when it was exported."""
UNFUSED = {"deepseek_v3"}
"""Measured without an attention kernel: torch has none on a CPU for two head sizes."""


def truth() -> dict[str, Any]:
    models: dict[str, Any] = json.loads(shared_path("onnx/families/truth.json").read_text())["models"]
    return models


@pytest.mark.parametrize(
    "name",
    [
        "clip.dynamo", "clip.legacy14", "clip.noopt", "conv3d_tcn.dynamo", "deberta.dynamo", "deepseek_v3.dynamo",
        "fnet.dynamo", "gpt_neox.dynamo", "gpt_neox.noopt", "gru_seq2seq.dynamo", "llama_kv.dynamo", "llama_kv.noopt",
        "loop_rnn.dynamo", "mobilenet.dynamo", "mobilenet.legacy14", "mobilenet.noopt", "rwkv.dynamo", "sam.dynamo",
        "unet_diff.dynamo", "unet_diff.legacy14",
    ],
)  # fmt: skip
def test_kept_bytes_are_those_that_torch_keeps(name: str) -> None:
    family, _, _ = name.partition(".")
    graph = imported(f"families/{name}")
    options = SavedOptions(loss=False, fused_attention=family not in UNFUSED)
    saved = saved_for_backward(graph, graph_specs(graph), options=options)
    ratio = unique_bytes(saved) / truth()[family]["batch 2"]["saved_bytes"]
    assert LEAST.get(name, 0.94) < ratio < 1.01

"""The head of a model: which block it is, and what a recomputed stage keeps of it."""

from __future__ import annotations

import numpy as np
import pytest

import planner
from planner import Pricer
from planner.graph import build_chain
from planner.plans import explain
from planner.report import explanation_report, report_to_text
from planner.simulate import simulate
from planner.space import Configuration, Job, StageChoice, evaluate
from planner.space.blocks import head_block, loss_outputs
from tests.graph import make_graph
from tests.shared_data import shared_path


def test_logits_and_losses_are_heads_and_other_ends_are_not() -> None:
    layers = ["h0 = Gather(w_embed, x)", "h1 = MatMul(h0, w0)", "h2 = Relu(h1)"]
    logits = build_chain(make_graph([*layers, "y = MatMul(h2, w1)"]))
    assert head_block(logits) == len(logits.blocks) - 1
    features = build_chain(make_graph([*layers, "a = MatMul(h2, w1)", "y = Relu(a)"]))
    assert head_block(features) == -1


@pytest.mark.parametrize(("name", "last"), [("gpt2_124m_metadata", "m.lm_head"), ("gpt2_124m_loss_train", "m.lm_head")])
def test_gpt2_ends_in_its_head(name: str, last: str) -> None:
    chain = build_chain(planner.load_graph(shared_path(f"onnx/{name}.onnx")))
    assert chain.blocks[head_block(chain)].name == last
    assert bool(loss_outputs(chain.graph)) == name.endswith("loss_train")


def test_recomputed_gpt2_keeps_its_logits_and_repeats_twelve_layers() -> None:
    graph = planner.load_graph("gpt2")
    cluster = planner.load_cluster("dgx-a100")
    job = Job(global_batch=8, precision="bf16", recompute="always", schedules=("1f1b",))
    costs = Pricer(graph, cluster, job).costs(1)
    assert costs.repeated is not None
    assert costs.kept_bytes is not None
    assert np.flatnonzero(~costs.repeated).tolist() == [26]
    # One sample of 1024 tokens over 50257 words: the loss keeps fp32 probabilities; the last norm's result in bf16
    # and its statistics in fp32 come to 1.6 MB.
    tokens = 1024
    assert costs.kept_bytes[26] == pytest.approx(tokens * (50257 * 4 + 768 * 2 + 8), rel=1e-3)
    assert costs.kept_bytes[:26].sum() == 0
    terms = evaluate(costs, cluster, job, Configuration((StageChoice(0, 27, 1, True),), 1, 1, 8, "1f1b")).stages[0]
    assert terms.recompute_s == pytest.approx(terms.forward_s - costs.forward_s[0, 26])
    plan = planner.plan(graph, cluster, job)
    assert plan.stages[-1].kept_blocks == (26,)
    assert "lm_head" in report_to_text(explanation_report(explain(plan)))


def test_a_recomputed_plan_peaks_while_a_backward_runs() -> None:
    job = Job(global_batch=32, precision="bf16", recompute="always", schedules=("gpipe",), micro_batches=(2,))
    plan = planner.plan(planner.load_graph("vit-b16"), planner.load_cluster("dgx-a100"), job)
    figures = plan.predictions.stages[0]
    assert figures.in_flight * figures.unit_bytes < figures.memory.activations_bytes
    lane = simulate(plan).lanes[0]
    assert lane.memory.peak_bytes == pytest.approx(figures.memory.total_bytes)
    after_forwards = figures.memory.total_bytes - figures.memory.workspace_bytes - figures.memory.activations_bytes
    after_forwards += figures.in_flight * figures.unit_bytes
    held = [kept for at, kept in zip(lane.memory.time_s, lane.memory.held_bytes, strict=True) if at < figures.forward_s]
    assert max(held) <= after_forwards

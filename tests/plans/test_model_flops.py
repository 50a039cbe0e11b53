"""Model FLOPs of the headline: what kernels execute, so that no utilisation exceeds the peak; and what drivers show."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

import planner
from planner.costs.precision import precision
from planner.hardware import load_cluster
from planner.prediction import driver_bytes
from planner.report import report_to_text
from planner.report.answers import prediction_report
from planner.space import MemoryBytes

ROOT = Path(__file__).parents[2]
CLUSTERS = sorted(path.stem for path in (ROOT / "hardware_profiles").glob("*.yaml"))
CLUSTERS = [name for name in CLUSTERS if name not in ("errors", "sources")]


@pytest.mark.parametrize(("model", "dims", "size"), [("llama3.2-1b", {"seq": 1 << 20}, 1), ("vgg16", {}, 64)])
def test_no_device_executes_more_than_its_peak(model: str, dims: dict[str, int], size: int) -> None:
    graph, seen = planner.load_graph(model, dims=dims), 0
    for name in CLUSTERS:
        for device in load_cluster(name).devices:
            for chosen in ("fp32", "tf32", "fp16", "bf16"):
                peak = device.matrix_flop_per_s.get(precision(chosen).formats[-1], 0.0)
                if not peak or (chosen != "fp32" and chosen not in device.matrix_flop_per_s):
                    continue
                priced = planner.profile(graph, device, precision=chosen, micro_batch=size)
                rate = priced.executed_total / float(priced.forward_s.sum() + priced.backward_s.sum())
                assert rate <= peak, (name, device.name, chosen)
                seen += 1
    assert seen > 40


def test_a_causal_mask_halves_the_scores_that_count() -> None:
    """Llama 3.2 1B at 8,192 tokens: query, key, value, output, MLP of 16 layers, the head, half of the scores."""
    graph, cluster = planner.load_graph("llama3.2-1b", dims={"seq": 8192}), load_cluster("dgx-h100")
    layer = 2048 * (2048 + 512 + 512 + 2048) + 3 * 2048 * 8192
    weights, scores = 16 * layer + 2048 * 128256, 16 * 2 * 8192 * 2048
    assert cluster.stack.causal_part == 0.5
    part = 0.5 * (1 + (cluster.stack.attention_block - 1) / 8192)  # and the blocks on the diagonal in full
    line = planner.predict(graph, cluster, planner.Job(8), planner.Degrees()).plan.headline
    assert line is not None
    assert line.flops_per_sample == pytest.approx(8192 * 6 * (weights + part * scores), rel=1e-4)


def test_kernels_that_do_not_skip_the_mask_count_in_full() -> None:
    graph, cluster = planner.load_graph("llama3.2-1b", dims={"seq": 8192}), load_cluster("dgx-h100")
    device = cluster.devices[0]
    full = dataclasses.replace(device, stack=dataclasses.replace(device.stack, causal_part=1.0))
    priced = planner.profile(graph, full, precision="bf16")
    assert priced.executed_total == pytest.approx(float(priced.forward_flops.sum() + priced.backward_flops.sum()))
    eager = planner.profile(graph, device, precision="bf16", fused_attention=False)
    assert eager.executed_total == pytest.approx(float(eager.forward_flops.sum() + eager.backward_flops.sum()))


def test_the_convention_is_said() -> None:
    graph, cluster = planner.load_graph("gpt2", dims={"seq": 128}), load_cluster("dgx-a100")
    found = planner.predict(graph, cluster, planner.Job(64), planner.Degrees(micro_batch=8))
    words = "MFU counts the products that kernels execute: of causal attention what the mask does not hide"
    assert words in report_to_text(prediction_report(found), table_width=200)
    assert words in planner.plans.explain(found.plan).assumptions


@pytest.mark.parametrize("batch", [8, 16, 24, 32])
def test_a_driver_shows_no_more_than_the_card_has_where_a_job_fits(batch: int) -> None:
    graph = planner.load_graph("gpt2", dims={"seq": 1024})
    cluster = load_cluster("dgx-a100")
    need = planner.predict(graph, cluster, planner.Job(batch * 8), planner.Degrees(micro_batch=batch)).fullest
    for spare in (1.0, 1.01, 1.05, 1.2):  # a card that the job fills, and larger ones
        size = math.ceil(spare * need.memory.total)
        device = dataclasses.replace(cluster.devices[0], memory_bytes=size)
        card = dataclasses.replace(cluster, devices=(device,))
        found = planner.predict(graph, card, planner.Job(batch * 8), planner.Degrees(micro_batch=batch))
        assert found.fits
        assert found.fullest.memory.total <= found.driver_bytes <= size
        assert ("which caches of the allocator fill" in report_to_text(prediction_report(found), table_width=200)) == (
            found.driver_bytes == size
        )


def test_what_does_not_fit_is_shown_with_what_it_needs() -> None:
    memory = MemoryBytes(20e9, 20e9, 40e9, 10e9, 1e9, 2e9)
    assert driver_bytes(memory, "bf16", "adam", 1.08, 80e9) == pytest.approx(93e9)  # its need, without caches
    assert driver_bytes(memory, "bf16", "adam", 1.08, 200e9) > 93e9

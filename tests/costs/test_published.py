"""Predictions against measured runs, and how prices behave."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.classes import NOISE, noise_of
from benchmarks.memory import fit_of
from benchmarks.published import kendall_tau, main, mape, predict
from benchmarks.runs import PUBLISHED, SINGLE_NODE, Run, read_runs
from planner.costs import profile
from planner.hardware import Curve, load_cluster, load_device, send_terms
from tests.costs.test_roofline import DEVICE, node, of, product
from tests.operators import calls
from tests.shared_data import shared_path


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    folder = shared_path(f"reference/{SINGLE_NODE}").parent
    shared_path(f"reference/{PUBLISHED}")
    return {run.key: run for run in read_runs(folder)}


def test_what_can_be_priced(runs: dict[str, Run]) -> None:
    assert len(runs) == 177 + 333
    campaign = [run for key, run in runs.items() if key.startswith("single")]
    assert {run.obstacle for run in campaign} == {""}
    assert sum(run.ranks == 1 for run in campaign) == 75
    others = [run for key, run in runs.items() if not run.obstacle and not key.startswith("single")]
    assert sum(run.ranks > 1 for run in others) == 69  # four of them with DeepSpeed's BF16 optimizer
    assert sum(run.sharded for run in others) == 51
    exact = [run.key for run in others if run.ranks == 1 and not run.sharded]
    assert exact == [
        *("r0142", "r0144", "r0145", "r0146", "r0189", "r0196"),
        *("r0958", "r0959", "r0962", "r0969", "r0971", "r0973", "r0980", "r1030"),
    ]
    assert runs["r0119"].obstacle == "schedule other than gpipe and 1f1b"
    assert (runs["r0010"].obstacle, runs["r0010"].zero) == ("", 3)


@pytest.mark.parametrize(
    ("key", "measured_s", "within"),
    [
        ("single[85]", 0.447, 0.08),  # bound by launches: hidden 1024, micro-batch 1
        ("single[20]", 0.816, 0.06),  # hidden 2048, micro-batch 1, 16 micro-batches
        ("single[42]", 0.505, 0.12),  # bound by the device: hidden 2048, micro-batch 4, two stages
        ("single[175]", 0.548, 0.06),  # four stages, 16 micro-batches
        ("single[168]", 0.194, 0.08),  # four stages, hidden 1024, micro-batch 4
        ("r0142", 3.243, 0.08),  # 6.2 B parameters, eight stages, nothing recomputed
        ("r0196", 9.195, 0.08),  # 28.3 B parameters, 32 stages over four nodes
        ("r0969", 23.0, 0.15),  # V100
        ("r1030", 3.5665, 0.10),  # 64 devices, data parallel
        ("single[156]", 0.2334, 0.08),  # four ranks share every operator of two stages
        ("single[39]", 0.1708, 0.08),  # eight ranks, one stage
        ("r0002", 3.6963, 0.05),  # Megatron-LM's 7.5 B parameters: four ranks, 32 replicas
        ("r0004", 14.4535, 0.06),  # 39 B: eight ranks, two stages, 32 replicas
        ("r1126", 56.18, 0.05),  # 175 B: eight ranks, eight stages, eight replicas
        ("r0342", 52.738, 0.09),  # 13 B parameters sharded over one node
    ],
)
def test_measured_iterations(runs: dict[str, Run], key: str, measured_s: float, within: float) -> None:
    run = runs[key]
    assert run.seconds == pytest.approx(measured_s, rel=2e-3)
    found = predict(run)
    assert found.seconds == pytest.approx(run.seconds, rel=within)
    assert found.closed_form_s == pytest.approx(found.seconds, rel=0.03)


@pytest.mark.parametrize(
    ("key", "gigabytes", "within"), [("r0142", 39, 0.06), ("r0144", 32, 0.06), ("r0189", 61, 0.08)]
)
def test_measured_memory(runs: dict[str, Run], key: str, gigabytes: float, within: float) -> None:
    assert runs[key].memory_by == "allocator"
    assert fit_of(runs[key]).seen_bytes == pytest.approx(gigabytes * 1e9, rel=within)


def test_the_campaign_as_a_whole(runs: dict[str, Run]) -> None:
    chosen = [run for run in runs.values() if run.key.startswith("single") and run.ranks == 1]
    found = [predict(run) for run in chosen]
    assert len(found) == 75
    assert mape([p.ratio for p in found]) < 0.05
    assert mape([p.baseline_s / p.run.seconds for p in found]) > 0.3
    assert kendall_tau([p.seconds for p in found], [run.seconds for run in chosen]) > 0.9


def test_the_baseline_is_hardware_flops_at_half_of_the_peak(runs: dict[str, Run]) -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh) FLOPs of B samples, over 8 devices at 156 TFLOP/s."""
    run = runs["single[18]"]
    samples, s, layers, h, vocab = 64, 1024, 12, 2048, 50257
    flops = 96 * samples * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert predict(run).baseline_s == pytest.approx(flops / 8 / 156e12, rel=1e-6)


def test_ranking_figures() -> None:
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([3, 2, 1], [10, 20, 30]) == -1
    assert kendall_tau([1, 3, 2], [10, 20, 30]) == pytest.approx(1 / 3)
    assert mape([0.9, 1.2]) == pytest.approx(0.15)


def test_noise_comes_from_configurations_that_ran_more_than_once(runs: dict[str, Run]) -> None:
    """Two times 10 % apart have a variance of d^2 / 2, their difference twice that, and 95 % lie within 1.96 of it."""
    once, other = replace(runs["r0142"], seconds=10.0), replace(runs["r0144"], seconds=30.0)
    assert noise_of([once, other]) == NOISE
    assert noise_of([once, replace(once, key="again", seconds=11.0), other]) == pytest.approx(1.96 * np.log(1.1))


def test_the_command_says_what_is_missing(tmp_path: object) -> None:
    with pytest.raises(SystemExit):
        main([])


@given(
    st.lists(st.floats(1, 1e15), min_size=1, max_size=6, unique=True),
    st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6),
    st.floats(0, 1e18),
    st.floats(1.0, 100.0),
)
@settings(deadline=None, max_examples=60)
def test_a_growing_curve_grows_between_its_ends(
    sizes: list[float], fractions: list[float], size: float, factor: float
) -> None:
    curve = Curve(tuple(sorted(sizes)), tuple(sorted(fractions[: len(sizes)])))
    slow, fast = float(curve.at(size)), float(curve.at(size * factor))
    assert slow <= fast * (1 + 1e-12)
    assert curve.fractions[0] == pytest.approx(min(slow, curve.fractions[0]))
    assert curve.fractions[-1] == pytest.approx(max(fast, curve.fractions[-1]))


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm-80gb", "v100-sxm2-32gb", "tpu-v4"])
def test_more_work_always_takes_longer_on_bundled_devices(name: str) -> None:
    device = load_device(name)
    for curve in (device.matrix_efficiency, device.memory_efficiency):
        sizes = np.logspace(4, 15, 400)
        assert np.all(np.diff(sizes / curve.at(sizes)) > 0)


def test_compiled_graphs_have_no_host_time_and_gpus_inherit_the_a100s() -> None:
    assert (load_device("tpu-v4").launch_s, load_device("tpu-v4").handover_s) == (0.0, 0.0)
    for name in ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "v100-sxm2-16gb", "mi300x-192gb"):
        device = load_device(name, stack="eager")
        assert (device.launch_s, device.handover_s) == (65e-6, 1e-3)


def test_backward_launches_take_half() -> None:
    made = calls.graph(
        {"x": "i 8 8", "a": "w 8 8", "h": "x 8 8", "b": "w 8 8", "y": "x 8 8"},
        [node("MatMul", "x a", "h", "layers.0.fc"), node("MatMul", "h b", "y", "layers.1.fc")],
    )
    found = of(replace(made, batch=8), replace(DEVICE, launch_s=1.0))
    assert found.forward_s.tolist() == [1.0, 1.0]
    assert found.backward_s.tolist() == [0.5, 1.0]  # one gradient product, then two


def test_the_loss_takes_its_passes() -> None:
    """Mixed precision casts 2-byte logits to 4 bytes; 3 passes forward and 6 backward, at 1 GB/s."""
    made, elements = product(64, 64, 1000), 64 * 1000
    for precision, cast in (("fp32", 0), ("bf16", 6)):
        plain, ended = (of(made, precision=precision, loss=loss) for loss in (False, True))
        assert ended.forward_s[1] - plain.forward_s[1] == pytest.approx((3 * 4 + cast) * elements / 1e9)
        assert ended.backward_s[1] - plain.backward_s[1] == pytest.approx((6 * 4 + cast) * elements / 1e9)
        assert ended.forward_s[0] == plain.forward_s[0]
        assert ended.forward_flops.tolist() == plain.forward_flops.tolist()


def test_each_gradient_product_runs_at_the_rate_of_its_own_size() -> None:
    n = 4096
    grows = Curve((2.0 * n**3, 4.0 * n**3), (0.5, 1.0))
    device = replace(DEVICE, memory_byte_per_s=1e13, matrix_efficiency=grows)
    found = of(product(n, n, n), device, precision="bf16")
    assert found.backward_s[1] == pytest.approx(2 * 2 * n**3 / (1e12 * 0.5))


def test_fused_attention_runs_below_the_rate_of_products() -> None:
    tensors = dict.fromkeys(("q", "k", "v", "y"), "x 1 8 512 64")
    made = replace(calls.graph(tensors, [node("Attention", "q k v", "y")]), batch=1)
    fast = replace(DEVICE, memory_byte_per_s=1e15, vector_flop_per_s=1e15)
    flops = 2 * 2 * 8 * 512 * 512 * 64
    assert of(made, fast, fused_attention=True).forward_s[0] == pytest.approx(flops / (1e11 * 0.5 * 0.75))
    assert of(made, fast, fused_attention=False).forward_s[0] == pytest.approx(flops / (1e11 * 0.5))


def test_handing_over_is_part_of_a_send() -> None:
    cluster = load_cluster("dgx-a100", nodes=2, stack="eager")
    free = replace(cluster, devices=tuple(replace(d, handover_s=0.0) for d in cluster.devices))
    for target in (1, 8):
        extra = send_terms(cluster, 0, target).seconds(1e6) - send_terms(free, 0, target).seconds(1e6)
        assert extra == pytest.approx(1e-3)
    assert send_terms(cluster, 3, 3).seconds(1e6) == 0


def test_larger_micro_batches_never_cost_more_a_sample(runs: dict[str, Run]) -> None:
    run = runs["single[18]"]
    tried = [replace(run, micro_batch=size, replicas=1, global_batch=8) for size in (1, 2, 4, 8)]
    seconds = [predict(r).seconds for r in tried]
    assert all(a > b for a, b in itertools.pairwise(seconds))


def test_a_profile_without_a_loss_keeps_none() -> None:
    made = product(64, 64, 1000)
    plain, ended = (profile(made, DEVICE, precision="fp32", loss=loss) for loss in (False, True))
    kept = [sum(item.byte_count for node_ in p.saved for item in node_) for p in (plain, ended)]
    assert kept[1] - kept[0] == 4 * 64 * 1000

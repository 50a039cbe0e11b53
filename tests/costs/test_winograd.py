"""Convolutions in fp32: Winograd's method by hand, where it applies, and throughputs that others measured on a V100."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from planner.costs import Profile, profile
from planner.graph import Graph
from planner.hardware import Curve, load_device
from tests.costs.test_roofline import DEVICE, node, of
from tests.operators import calls

GPU = replace(DEVICE, vector_flop_per_s=1e11, launch_s=1e-12)
"""fp32 at 50% of 1e11 on its vector units, 1e9 bytes/s."""

WIDE = replace(GPU, memory_byte_per_s=1e11)


def convolutions(kernel: int = 3, stride: int = 1, group: int = 1, size: int = 8) -> Graph:
    """Two equal convolutions of 64 channels in a row, so that the second needs all gradients."""
    out = -(-size // stride)
    last = -(-out // stride)
    weight = f"w 64 {64 // group} {kernel} {kernel}"
    tensors = {"x": f"i 2 64 {size} {size}", "a": weight, "h": f"x 2 64 {out} {out}", "b": weight}
    tensors |= {"y": f"x 2 64 {last} {last}"}
    pads, strides = (kernel // 2,) * 4, (stride, stride)
    options = {"pads": pads, "strides": strides, "group": group, "kernel_shape": (kernel, kernel)}
    nodes = [node("Conv", "x a", "h", **options), node("Conv", "h b", "y", **options)]  # type: ignore[arg-type]
    return replace(calls.graph(tensors, nodes), batch=2)


def test_by_hand() -> None:
    """2 x 64 channels of 8 x 8: 4 tiles an image and channel, 36 products a tile and pair of channels."""
    found = of(convolutions(), WIDE)
    plain = 2 * 2 * 64 * 64 * 9 * 64
    assert found.forward_flops[1] == plain  # the work is the model's, whatever does it
    moved = 36 * 8 * 64  # transformed elements of the input, and as many of the result
    transforms = 4 * (2 * 8192 + 2 * moved) / 1e11
    fewer = plain * 36 / (9 * 16)
    method = transforms + fewer / 5e10  # the tiles themselves pass in less
    assert 4 * (2 * moved + 36 * 64 * 64) / 1e11 < fewer / 5e10
    assert method < plain / 5e10
    assert found.forward_s[1] == pytest.approx(method)
    assert found.backward_s[1] == pytest.approx(2 * method)
    assert found.weight_grad_s[1] == pytest.approx(method)


def test_tiles_that_stick_out_are_paid() -> None:
    """7 x 7 takes as many tiles as 8 x 8."""
    whole, cut = of(convolutions(), WIDE), of(convolutions(size=7), WIDE)
    assert cut.forward_s[1] > 0.9 * whole.forward_s[1]
    assert cut.forward_flops[1] == pytest.approx(whole.forward_flops[1] * 49 / 64)


def test_slow_memory_leaves_the_plain_sum() -> None:
    found = of(convolutions(), replace(GPU, memory_byte_per_s=2e9))
    assert found.forward_s[1] == pytest.approx(2 * 2 * 64 * 64 * 9 * 64 / 5e10)


@pytest.mark.parametrize(
    "shape", [{"kernel": 1}, {"kernel": 5}, {"stride": 2}, {"group": 2}], ids=["1x1", "5x5", "strided", "grouped"]
)
def test_other_convolutions_are_plain_sums(shape: dict[str, int]) -> None:
    made = convolutions(**shape)
    fast = replace(WIDE, memory_byte_per_s=1e15)
    found = of(made, fast)
    assert found.forward_s[1] == pytest.approx(found.forward_flops[1] / 5e10)


def test_matrix_units_and_compiled_designs_do_without() -> None:
    fast = replace(WIDE, memory_byte_per_s=1e15)
    plain = 2 * 2 * 64 * 64 * 9 * 64
    assert of(convolutions(), fast).forward_s[1] == pytest.approx(plain / 4 / 5e10, rel=1e-4)
    assert of(convolutions(), fast, precision="bf16").forward_s[1] == pytest.approx(plain / 5e11)
    assert of(convolutions(), replace(fast, launch_s=0.0)).forward_s[1] == pytest.approx(plain / 5e10)
    units = replace(fast, matrix_flop_per_s={"fp32": 4e11})
    assert of(convolutions(), units).forward_s[1] == pytest.approx(plain / 2e11)


def test_a_share_of_a_convolution() -> None:
    """Half of the work takes half the time, as the curves here are flat."""
    found = of(convolutions(), WIDE)
    assert found.by_share is not None
    half, _ = found.by_share(0.5, 1)
    assert half[1] == pytest.approx(found.forward_s[1] / 2)


def test_fractions_belong_to_the_time_a_product_takes() -> None:
    """2 MFLOP at a tenth of the peak is as much time as 20 MFLOP at the peak that the curve is for."""
    device = replace(DEVICE, matrix_efficiency=Curve((2e6, 2e7), (0.1, 0.5)), memory_byte_per_s=1e15)
    tensors = {"x": "i 100 100", "a": "w 100 100", "h": "x 100 100", "b": "w 100 100", "y": "x 100 100"}
    made = replace(calls.graph(tensors, [node("MatMul", "x a", "h"), node("MatMul", "h b", "y")]), batch=100)
    assert of(made, device).forward_s[1] == pytest.approx(2e6 / (1e11 * 0.5))
    assert of(made, device, precision="bf16").forward_s[1] == pytest.approx(2e6 / (1e12 * 0.1))


def priced(model: str, device: str, batch: int) -> Profile:
    return profile(planner.load_graph(model), load_device(device, stack="eager"), precision="fp32", micro_batch=batch)


@pytest.mark.parametrize(
    ("model", "batch", "per_s", "within"),
    [
        ("resnet50", 32, 298.51, 0.16),  # MXNet 1.2, cuDNN 7.0, p3.2xlarge, docs/faq/perf.md
        ("resnet50", 64, 343.19, 0.05),
        ("resnet50", 128, 363.69, 0.05),
        ("alexnet", 256, 2994.32, 0.12),
        ("resnet152", 16, 16 / 136.5e-3, 0.16),  # PyTorch 0.3, as below
        ("vgg16", 16, 16 / 83.5e-3, 0.17),  # PyTorch 0.3, cuDNN 7.0, p3: u39kun/deep-learning-benchmark
        ("vgg16", 16, 16 / 71.7e-3, 0.05),  # TensorFlow 1.5, the same
    ],
)
def test_measured_training_in_fp32(model: str, batch: int, per_s: float, within: float) -> None:
    found = priced(model, "v100-sxm2-16gb", batch)
    assert batch / (found.forward_s + found.backward_s).sum() == pytest.approx(per_s, rel=within)


@pytest.mark.parametrize(("batch", "per_s"), [(16, 654.16), (32, 708.43), (64, 701.59), (128, 703.30)])
def test_measured_inference_of_vgg16_in_fp32(batch: int, per_s: float) -> None:
    """MXNet 1.2, p3.2xlarge: 31 GFLOP an image, which is 1.4 times the peak of 15.7 TFLOP/s."""
    found = priced("vgg16", "v100-sxm2-16gb", batch)
    assert batch / found.forward_s.sum() == pytest.approx(per_s, rel=0.06)


def test_recorded_layers_of_vgg16() -> None:
    """PipeDream's profile of a V100, 128 images: milliseconds forward and backward of its last eight convolutions.

    They are those of 256 and more input channels. The plain sum could not take less than 533 ms at the peak.
    """
    recorded = (44.481, 48.133, 23.823, 37.259, 40.445, 12.989, 11.466, 12.690)
    found = priced("vgg16", "v100-pcie-16gb", 128)
    graph = planner.load_graph("vgg16")
    last = [i for i, each in enumerate(graph.nodes) if each.op == "Conv"][5:]
    assert len(last) == len(recorded)
    ours = [1e3 * (found.forward_s[i] + found.backward_s[i]) for i in last]
    assert sum(ours) == pytest.approx(sum(recorded), rel=0.08)
    assert ours == pytest.approx(recorded, rel=0.25)

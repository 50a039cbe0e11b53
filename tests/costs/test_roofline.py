"""Seconds by the roofline, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.costs import Profile, profile
from planner.errors import JobError, ModelError, UsageError
from planner.graph import Graph, Node
from planner.hardware import Curve, Device
from planner.importers import load_graph
from planner.operators import Origin
from tests.operators import calls
from tests.shared_data import shared_path

DEVICE = Device(
    name="toy",
    memory_bytes=10**9,
    reserve_bytes=0,
    matrix_flop_per_s={"bf16": 1e12, "fp32": 1e11},
    matrix_efficiency=Curve((1e3, 1e9), (0.5, 0.5)),
    vector_flop_per_s=1e10,
    memory_byte_per_s=1e9,
    memory_efficiency=Curve((1.0, 1e12), (1.0, 1.0)),
    launch_s=0.0,
)


def node(op: str, inputs: str, outputs: str, module: str = "", **attributes: int | tuple[int, ...]) -> Node:
    names = tuple(outputs.split())
    return Node(names[0], op, tuple(inputs.split()), names, attributes, module)


def of(made: Graph, device: Device = DEVICE, **options: object) -> Profile:
    return profile(made, device, **{"precision": "fp32", "loss": False, **options})  # type: ignore[arg-type]


def product(rows: int, inner: int, columns: int) -> Graph:
    """`h = x a`, then `y = h b`: both gradients of the second product are needed."""
    tensors = {"x": f"i {rows} {inner}", "a": f"w {inner} {inner}", "h": f"x {rows} {inner}"}
    tensors |= {"b": f"w {inner} {columns}", "y": f"x {rows} {columns}"}
    made = calls.graph(tensors, [node("MatMul", "x a", "h"), node("MatMul", "h b", "y")])
    return replace(made, batch=rows)


def test_a_large_product_is_bound_by_the_matrix_units() -> None:
    n = 4096
    found = of(product(n, n, n), replace(DEVICE, memory_byte_per_s=1e12))
    flops = 2 * n**3
    assert found.forward_flops[1] == flops
    assert found.forward_s[1] == pytest.approx(flops / (1e11 * 0.5))
    assert found.backward_s[1] == pytest.approx(2 * flops / (1e11 * 0.5))
    assert found.weight_grad_s[1] == pytest.approx(flops / (1e11 * 0.5))
    assert found.backward_s[0] == pytest.approx(flops / (1e11 * 0.5))  # the input needs no gradient
    assert found.weight_grad_s[0] == found.backward_s[0]


def test_a_thin_product_is_bound_by_memory() -> None:
    found = of(product(1, 4096, 4096))
    moved = 4 * (4096 + 4096 * 4096 + 4096)
    assert found.moved_bytes[1] == moved
    assert found.forward_s[1] == pytest.approx(moved / 1e9)


def test_half_precision_halves_the_bytes_and_takes_its_own_peak() -> None:
    thin, large = product(1, 4096, 4096), product(4096, 4096, 4096)
    assert of(thin, precision="bf16").forward_s[1] == pytest.approx(of(thin).forward_s[1] / 2)
    fast = replace(DEVICE, memory_byte_per_s=1e13)
    assert of(large, fast, precision="bf16").forward_s[1] == pytest.approx(2 * 4096**3 / (1e12 * 0.5))


def test_element_wise_work_is_bound_by_vector_units_when_memory_is_fast() -> None:
    made = calls.graph(
        {"x": "i 1000 1000", "a": "w 1000 1000", "h": "x 1000 1000", "y": "x 1000 1000"},
        [node("MatMul", "x a", "h"), node("Softmax", "h", "y", axis=-1)],
    )
    found = of(replace(made, batch=1000), replace(DEVICE, memory_byte_per_s=1e15))
    assert found.forward_s[1] == pytest.approx(5e6 / 1e10)  # five operations an element


def test_efficiency_grows_with_size() -> None:
    device = replace(DEVICE, matrix_efficiency=Curve((1e6, 1e10), (0.1, 0.5)), memory_byte_per_s=1e15)
    small = of(product(100, 100, 100), device, precision="bf16")  # 2e6 flops each: a little above the first point
    fraction = 0.1 * 5 ** (np.log(2) / np.log(1e4))  # straight in log-log from 0.1 to 0.5
    assert small.forward_s[1] == pytest.approx(2e6 / (1e12 * fraction))


def test_a_layer_takes_its_launches_when_they_take_longer() -> None:
    tensors = {"x": "i 8 8", "a": "w 8 8", "h": "x 8 8", "r": "x 8 8", "b": "w 8 8", "y": "x 8 8"}
    nodes = [
        node("MatMul", "x a", "h", "layers.0.fc"),
        node("Relu", "h", "r", "layers.0.act"),
        node("MatMul", "r b", "y", "layers.1.fc"),
    ]
    made = replace(calls.graph(tensors, nodes), batch=8)
    slow = of(made, replace(DEVICE, launch_s=1.0))
    assert slow.forward_s.tolist() == [1.0, 1.0, 1.0]
    free = of(made)
    assert free.forward_s[0] == pytest.approx(768e-9)  # three tensors of 64 floats at 1 GB/s
    mixed = of(made, replace(DEVICE, launch_s=700e-9))
    assert mixed.forward_s[:2].tolist() == pytest.approx([700e-9, 700e-9])  # 1.4 us of launches, 1.28 us of work
    assert mixed.forward_s[2] == pytest.approx(768e-9)


def test_a_bias_sum_runs_inside_its_product() -> None:
    made = calls.graph(
        {"x": "i 64 64", "a": "w 64 64", "c": "w 64", "h": "x 64 64", "y": "x 64 64"},
        [node("MatMul", "x a", "h"), node("Add", "h c", "y")],
    )
    found = of(replace(made, batch=64))
    assert found.forward_s[1] == found.backward_s[1] == 0.0


def test_formats_that_a_device_lacks_are_refused_with_those_that_it_has() -> None:
    made = product(64, 64, 64)
    volta = replace(DEVICE, matrix_flop_per_s={"fp16": 1e12, "fp32": 1e11})
    for name in ("bf16", "bf16-pure", "tf32"):
        with pytest.raises(JobError, match=f"toy does not compute in {name[:4]}, but in fp16, fp32") as caught:
            of(made, volta, precision=name)
        assert caught.value.problem.hint == "use --precision fp32 or fp16"
    with pytest.raises(JobError, match="toy does not compute in fp32, but in bf16"):
        of(made, replace(DEVICE, matrix_flop_per_s={"bf16": 1e12}))
    with pytest.raises(UsageError, match="unknown precision"):
        of(made, precision="fp12")


@pytest.mark.parametrize(
    ("formats", "chosen"),
    [(("fp32", "tf32", "bf16", "fp16"), "bf16"), (("fp32", "fp16", "int8"), "fp16"), (("fp32",), "fp32")],
)
def test_the_default_precision_is_the_best_that_a_device_has(formats: tuple[str, ...], chosen: str) -> None:
    device = replace(DEVICE, matrix_flop_per_s=dict.fromkeys(formats, 1e12))
    assert of(product(64, 64, 64), device, precision="").precision == chosen


def test_strict_ops_names_operators_without_a_rule() -> None:
    made = calls.graph(
        {"x": "i 4 4", "a": "w 4 4", "h": "x 4 4", "y": "x 4 4"},
        [node("MatMul", "x a", "h"), node("vendor.Mystery", "h", "y")],
    )
    made = replace(made, batch=4)
    assert of(made).origin == (Origin.RULE, Origin.FALLBACK)
    with pytest.raises(ModelError, match=r"vendor\.Mystery \(1 nodes\)"):
        of(made, strict_ops=True)


def test_micro_batch_scales_work() -> None:
    graph = load_graph(shared_path("onnx/gpt2_124m_metadata.onnx"))
    one, four = of(graph), of(graph, micro_batch=4)
    assert four.micro_batch == 4
    assert four.forward_flops.sum() == 4 * one.forward_flops.sum()
    assert len(four.saved) == len(graph.nodes)


@pytest.mark.parametrize(
    ("name", "flops"),  # counted by torch on the modules
    [("gpt2_124m_metadata", 874_944_921_600), ("vgg16", 2_964_741_685_248), ("vit_s16", 219_821_506_560)],
)
def test_forward_and_backward_work_of_real_exports(name: str, flops: float) -> None:
    found = of(load_graph(shared_path(f"onnx/{name}.onnx")), DEVICE)
    assert found.forward_flops.sum() + found.backward_flops.sum() == pytest.approx(flops, rel=0.02)


def test_fused_attention_moves_no_scores() -> None:
    graph = load_graph(shared_path("onnx/gpt2_124m_metadata.onnx"))
    slow_memory = replace(DEVICE, matrix_flop_per_s={"fp32": 1e18})
    fused, eager = of(graph, slow_memory), of(graph, slow_memory, fused_attention=False)
    scores = 12 * 1024 * 1024 * 4
    operands = 4 * 1024 * 768 * 4  # query, key, value, result; a causal kernel reads no mask
    attention = [i for i, n in enumerate(graph.nodes) if n.op == "Attention"]
    assert len(attention) == 12
    assert fused.moved_bytes[attention[0]] == operands
    assert eager.moved_bytes[attention].sum() >= 12 * 5 * scores
    assert fused.workspace_bytes[attention].max() == operands  # their gradients
    assert eager.workspace_bytes[attention].max() == operands + 2 * scores
    assert fused.forward_s.sum() < eager.forward_s.sum()


def test_equal_layers_cost_the_same() -> None:
    graph = load_graph(shared_path("onnx/gpt2_124m_metadata.onnx"))
    found = of(graph, replace(DEVICE, launch_s=3e-6))
    per_layer = [
        sum(found.forward_s[i] for i, n in enumerate(graph.nodes) if n.module.startswith(f"m.transformer.h.{k}."))
        for k in range(10)
    ]
    assert per_layer == pytest.approx([per_layer[0]] * 10)


def test_grouped_experts_read_the_stored_weights_once() -> None:
    graph = load_graph(shared_path("onnx/mixtral_8x7b_batched.onnx"))
    found = of(graph, DEVICE, precision="bf16")
    stored = 2 * 46.7e9
    assert found.moved_bytes.sum() < 1.5 * stored
    assert found.forward_flops.sum() == pytest.approx(6_561_636_286_464, rel=1e-3)


def test_a_folded_batch_norm_costs_what_one_that_was_kept_costs() -> None:
    folded, kept = (load_graph(shared_path(f"onnx/resnet50{name}.onnx")) for name in ("", "_legacy_initinputs"))
    costs = [profile(graph, DEVICE, precision="fp32", micro_batch=8) for graph in (folded, kept)]
    assert costs[0].forward_s.sum() == pytest.approx(costs[1].forward_s.sum(), rel=0.005)
    assert costs[0].backward_s.sum() == pytest.approx(costs[1].backward_s.sum(), rel=0.005)

"""What the figures of a stack do to the price of operators, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.costs import alignment_advice
from planner.graph import Graph
from planner.hardware import Curve, Stack
from tests.costs.test_roofline import DEVICE, node, of, product
from tests.operators import calls

FAST = replace(DEVICE, memory_byte_per_s=1e15, vector_flop_per_s=1e15)


def attention(size: int, **attributes: int) -> Graph:
    tensors = dict.fromkeys(("q", "k", "v", "y"), f"x 1 8 512 {size}")
    return replace(calls.graph(tensors, [node("Attention", "q k v", "y", **attributes)]), batch=1)


def scores(size: int) -> Graph:
    """Scores of 512 queries and keys with heads of that size."""
    tensors = {"q": f"x 8 512 {size}", "k": f"x 8 {size} 512", "s": "x 8 512 512"}
    return replace(calls.graph(tensors, [node("MatMul", "q k", "s")]), batch=8)


def test_a_causal_kernel_leaves_out_the_hidden_half() -> None:
    half = replace(FAST, stack=Stack(causal_part=0.5))
    for attributes, part in (({"is_causal": 1}, 0.5), ({}, 1.0)):
        made = attention(64, **attributes)
        assert of(made, half).forward_s[0] == pytest.approx(part * of(made, FAST).forward_s[0])


def test_fused_attention_runs_at_the_rate_of_the_device() -> None:
    stack = Stack(attention_rate={"toy*": 0.25, "*": 0.75})
    slow, fast = (replace(FAST, name=name, stack=stack) for name in ("toy", "other"))
    made = attention(64)
    assert of(made, slow).forward_s[0] == pytest.approx(3 * of(made, fast).forward_s[0])


@pytest.mark.parametrize(("size", "factor"), [(144, 1), (150, 16), (152, 1)])
def test_rows_of_odd_length_starve_matrix_units(size: int, factor: float) -> None:
    starved = replace(FAST, stack=Stack(unaligned_rate=1 / 16))
    made = scores(size)
    plain = of(made, FAST, precision="bf16").forward_s[0]
    assert of(made, starved, precision="bf16").forward_s[0] == pytest.approx(factor * plain)


def test_fused_attention_pads_its_rows() -> None:
    starved = replace(FAST, stack=Stack(unaligned_rate=1 / 16))
    made = attention(150)
    assert of(made, starved, precision="bf16").forward_s[0] == of(made, FAST, precision="bf16").forward_s[0]


def test_advice_names_lengths_and_what_they_save() -> None:
    starved = replace(FAST, stack=Stack(unaligned_rate=1 / 16))
    said = alignment_advice(scores(150), starved, precision="bf16", fused_attention=True)
    assert "rows of 150 elements" in said
    assert "144 or 152 would save 94% of the work" in said
    assert not alignment_advice(scores(152), starved, precision="bf16", fused_attention=True)


def test_launches_that_are_waited_for_add_to_the_work() -> None:
    n = 1024
    waits = replace(FAST, launch_s=1e-3, stack=Stack(waits=True, backward_launch=0.5))
    alone = of(product(n, n, n), FAST)
    found = of(product(n, n, n), waits)
    assert found.forward_s == pytest.approx(alone.forward_s + 1e-3)
    assert found.backward_s == pytest.approx(alone.backward_s + np.array([0.5e-3, 1e-3]))
    assert found.at(0.5)[0] == pytest.approx(alone.at(0.5)[0] + 1e-3)


def test_all_work_is_stretched() -> None:
    made = product(512, 512, 512)
    found, alone = of(made, replace(FAST, stack=Stack(stretch=1.25))), of(made, FAST)
    assert found.forward_s == pytest.approx(1.25 * alone.forward_s)
    assert found.backward_s == pytest.approx(1.25 * alone.backward_s)


def test_gradients_are_added_up_in_memory() -> None:
    """6 bytes an element of two weights of 64 x 64 and 64 x 1000 at 1 GB/s."""
    made = product(64, 64, 1000)
    found, alone = (of(made, replace(DEVICE, stack=Stack(accumulation_bytes=n))) for n in (6, 0))
    assert found.backward_s - alone.backward_s == pytest.approx([6 * 64 * 64 / 1e9, 6 * 64 * 1000 / 1e9])
    assert (found.forward_s == alone.forward_s).all()


def test_a_gated_activation_in_one_kernel_passes_once_through_memory() -> None:
    """Two kernels read 3 tensors and write 2, one reads 2 and writes 1. Backward, 3 are read and 2 written."""
    tensors = {"i": "i 1024 1", "v": "w 1 4096", "w": "w 1 4096", **dict.fromkeys("gauy", "x 1024 4096")}
    ups = [node("MatMul", "i v", "g"), node("MatMul", "i w", "u")]
    made = replace(calls.graph(tensors, [*ups, node("Swish", "g", "a"), node("Mul", "a u", "y")]), batch=1024)
    slow = replace(DEVICE, vector_flop_per_s=1e30)
    plain, fused = of(made, slow), of(made, replace(slow, stack=Stack(fused=("gated_activation",))))
    once_s = 1024 * 4096 * 4 / slow.memory_byte_per_s
    assert plain.forward_s[2:].sum() == pytest.approx(5 * once_s)
    assert fused.forward_s[2:].tolist() == pytest.approx([0.0, 3 * once_s])
    assert fused.backward_s[2:].tolist() == pytest.approx([0.0, 5 * once_s])
    assert plain.backward_s[2:].sum() > 6 * once_s


@pytest.mark.parametrize(("head", "filled"), [(64, 1 / 4), (192, 3 / 4), (256, 1.0)])
def test_heads_are_padded_to_the_matrix_unit(head: int, filled: float) -> None:
    padded = of(attention(head), replace(FAST, matrix_unit=256))
    assert padded.forward_s[0] == pytest.approx(of(attention(head), FAST).forward_s[0] / filled)


def test_stored_matrices_are_padded_to_the_matrix_unit() -> None:
    """192 x 192 and 192 x 320 in units of 128: 256 x 256 and 256 x 384."""
    made = product(512, 192, 320)
    found, plain = (of(made, replace(FAST, matrix_unit=unit)) for unit in (128, 1))
    padding = [256 * 256 / (192 * 192), 256 * 384 / (192 * 320)]
    assert found.forward_s / plain.forward_s == pytest.approx(padding)
    assert found.backward_s / plain.backward_s == pytest.approx(padding)


@pytest.mark.parametrize(
    ("block", "attributes", "met"),
    [
        (1, {"is_causal": 1}, 256),
        (128, {"is_causal": 1}, 256 + 63.5),
        (512, {"is_causal": 1}, 511.5),
        (1, {"is_causal": 1, "left_window_size": 63}, 64),
        (128, {"is_causal": 1, "left_window_size": 63}, 256),
        (128, {"is_causal": 1, "left_window_size": 255}, 256 + 63.5),
    ],
)
def test_blocks_of_attention_are_worked_out_whole(block: int, attributes: dict[str, int], met: float) -> None:
    """Of 512 keys a query meets half under a causal mask, and of what a mask hides the rest of its blocks."""
    stack = Stack(causal_part=0.5, attention_block=block)
    found = of(attention(64, **attributes), replace(FAST, stack=stack))
    assert found.forward_s[0] == pytest.approx(met / 512 * of(attention(64), FAST).forward_s[0], rel=1e-6)


def mixture(experts: int) -> Graph:
    """256 rows of 64 elements for each expert, and a matrix of 64 x 64 each."""
    tensors = {"x": f"i {experts} 256 64", "w": f"w {experts} 64 64", "y": f"x {experts} 256 64"}
    return replace(calls.graph(tensors, [node("MatMul", "x w", "y")]), batch=experts)


def test_products_of_experts_run_at_the_rate_of_one() -> None:
    """All experts together run at full rate, one alone at half of it; a quarter of the work is that of two experts."""
    one = 2.0 * 256 * 64 * 64
    curve = Curve((one, 8 * one), (0.5, 1.0))
    device = replace(FAST, matrix_flop_per_s={"fp32": 1e11}, matrix_efficiency=curve)
    together, alone = (of(mixture(8), replace(device, stack=Stack(grouped_experts=each))) for each in (True, False))
    assert alone.forward_s[0] == pytest.approx(2 * together.forward_s[0])
    assert alone.at(0.25)[0][0] == pytest.approx(alone.forward_s[0] / 4)


def test_the_library_launches_the_products_of_further_experts() -> None:
    """One launch of 20 us, and 5 us for each further expert."""
    device = replace(FAST, launch_s=20e-6, stack=Stack(kernel_launch_s=5e-6))
    found = of(mixture(8), replace(device, matrix_flop_per_s={"fp32": 1e30}, memory_byte_per_s=1e30))
    assert found.forward_s[0] == pytest.approx(20e-6 + 7 * 5e-6)
    assert found.at(0.25)[0][0] == pytest.approx(20e-6 + 5e-6)

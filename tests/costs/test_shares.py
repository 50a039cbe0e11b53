"""Seconds of a part of an operator, against sums written out and against what must always hold."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costs import Profile, profile
from planner.errors import UsageError
from planner.graph import Graph
from planner.hardware import Curve, Device, load_cluster
from planner.importers import load_graph
from tests.costs.test_roofline import DEVICE, node, of, product
from tests.operators import calls
from tests.shared_data import shared_path

FAST_MEMORY = replace(DEVICE, memory_byte_per_s=1e18)


def test_a_part_of_a_large_product_loses_what_its_size_costs() -> None:
    """The second product, 2 * 4096^3 operations: half of the peak whole; an eighth of it runs at 0.4 of the peak.

    The curve goes from 0.4 at an eighth to 0.5 at the whole, so an eighth takes an eighth of the time by 0.5 / 0.4.
    """
    flops = 2 * 4096.0**3
    device = replace(FAST_MEMORY, matrix_efficiency=Curve((flops / 8, flops), (0.4, 0.5)))
    found = of(product(4096, 4096, 4096), device, precision="bf16")
    forward, backward = found.at(1 / 8)
    assert found.forward_s[1] == pytest.approx(flops / (1e12 * 0.5))
    assert forward[1] == pytest.approx(flops / 8 / (1e12 * 0.4))
    assert backward[1] == pytest.approx(2 * flops / 8 / (1e12 * 0.4))


def test_a_product_in_pieces_reaches_the_rate_of_a_piece() -> None:
    """An eighth of the same product as four: each runs at 0.2 of the peak, but for that towards the weights (0.4)."""
    flops = 2 * 4096.0**3
    device = replace(FAST_MEMORY, matrix_efficiency=Curve((flops / 32, flops / 8, flops), (0.2, 0.4, 0.5)))
    found = of(product(4096, 4096, 4096), device, precision="bf16")
    forward, backward = found.at(1 / 8, 4)
    assert forward[1] == pytest.approx(flops / 8 / (1e12 * 0.2))
    assert backward[1] == pytest.approx(flops / 8 / (1e12 * 0.2) + flops / 8 / (1e12 * 0.4))
    assert backward[0] == pytest.approx(flops / 8 / (1e12 * 0.4))  # its operand is an input of the model
    assert found.at(1 / 8)[0][1] == pytest.approx(flops / 8 / (1e12 * 0.4))


def test_launches_do_not_shrink() -> None:
    """A product of 1.28 ms in a layer of its own, 1 ms to launch: half of it takes 1 ms, not 0.64; backward 1.28 ms."""
    flops = 2 * 400.0**3
    tensors = {"x": "i 400 400", "a": "w 400 400", "h": "x 400 400", "b": "w 400 400", "y": "x 400 400"}
    nodes = [node("MatMul", "x a", "h", "layers.0.fc"), node("MatMul", "h b", "y", "layers.1.fc")]
    device = replace(FAST_MEMORY, matrix_flop_per_s={"fp32": flops / 1.28e-3 * 2}, launch_s=1e-3)
    found = of(replace(calls.graph(tensors, nodes), batch=400), device)
    assert found.forward_s.tolist() == pytest.approx([1.28e-3, 1.28e-3])
    assert found.at(1 / 2)[0].tolist() == pytest.approx([1e-3, 1e-3])
    assert found.backward_s[1] == pytest.approx(2.56e-3)
    assert found.at(1 / 2)[1][1] == pytest.approx(1.28e-3)
    assert found.at(1 / 16)[1][1] == pytest.approx(1e-3)  # two kernels, launched in half the time each


def test_a_launch_bound_layer_takes_as_long_whatever_the_share() -> None:
    found = of(product(8, 8, 8), replace(DEVICE, launch_s=1.0))
    assert found.forward_s.tolist() == [1.0, 1.0]
    assert found.at(1 / 64)[0].tolist() == [1.0, 1.0]


def test_nodes_of_a_layer_that_becomes_launch_bound_share_its_launches() -> None:
    """One layer of 3 ms and 1 ms, 0.5 ms to launch each. A quarter: 0.75 and 0.25 ms of work against 1 ms of launches.

    An eighth: 0.375 and 0.125 ms, 0.5 ms short of the launches, of 3.5 ms that the whole takes longer: each node is
    lifted by a seventh of what it is short of its whole time.
    """
    tensors = {"x": "i 64 64", "a": "w 64 64", "h": "x 64 64", "b": "w 64 192", "y": "x 64 192"}
    nodes = [node("MatMul", "x a", "h", "layers.0.fc"), node("MatMul", "h b", "y", "layers.0.out")]
    rate = 2 * 64**3 / 1e-3 * 2
    device = replace(FAST_MEMORY, matrix_flop_per_s={"fp32": rate}, launch_s=0.5e-3)
    found = of(replace(calls.graph(tensors, nodes), batch=64), device)
    assert found.forward_s.tolist() == pytest.approx([1e-3, 3e-3])
    assert found.at(1 / 4)[0].tolist() == pytest.approx([0.25e-3, 0.75e-3])
    eighth = [0.125e-3 + (1e-3 - 0.125e-3) / 7, 0.375e-3 + (3e-3 - 0.375e-3) / 7]
    assert sum(eighth) == pytest.approx(1e-3)
    assert found.at(1 / 8)[0].tolist() == pytest.approx(eighth)


def test_the_whole_is_the_profile_itself_and_shares_are_priced_once() -> None:
    found = of(product(64, 64, 64))
    assert found.at(1.0)[0] is found.forward_s
    assert found.at(1)[1] is found.backward_s
    assert found.at(0.25) is found.at(0.25)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_shares_outside_are_refused(share: float) -> None:
    with pytest.raises(UsageError, match="of an operator"):
        of(product(64, 64, 64)).at(share)


def test_times_known_for_whole_nodes_scale_linearly() -> None:
    found = replace(of(product(64, 64, 64)), by_share=None)
    np.testing.assert_array_equal(found.at(0.125)[0], 0.125 * found.forward_s)


@cache
def _priced(model: str, device: str) -> Profile:
    graph: Graph = load_graph(shared_path(f"onnx/{model}.onnx"))
    return profile(graph, _device(device))


def _device(name: str) -> Device:
    return load_cluster(name).devices[0]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["gpt2_124m_metadata", "vgg16"]),
    st.sampled_from(["dgx-a100", "dgx-h100", "tpu-v3-pod"]),
    st.floats(1e-4, 1.0),
)
def test_a_part_takes_at_least_its_share_and_at_most_the_whole(model: str, device: str, share: float) -> None:
    found = _priced(model, device)
    for part, whole in zip(found.at(share), (found.forward_s, found.backward_s), strict=True):
        assert np.all(part <= whole * (1 + 1e-12))
        assert np.all(part >= share * whole * (1 - 1e-12))

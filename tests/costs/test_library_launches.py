"""Recurrences: one call of a library launches a kernel a step by itself, at the price of the launch alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

import planner
from planner.costs import profile
from planner.graph import Graph
from planner.hardware import load_device
from tests.costs.test_roofline import DEVICE, node, of
from tests.operators import calls


def recurrence(steps: int) -> Graph:
    tensors = {"x": f"i {steps} 2 8", "w": "w 1 64 8", "r": "w 1 64 16", "y": f"x {steps} 1 2 16"}
    return replace(calls.graph(tensors, [node("LSTM", "x w r", "y", hidden_size=16)]), batch=2)


def test_steps_are_launched_without_the_framework() -> None:
    """One operation of 65 us, and two kernels of 5 us each for every step; backward three operations, at half of it."""
    found = of(recurrence(10), replace(DEVICE, launch_s=65e-6, memory_byte_per_s=1e15, vector_flop_per_s=1e15))
    assert found.forward_s[0] == pytest.approx(65e-6 + 20 * 5e-6)
    assert found.backward_s[0] == pytest.approx((3 * 65e-6 + 20 * 5e-6) / 2)


def test_recorded_recurrences() -> None:
    """PipeDream's profile of GNMT on a V100, 32 sequences of 48 tokens: milliseconds forward; here they have 50.

    A framework's launch for every step alone would be 6.5 ms.
    """
    graph = planner.load_graph("gnmt-8")
    found = profile(graph, load_device("v100-pcie-16gb", stack="eager"), precision="fp32", micro_batch=32)
    layers = [1e3 * found.forward_s[i] * 48 / 50 for i, each in enumerate(graph.nodes) if each.op == "LSTM"]
    recorded = [5.247, 3.190, 2.491, 2.492]
    assert layers[0] == pytest.approx(recorded[0], rel=0.05)
    assert sorted(layers[1:5])[:3] == pytest.approx([2.49] * 3, rel=0.08)
    assert max(layers[1:5]) == pytest.approx(recorded[1], rel=0.25)

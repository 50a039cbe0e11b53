"""Communication among ranks that share operators, and what of it their work hides."""

from __future__ import annotations

import dataclasses

import pytest

import planner
from planner.hardware import Collective
from planner.sharding import mesh_on


def cluster(**shares: float) -> planner.Cluster:
    stack = dataclasses.replace(planner.load_stack("megatron-2025"), inner_overlap={**shares})
    return planner.load_cluster("dgx-h100", nodes=1, stack=stack)


def test_each_axis_hides_its_own_part() -> None:
    sizes = {"expert": 2, "tensor": 4}
    plain = mesh_on(cluster(), sizes)
    hiding = mesh_on(cluster(tensor=0.75, expert=0.5), sizes)
    for axes, left in (((1,), 0.25), ((0,), 0.5), ((0, 1), 0.5)):
        whole = plain.seconds(Collective.ALL_GATHER, axes, 1e8)
        assert hiding.seconds(Collective.ALL_GATHER, axes, 1e8) == pytest.approx(left * whole)


def test_the_bundled_stack_hides_tensor_communication_alone() -> None:
    graph, degrees = planner.load_graph("llama3-8b", dims={"seq": 1024}), planner.Degrees(tensor=8)
    exposed, hidden = (
        planner.predict(graph, planner.load_cluster("dgx-h100", stack=stack), planner.Job(8), degrees)
        for stack in ("megatron-2025", "overlapped")
    )
    inside = [sum(b.figures.communication_s for b in p.plan.shardings[0].blocks) for p in (exposed, hidden)]
    assert inside[1] < 0.5 * inside[0]  # 15 % of what was sent before, and more is sent, since it costs less
    assert hidden.iteration_s < exposed.iteration_s
    assert (
        planner.load_cluster("dgx-h100").fingerprint != planner.load_cluster("dgx-h100", stack="overlapped").fingerprint
    )

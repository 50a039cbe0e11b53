"""Communication among ranks that share operators: what of it their work hides, and rows that travel once."""

from __future__ import annotations

import dataclasses

import pytest

import planner
from planner.hardware import Collective
from planner.operators import OpCall, graph_specs
from planner.sharding import Load, Setting, mesh_on, strategies
from tests.sharding.graphs import products


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


@pytest.mark.parametrize(
    ("ranks", "columns", "rows"), [(2, Load(1 / 2, 2), Load(1 / 2, 4, 2)), (8, Load(1 / 8, 4), Load(1 / 8, 4, 4))]
)
def test_products_that_ranks_share_run_in_pieces(ranks: int, columns: Load, rows: Load) -> None:
    """Of a weight cut by columns the operand is gathered, cut by rows the result is scattered, in 4 pieces, and its
    gradient gathered; a gather has no more pieces than ranks. Ranks with samples of their own share nothing."""
    graph = products([64, 64], batch=64)
    stack = dataclasses.replace(planner.load_stack("megatron-2025"), product_pieces=4)
    for software, found in (("megatron-2025", (Load(1 / ranks),) * 3), (stack, (Load(1 / ranks), rows, columns))):
        mesh = mesh_on(planner.load_cluster("dgx-h100", stack=software), {"tensor": ranks})
        setting = Setting(graph, mesh)
        every = strategies(OpCall.of(graph, graph.nodes[0]), graph_specs(graph)[0], mesh, 2.0)
        loads = {each.splits[0]: setting.load(0, each) for each in every if each.splits[0]}
        assert tuple(loads[name] for name in ("m", "k", "n")) == found


def test_a_plan_with_products_in_pieces_is_slower_and_checks() -> None:
    graph, degrees = planner.load_graph("llama3-8b", dims={"seq": 4096}), planner.Degrees(tensor=8)
    overlapped, found = planner.load_stack("overlapped"), []
    for stack in (dataclasses.replace(overlapped, product_pieces=1), overlapped):
        machine = planner.load_cluster("dgx-h100", nodes=1, stack=stack)
        plan = planner.predict(graph, machine, planner.Job(8), degrees, fewest_weights=True)
        assert planner.check_plan(plan.plan, graph, machine).findings == ()
        found.append(plan.iteration_s)
    assert found[0] < found[1]


def test_rows_travel_once_along_expert_axes_of_such_stacks() -> None:
    once = dataclasses.replace(planner.load_stack("megatron-2025"), rows_once=True)
    nodes = [planner.load_cluster("dgx-h100", nodes=4, stack=stack) for stack in ("megatron-2025", once)]
    sizes = {"expert": 16, "tensor": 2}
    plain, single = (mesh_on(cluster, sizes, copies=8) for cluster in nodes)
    payload = 1e12  # so large that latencies do not count
    each = {kind: plain.seconds(kind, (0,), payload) for kind in (Collective.ALL_TO_ALL, Collective.ALL_GATHER)}
    # Four ranks of the axis on each of four nodes: of eight copies 4 (1 - (3/4)^8) = 3.5996 nodes receive one.
    assert single.seconds(Collective.ALL_TO_ALL, (0,), payload) == pytest.approx(
        3.5996 / 8 * each[Collective.ALL_TO_ALL], rel=1e-4
    )
    assert single.seconds(Collective.ALL_GATHER, (0,), payload) == each[Collective.ALL_GATHER]
    assert single.seconds(Collective.ALL_TO_ALL, (1,), payload) == plain.seconds(Collective.ALL_TO_ALL, (1,), payload)


def test_a_mixture_whose_rows_travel_once_is_faster_and_checks() -> None:
    graph, degrees = planner.load_graph("mixtral-8x7b", dims={"seq": 512}), planner.Degrees(expert=8, data=8)
    found = []
    for rows_once in (False, True):
        stack = dataclasses.replace(planner.load_stack("megatron-2025"), rows_once=rows_once)
        cluster = planner.load_cluster("dgx-h200", stack=stack)
        plan = planner.predict(graph, cluster, planner.Job(64), degrees).plan
        found.append(sum(b.figures.communication_s for b in plan.shardings[0].blocks))
        assert planner.check_plan(plan, graph, cluster).findings == ()
    each_s, once_s = found
    # Two experts of each row on eight devices: 8 (1 - (7/8)^2) / 2 = 0.9375 of the bytes, and all of the latency.
    assert 0.9375 * each_s < once_s < 0.99 * each_s

"""Models that no device holds, over sixteen devices of 80 GB with Adam: recommenders' tables, mixtures' experts."""

from __future__ import annotations

import pytest

from planner.api import load_graph as load_bundled
from planner.bundled import build_bundled
from planner.costs import profile
from planner.errors import InfeasibleError
from planner.graph import Graph, build_chain
from planner.hardware import Collective, load_cluster
from planner.importers import graph_from_proto, load_graph
from planner.sharding import (
    BoundaryLayout,
    Setting,
    WeightChoice,
    collective_uses,
    inner_costs,
    layout_text,
    mesh_on,
    sharded_costs,
)
from planner.sharding.searches import get
from tests.shared_data import shared_path

MEMORY = 80e9


def _load(name: str, axes: dict[str, int]) -> tuple[Graph, Setting]:
    graph = load_graph(shared_path(f"onnx/{name}.onnx"))
    cluster = load_cluster("dgx-a100", nodes=2)
    prices = profile(graph, cluster.devices[0])
    mesh = mesh_on(cluster, axes)
    return graph, Setting(graph, mesh, forward_s=prices.forward_s, backward_s=prices.backward_s, saved=prices.saved)


@pytest.mark.parametrize("axes", [{"all": 16}, {"node": 2, "local": 8}], ids=["16", "2x8"])
def test_dlrm_fits_sixteen_devices(axes: dict[str, int]) -> None:
    """24 billion parameters at 16 bytes: 384 GB; whole tables would take 82 GB each on every device."""
    graph, setting = _load("dlrm", axes)
    assert 380e9 < 16 * graph.parameter_count() < 390e9
    answer = get("gshard")(setting, memory_bytes=MEMORY)
    assert answer.verdict.violations == []
    assert answer.verdict.memory_bytes <= MEMORY
    assert answer.verdict.weight_bytes >= 16 * graph.parameter_count() / 16
    large = [p.name for p in graph.parameters if p.elements > 1e9]
    for name in large:
        rest = answer.decision[name]
        assert isinstance(rest, WeightChoice)
        assert "S" in layout_text(rest.weight), f"{name} is cut"


def test_dlrm_on_one_device_is_refused() -> None:
    _, setting = _load("dlrm", {"all": 1})
    with pytest.raises(InfeasibleError, match="fits"):
        get("gshard")(setting, memory_bytes=MEMORY)


def test_mixtral_fits_sixteen_devices() -> None:
    """46.7 billion parameters at 16 bytes: 747 GB."""
    graph, setting = _load("mixtral_8x7b_batched", {"node": 2, "local": 8})
    assert graph.parameter_count() == 46_702_792_704
    answer = get("gshard")(setting, memory_bytes=MEMORY)
    assert answer.verdict.violations == []
    assert answer.verdict.memory_bytes <= MEMORY
    experts = [
        c for n, c in answer.decision.items() if isinstance(c, WeightChoice) and len(graph.tensors[n].shape) == 3
    ]
    assert len(experts) >= 32
    assert all("S" in layout_text(c.weight) for c in experts)


def test_blocks_of_gshard_over_64_devices_are_expert_parallel() -> None:
    """12 layers, 6 with 128 experts; a group of 1,024 tokens a device, 16 places an expert: 128 x 16 x 1,024 in bf16.

    Dispatch, combine and their gradients send 63/64 of that, four times a layer; each device holds two experts a layer.
    """
    graph = graph_from_proto(build_bundled("gshard-12.5b", batch=64, seq=1024), name="gshard")
    cluster = load_cluster("dgx-a100", nodes=8)
    mesh = mesh_on(cluster, {"experts": 64})
    costs = inner_costs(build_chain(graph), profile(graph, cluster.devices[0]), Setting(graph, mesh))
    assert costs.solved <= 8 < len(costs.blocks)
    best = sharded_costs(costs)[0]
    assert best.boundaries == (BoundaryLayout.BATCH,)
    sent = 128 * 16 * 1024 * 2 * 63 / 64
    phases: list[str] = []
    for block, point in zip(costs.blocks, best.points, strict=True):
        named = block.named(point)
        for name, choice in named.decision.items():
            if isinstance(choice, WeightChoice) and graph.tensors[name].shape[0] == 128:
                assert layout_text(choice.weight) == "S0", name
        uses = collective_uses(Setting(graph, mesh), named.decision, named.communication)
        phases += [u.phase for u in uses if u.kind is Collective.ALL_TO_ALL and u.sent_bytes == pytest.approx(sent)]
    assert phases.count("forward") >= 12
    assert phases.count("backward") >= 12
    experts = 6 * 128 * 2 * 1024 * 8192
    tied_twice = 32000 * 1024
    assert best.parameter_elements.sum() <= experts / 64 + (graph.parameter_count() - experts) + tied_twice


def test_experts_of_mixtral_are_dealt_to_eight_ranks() -> None:
    """Each rank holds one of eight experts of every layer; places travel to their experts and back.

    A sample of 4,096 tokens fills 8 x 1,024 places of 4,096 numbers in bf16; a rank sends 7/8 of its eighth of them,
    four times: to the experts, back, and the gradients of both.
    """
    graph = load_bundled("mixtral-8x7b")
    cluster = load_cluster("dgx-h100", nodes=1)
    prices = profile(graph, cluster.devices[0])
    costs = inner_costs(build_chain(graph), prices, Setting(graph, mesh_on(cluster, {"tensor": 8})))
    block = next(b for b in costs.blocks if any("experts" in n for n in b.points[BoundaryLayout.SEQUENCE,][0].decision))
    fastest = block.named(block.points[BoundaryLayout.SEQUENCE,][0])
    experts = {name: part for name, part in fastest.weights if len(graph.tensors[name].shape) == 3}
    assert [graph.tensors[name].shape for name in experts] == [(8, 4096, 28672), (8, 14336, 4096)]
    assert set(experts.values()) == {1 / 8}
    assert {layout_text(fastest.decision[name].weight) for name in experts} == {"S0"}
    places = [c for c in fastest.communication if c.tensor.endswith(("mlp.gathernd", "experts.reshape_3"))]
    moves = [step for c in places for step in c.steps]
    assert {step.collective for step in moves} == {Collective.ALL_TO_ALL}
    assert [step.sent_bytes for step in moves] == [7 / 8 * 8 * 1024 * 4096 * 2 / 8] * 4

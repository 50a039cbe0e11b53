"""Names of dimensions: fused projections go by their pieces, and what an operator takes a window of by two names."""

from __future__ import annotations

from planner import load_graph
from planner.costs import profile
from planner.graph import Graph
from planner.hardware import load_cluster
from planner.operators import graph_specs
from planner.sharding import Setting, WeightChoice, ideal_mesh, layout_text
from planner.sharding.searches import get
from planner.sharding.searches.mesh_tensorflow import NamedDims, named_dims


def named(graph: Graph) -> NamedDims:
    return named_dims(graph, range(len(graph.nodes)), graph_specs(graph))


def test_a_fused_projection_goes_by_its_pieces() -> None:
    """[768, 3 x 768]: queries, keys and values side by side, each of 12 heads; the output projection reads heads."""
    graph = load_graph("gpt2")
    found = named(graph)
    fused = "transformer.h.0.attn.c_attn.weight"
    back = "transformer.h.0.attn.c_proj.weight"
    heads = found.of[fused, 1]
    assert found.blocks[fused, 1] == 3
    assert found.of[back, 0] == heads
    assert (back, 0) not in found.blocks
    assert found.sizes[heads] == 12


def test_gate_and_up_projection_of_experts_are_cut_alike() -> None:
    graph = load_graph("mixtral-8x7b")
    found = named(graph)
    both, down = "model.layers.0.mlp.experts.transpose_1", "model.layers.0.mlp.experts.transpose_2"
    assert graph.tensors[both].shape == (8, 4096, 2 * 14336)
    assert found.of[both, 2] == found.of[down, 1]
    assert found.blocks[both, 2] == 2
    assert found.sizes[found.of[both, 2]] == 14336


def test_a_window_does_not_keep_experts_from_being_cut() -> None:
    """The router's list has a last place for what no expert takes, which a slice drops: 8 x 1024 + 1 places."""
    graph = load_graph("mixtral-8x7b")
    found = named(graph)
    (node,) = [n for n in graph.nodes if n.key == "model.layers.0.mlp.slice"]
    before, after = node.inputs[0], node.outputs[0]
    assert graph.tensors[before].shape[1] == graph.tensors[after].shape[1] + 1
    assert found.of[before, 1] != found.of[after, 1]
    assert found.of[after, 1] == found.of["model.layers.0.mlp.experts.transpose_1", 0]


def test_mesh_tensorflow_cuts_heads_of_a_fused_projection_where_memory_asks_for_it() -> None:
    """GPT-2 with Adam: 163 M weight elements (the tied one twice) of 16 bytes, 2.6 GB whole; in 2 GB some are cut."""
    graph = load_graph("gpt2")
    prices = profile(graph, load_cluster("dgx-a100").devices[0])
    setting = Setting(
        graph,
        ideal_mesh({"x": 4}),
        forward_s=prices.forward_s,
        backward_s=prices.backward_s,
        saved=prices.saved,
        micro_batches=8,
        sharded_states=False,
        work_s=prices.at,
    )
    answer = get("mesh-tensorflow")(setting, memory_bytes=2e9)
    assert answer.verdict.violations == []
    assert answer.verdict.memory_bytes <= 2e9
    weights = {name: layout_text(c.weight) for name, c in answer.decision.items() if isinstance(c, WeightChoice)}
    fused = {name: text for name, text in weights.items() if name.endswith("c_attn.weight")}
    assert len(fused) == 12
    assert set(fused.values()) == {"S1~3"}

"""Contraction of graphs to chains."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph import (
    Graph,
    blocks,
    build_chain,
    crossing_bytes,
    depth_first_order,
    layer_of,
    side_nodes,
    structural_hash,
)
from tests.graph import make_graph


def keys(graph: Graph, nodes: tuple[int, ...]) -> list[str]:
    return [graph.nodes[i].key for i in nodes]


def residual_stack(layers: int) -> Graph:
    lines = ["[embed] h0 = Gather(x, w_e)"]
    for i in range(layers):
        lines += [
            f"[layers.{i}.a] a{i} = MatMul(h{i}, wa{i})",
            f"[layers.{i}.b] b{i} = MatMul(a{i}, wb{i})",
            f"[layers.{i}] h{i + 1} = Add(h{i}, b{i})",
        ]
    return make_graph([*lines, f"[head] y = MatMul(h{layers}, w_h)"])


def test_residual_layers_become_blocks_and_equal_layers_hash_equal() -> None:
    chain = build_chain(residual_stack(3))
    assert [b.name for b in chain.blocks] == ["embed", "layers.0", "layers.1", "layers.2", "head"]
    assert chain.crossing == ((), ("h0",), ("h1",), ("h2",), ("h3",), ())
    signatures = [b.signature for b in chain.blocks]
    assert signatures[1] == signatures[2] == signatures[3]
    assert len(set(signatures)) == 3


def test_a_mask_read_by_every_layer_is_duplicated_and_crosses_nothing() -> None:
    graph = make_graph(
        [
            "mask = Trilu(x)",
            "[l.0] a = MatMul(x, w0)",
            "[l.0] b = Add(a, mask)",
            "[l.1] c = MatMul(b, w1)",
            "[l.1] d = Add(c, mask)",
        ]
    )
    chain = build_chain(graph)
    assert keys(graph, chain.duplicated) == ["mask"]
    assert [keys(graph, b.side) for b in chain.blocks] == [["mask"], ["mask"]]
    assert [keys(graph, again) for again in chain.repeats] == [[], ["mask"]]
    assert chain.crossing == ((), ("b",), ())


def test_an_encoder_output_read_by_three_layers_does_not_stop_cuts_but_crosses_them() -> None:
    graph = make_graph(
        [
            "[enc] e = MatMul(x, we)",
            "[dec.0] a0 = MatMul(x, w0)",
            "[dec.0] h0 = Add(a0, e)",
            "[dec.1] a1 = MatMul(h0, w1)",
            "[dec.1] h1 = Add(a1, e)",
            "[dec.2] a2 = MatMul(h1, w2)",
            "[dec.2] h2 = Add(a2, e)",
        ]
    )
    chain = build_chain(graph)
    assert [b.name for b in chain.blocks] == ["enc", "dec.0", "dec.1", "dec.2"]
    assert [set(c) for c in chain.crossing] == [set(), {"e"}, {"e", "h0"}, {"e", "h1"}, set()]


def test_between_two_weights_the_cut_takes_the_smallest_tensor_and_the_latest_of_equals() -> None:
    graph = make_graph(
        [
            "[l.0] a = Conv(x, w0) #100",
            "[l.0] r = Relu(a) #100",
            "[l.0] p = MaxPool(r) #25",
            "[l.0] q = Relu(p) #25",
            "[l.1] y = Conv(q, w1) #100",
        ]
    )
    assert build_chain(graph).crossing == ((), ("q",), ())


def test_too_many_blocks_are_merged_to_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_BLOCKS", 12)
    lines = ["[l.0] h0 = MatMul(x, w0)"]
    for i in range(1, 40):
        lines.append(f"[l.{i // 4}] h{i} = MatMul(h{i - 1}, w{i})")
    chain = build_chain(make_graph(lines))
    assert [b.name for b in chain.blocks] == [f"l.{i}" for i in range(10)]


def test_layer_of_takes_the_path_up_to_its_first_number() -> None:
    cases = {
        "model.layers.7.mlp.experts.3": "model.layers.7",
        "transformer.h.0.attn": "transformer.h.0",
        "features.12": "features.12",
        "m.layer1.0.conv1": "m.layer1.0",
        "lm_head": "lm_head",
        "": "",
    }
    assert {path: layer_of(path) for path in cases} == cases


def test_structural_hash_sees_wiring_and_attributes_not_names() -> None:
    one = make_graph(["a = MatMul(x, w0)", "b = Sub(a, x)"])
    other_names = make_graph(["u = MatMul(x, w9)", "v = Sub(u, x)"])
    swapped = make_graph(["a = MatMul(x, w0)", "b = Sub(x, a)"])
    assert structural_hash(one, [0, 1]) == structural_hash(other_names, [0, 1])
    assert structural_hash(one, [0, 1]) != structural_hash(swapped, [0, 1])


@st.composite
def random_graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(2, 14))
    lines = []
    for i in range(count):
        reads = [f"t{j}" for j in range(i) if draw(st.integers(0, 3)) == 0] or (["x"] if i == 0 else [f"t{i - 1}"])
        weight = [f"w{i}"] if i == 0 or draw(st.booleans()) else []
        lines.append(f"[l.{i // 2}] t{i} = Op({', '.join(reads + weight)}) #{draw(st.integers(1, 50))}")
    return make_graph(lines)


@settings(max_examples=150, deadline=None)
@given(random_graphs())
def test_chains_hold_every_node_once_and_never_point_backwards(graph: Graph) -> None:
    chain = build_chain(graph)
    placed = [i for b in chain.blocks for i in b.nodes]
    side = side_nodes(graph)
    assert sorted(placed) == [i for i in range(len(graph.nodes)) if not side[i]]
    block_of = {i: b for b, block in enumerate(chain.blocks) for i in block.nodes}
    for boundary in range(len(chain.blocks) + 1):
        expected = {
            out
            for i in placed
            if block_of[i] < boundary
            for out in graph.nodes[i].outputs
            if any(block_of.get(r, -1) >= boundary for r in graph.consumers.get(out, ()))
        }
        assert set(chain.crossing[boundary]) == expected
    for a, b in graph.edges:
        if a in block_of and b in block_of:
            assert block_of[a] <= block_of[b]


@settings(max_examples=150, deadline=None)
@given(random_graphs())
def test_depth_first_order_is_topological_by_an_independent_check(graph: Graph) -> None:
    order = depth_first_order(graph, range(len(graph.nodes)))
    oracle = nx.DiGraph([(int(a), int(b)) for a, b in graph.edges])
    position = {node: at for at, node in enumerate(order)}
    assert sorted(order) == list(range(len(graph.nodes)))
    assert all(position[a] < position[b] for a, b in oracle.edges)
    assert crossing_bytes(graph, order)[0] == crossing_bytes(graph, order)[-1] == 0


def test_a_long_line_without_modules_is_many_blocks_of_few_kinds() -> None:
    lines = ["h0 = MatMul(x, w)"]
    for i in range(1000):
        lines += [f"m{i} = MatMul(h{i}, w{i})", f"h{i + 1} = Relu(m{i})"]
    chain = build_chain(make_graph(lines))
    assert 80 < len(chain.blocks) <= 160
    assert len({block.signature for block in chain.blocks}) <= 3


def test_sums_over_boundaries_are_those_of_the_tensors_that_cross() -> None:
    lines = [f"p{i} = MatMul(x, w{i}) #{i + 1}" for i in range(400)]
    chain = build_chain(make_graph([*lines, f"y = Sum({', '.join(f'p{i}' for i in range(400))})"]))
    sizes = {f"p{i}": float(i + 1) for i in range(400)}
    assert len(chain.blocks) > 50
    assert chain.boundary_sums(sizes).tolist() == [sum(sizes[name] for name in names) for names in chain.crossing]
    assert max(map(len, chain.crossing)) > 300

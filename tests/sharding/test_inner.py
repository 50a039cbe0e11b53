"""Blocks sharded one by one: points legal and undominated, blocks fit together, equal ones are solved once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from planner.costs import precision, profile
from planner.graph import Chain, ChainBlock, Graph, build_chain
from planner.hardware import load_cluster
from planner.importers import load_graph
from planner.sharding import (
    BoundaryLayout,
    InnerCache,
    InnerCosts,
    NodePrices,
    Options,
    Setting,
    Strategy,
    TensorChoice,
    WeightChoice,
    canonical_layout,
    evaluate,
    ideal_mesh,
    inner_costs,
    layout_text,
    mesh_on,
    sharded_costs,
)
from planner.sharding.resting import variants
from planner.space.blocks import block_costs, checkpoint_table, range_sums, range_table, wire_bytes
from planner.space.sharded import sharded_block_costs
from tests.operators.calls import node, tensor
from tests.sharding.graphs import attention_block
from tests.shared_data import shared_path

REPLICATED, SEQUENCE, BATCH = BoundaryLayout.REPLICATED, BoundaryLayout.SEQUENCE, BoundaryLayout.BATCH


def _one_block(work_s: float = 1e-3) -> tuple[Chain, Graph, NodePrices]:
    """A GPT block of width 4096 behind a scaling of its input, as a chain of two; only products take time."""
    block = attention_block(batch=1, steps=2048, width=4096, heads=32, inner=16384)
    first = replace(block.tensors["x"], name="x0")
    graph = replace(block, nodes=(node("Mul", "x0 g1", "x"), *block.nodes), tensors={**block.tensors, "x0": first})
    count = len(graph.nodes)
    blocks = (ChainBlock("scale", (0,), (), "scale"), ChainBlock("layer", tuple(range(1, count)), (), "layer"))
    chain = Chain(graph, blocks, ())
    times = np.array([work_s * (n.op in ("MatMul", "Attention")) for n in graph.nodes])
    prices = SimpleNamespace(
        micro_batch=1, forward_s=times, backward_s=2 * times, workspace_bytes=np.ones(count), saved=((),) * count,
        at=lambda share, pieces=1: (share * times, share * 2 * times),
    )  # fmt: skip
    return chain, graph, prices


@pytest.mark.parametrize(
    ("shape", "boundary", "expected"),
    [
        ("x 4 128 64", SEQUENCE, "S1"), ("x 4 128 64", BATCH, "S0"), ("x 4 128 64", REPLICATED, "R"),
        ("x 1 128 64", BATCH, "R"), ("x 4 197 64", SEQUENCE, "R"), ("x 8 64 28 28", SEQUENCE, "R"),
        ("x 128 64", SEQUENCE, "R"), ("x 128 64", BATCH, "S0"), ("x 64", BATCH, "R"),
    ],
)  # fmt: skip
def test_canonical_layouts_on_4_ranks(shape: str, boundary: BoundaryLayout, expected: str) -> None:
    assert layout_text(canonical_layout(tensor(shape), (boundary,), (4,))) == expected


def test_boundaries_that_do_not_differ_are_one() -> None:
    assert variants([tensor("x 1 128 64")], (REPLICATED, SEQUENCE, BATCH), (4,)) == ((REPLICATED,), (SEQUENCE,))
    assert variants([tensor("x 4 128 64")], (REPLICATED, SEQUENCE), (1,)) == ((REPLICATED,),)


def test_a_block_between_replicated_boundaries_sends_what_megatron_sends() -> None:
    """Four all-reduces of 1 x 2048 x 4096 elements in bf16 a layer, each sending 2 * 7/8 of it."""
    chain, graph, prices = _one_block()
    costs = inner_costs(chain, prices, Setting(graph, mesh_on(load_cluster("dgx-a100"), {"tensor": 8})))
    block = costs.blocks[1]
    fastest = block.points[REPLICATED,][0]
    assert fastest.sent_bytes == pytest.approx(4 * 2 * 7 / 8 * 2048 * 4096 * 2)
    assert fastest.checkpoint_bytes == 2048 * 4096 * 2
    lean = min(block.points[SEQUENCE,], key=lambda p: p.parameter_elements)
    assert lean.sent_bytes == pytest.approx(8 * 7 / 8 * 2048 * 4096 * 2, rel=1e-3), "eight gathers and scatters"
    assert lean.checkpoint_bytes == 2048 * 4096 * 2 / 8
    weights = 4 * 4096**2 + 2 * 4096 * 16384
    assert weights / 8 <= lean.parameter_elements <= weights / 8 + 4 * 4096
    splits = {k: s.splits for k, s in lean.decision.items() if isinstance(s, Strategy)}
    assert [splits[f"op:{k}"] for k in ("q0", "k0", "v0", "a", "o", "u", "d")] == [
        ("n",), ("n",), ("n",), ("g",), ("k",), ("n",), ("k",),
    ]  # fmt: skip


def test_points_are_legal_pinned_and_none_beats_another() -> None:
    chain, graph, prices = _one_block(1e-4)
    mesh = mesh_on(load_cluster("dgx-a100"), {"data": 2, "tensor": 4})
    costs = inner_costs(chain, prices, Setting(graph, mesh))
    assert set(costs.boundaries) == {(a, b) for a in (REPLICATED, SEQUENCE) for b in (REPLICATED, SEQUENCE)}
    setting = Setting(
        graph,
        mesh,
        costs.chain.blocks[1].nodes,
        prices.forward_s,
        prices.backward_s,
        prices.saved,
        sharded_states=False,
    )
    for boundary, points in costs.blocks[1].points.items():
        assert points
        for point in points:
            verdict = evaluate(setting, point.decision)
            assert verdict.violations == []
            assert point.forward_s + point.backward_s + point.step_s == pytest.approx(verdict.seconds)
            rest = point.decision["x"]
            assert isinstance(rest, TensorChoice)
            assert rest.value == rest.gradient == canonical_layout(graph.tensors["x"], boundary, mesh.sizes)
        for one in points:
            others = [p for p in points if p is not one]
            assert not any(all(a <= b for a, b in zip(p.figures, one.figures, strict=True)) for p in others)


def _real(name: str, ranks: tuple[int, ...], cache: InnerCache | None = None) -> tuple[InnerCosts, object]:
    graph = load_graph(shared_path(f"onnx/{name}.onnx"))
    cluster = load_cluster("dgx-a100", nodes=2)
    prices = profile(graph, cluster.devices[0])
    return inner_costs(build_chain(graph), prices, Setting(graph, mesh_on(cluster, ranks)), cache=cache), prices


@pytest.mark.parametrize("name", ["gpt2_124m_metadata", "vgg16"])
def test_on_one_rank_the_arrays_are_those_of_the_unsharded_blocks(name: str) -> None:
    costs, prices = _real(name, (1,))
    graph, chain, cluster = costs.graph, costs.chain, load_cluster("dgx-a100", nodes=2)
    plain = block_costs(chain, graph, [prices], cluster.devices[:1], precision("bf16"), "adam")  # type: ignore[list-item]
    (one,) = sharded_costs(costs)
    np.testing.assert_allclose(one.forward_s, plain.forward_s[0])
    np.testing.assert_allclose(one.backward_s, plain.backward_s[0])
    np.testing.assert_allclose(one.parameter_elements, plain.parameter_elements)
    sent = sharded_block_costs(costs, one, 0.0, 1)
    np.testing.assert_allclose(sent.boundary_bytes, plain.boundary_bytes)
    np.testing.assert_allclose(sent.gradient_boundary_bytes, plain.gradient_boundary_bytes)
    np.testing.assert_allclose(one.workspace_bytes, plain.workspace_bytes)
    assert not one.communication_s.any()
    sizes = {name: wire_bytes(graph, name, precision("bf16")) for name in chain.crossing_tensors}
    checkpoints = checkpoint_table(chain, sizes, np.arange(len(chain.blocks)))  # of blocks, not of layers
    points = [block.named(point) for block, point in zip(costs.blocks, one.points, strict=True)]
    saved, inputs = [point.saved for point in points], [point.checkpoints for point in points]
    for table, data in ((plain.saved_bytes, saved), (checkpoints, inputs)):
        users: dict[str, tuple[float, list[int]]] = {}
        for b, each in enumerate(data):
            for storage, size in each:
                users.setdefault(storage, (size, []))[1].append(b)
        np.testing.assert_allclose(range_sums(*range_table(users.values(), len(chain.blocks))), table)


def test_equal_blocks_are_solved_once_and_decisions_carry_their_own_names() -> None:
    cache = InnerCache()
    costs, _ = _real("gpt2_124m_metadata", (4,), cache)
    assert costs.solved <= 7 < len(costs.blocks)
    for block in costs.blocks:
        own = {costs.graph.nodes[i].key for i in costs.chain.blocks[block.block].nodes}
        side = {costs.graph.nodes[i].key for i in costs.chain.blocks[block.block].side}
        for points in block.points.values():
            decision = block.named(points[0]).decision
            assert {name[3:] for name in decision if name.startswith("op:")} == own | side
    again = inner_costs(
        costs.chain, _real("gpt2_124m_metadata", (4,))[1], Setting(costs.graph, costs.mesh), cache=cache
    )  # type: ignore[arg-type]
    assert again.solved == 0


def test_a_chain_joined_from_blocks_is_legal_and_costs_their_sum() -> None:
    costs, prices = _real("vgg16", (4,))
    setting = Setting(costs.graph, costs.mesh, forward_s=prices.forward_s, backward_s=prices.backward_s,  # type: ignore[attr-defined]
                      saved=prices.saved, sharded_states=False, work_s=prices.at)  # type: ignore[attr-defined]  # fmt: skip
    found = sharded_costs(costs)
    assert {v.boundaries for v in found} <= {(REPLICATED,), (BATCH,)}
    assert found
    for variant in found:
        joined: dict[str, Strategy | TensorChoice | WeightChoice] = {}
        for block, point in zip(costs.blocks, variant.points, strict=True):
            for name, choice in block.named(point).decision.items():
                assert joined.setdefault(name, choice) == choice, f"{name}: two blocks disagree"
        verdict = evaluate(setting, joined)
        assert verdict.violations == []
        total = variant.forward_s.sum() + variant.backward_s.sum() + variant.step_s.sum()
        assert verdict.seconds == pytest.approx(total)


def test_more_ranks_hold_less_and_sequence_boundaries_keep_least() -> None:
    whole = sharded_costs(_real("gpt2_124m_metadata", (1,))[0])[0]
    costs, prices = _real("gpt2_124m_metadata", (8,))
    found = sharded_costs(costs)
    plain = Setting(costs.graph, costs.mesh)
    whole_ends = sharded_costs(inner_costs(costs.chain, prices, plain, boundaries=(REPLICATED,)))  # type: ignore[arg-type]
    assert {v.boundaries for v in whole_ends} == {(REPLICATED,)}
    least = min(v.saved_bytes.sum() for v in found)
    assert least < min(v.saved_bytes.sum() for v in whole_ends)
    assert least < whole.saved_bytes.sum() / 6
    assert min(found, key=lambda v: v.saved_bytes.sum()).boundaries == (SEQUENCE,)
    # 12 heads do not divide by 8, 124 million weights do but for norms, biases and an odd vocabulary
    assert min(v.parameter_elements.sum() for v in found) < whole.parameter_elements.sum()


def test_only_allowed_boundaries_are_used() -> None:
    chain, graph, prices = _one_block()
    costs = inner_costs(chain, prices, Setting(graph, ideal_mesh((8,))), boundaries=(REPLICATED,))
    assert costs.boundaries == ((REPLICATED,),)


def test_padding_lets_uneven_blocks_be_cut() -> None:
    """197 steps on 8 ranks: 25 each, three of them padding; without padding the steps cannot be a boundary's cut."""
    graph = load_graph(shared_path("onnx/vit_s16.onnx"))
    cluster = load_cluster("dgx-a100")
    chain, prices, mesh = build_chain(graph), profile(graph, cluster.devices[0]), mesh_on(cluster, (8,))
    even = inner_costs(chain, prices, Setting(graph, mesh))
    assert even.boundaries == ((REPLICATED,), (BATCH,))
    padded = Setting(graph, mesh, options=Options(padded=True))
    costs = inner_costs(chain, prices, padded, boundaries=(SEQUENCE,))
    assert costs.boundaries == ((SEQUENCE,),)
    variant = sharded_costs(costs)[0]
    middle = len(chain.blocks) // 2
    assert sharded_block_costs(costs, variant, 0.0, 1).boundary_bytes[middle] == 8 * 25 * 384 * 2

"""Splits ruled out by the user: none of them is used, and patterns that mean nothing are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.errors import InfeasibleError
from planner.graph import Graph
from planner.sharding import (
    GraphFacts,
    Options,
    Setting,
    Strategy,
    evaluate,
    formulate,
    ideal_mesh,
    inner_costs,
    unmatched,
)
from planner.sharding.inner_points import BlockView
from planner.sharding.searches import get
from tests.sharding.graphs import attention_block
from tests.sharding.test_inner import _one_block


def _named() -> Graph:
    """The block with its products in modules."""
    block = attention_block()
    modules = {"q0": "layers.0.attn.q", "k0": "layers.0.attn.k", "v0": "layers.0.attn.v", "u": "layers.0.mlp.up"}
    nodes = tuple(replace(n, module=modules.get(n.key, ""), name=f"node_{n.key}") for n in block.nodes)
    return replace(block, nodes=nodes)


def _splits(forbidden: tuple[str, ...]) -> dict[str, set[str]]:
    """By operator, all dimensions that some strategy cuts."""
    problem = formulate(Setting(_named(), ideal_mesh((4,)), forbidden=forbidden))
    return {
        name[3:]: {s.splits[0] for s in choices if isinstance(s, Strategy)}
        for name, choices in zip(problem.names, problem.choices, strict=True)
        if name.startswith("op:")
    }


def test_by_type_name_and_module() -> None:
    free = _splits(())
    assert free["q0"] == free["u"] == {"", "b0", "m", "n", "k"}
    assert _splits(("MatMul:k",))["d"] == {"", "b0", "m", "n"}
    only = _splits(("layers.0.attn:n", "node_u:m", "d:[nk]"))
    assert only["q0"] == only["k0"] == {"", "b0", "m", "k"}
    assert only["u"] == {"", "b0", "n", "k"}
    assert only["d"] == {"", "b0", "m"}
    assert only["o"] == free["o"]
    assert _splits(("layers.?.attn.q:*",))["q0"] == {""}


def test_by_dimension_of_the_result() -> None:
    assert _splits(("u:-1",))["u"] == {"", "b0", "m", "k"}
    assert _splits(("u:2",))["u"] == {"", "b0", "m", "k"}
    assert _splits(("u:0",))["u"] == {"", "m", "n", "k"}
    assert "ring" in _splits(())["a"]
    assert _splits(("Attention:ring",))["a"] == _splits(())["a"] - {"ring"}


def test_the_judge_refuses_what_is_forbidden() -> None:
    graph, mesh = _named(), ideal_mesh((4,))
    problem = formulate(Setting(graph, mesh))
    decision = problem.decision([
        next((k for k, c in enumerate(choices) if isinstance(c, Strategy) and c.splits == ("m",)), 0)
        for choices in problem.choices
    ])  # fmt: skip
    assert not any("forbidden" in v for v in evaluate(Setting(graph, mesh), decision).violations)
    found = evaluate(Setting(graph, mesh, forbidden=("layers.0.mlp*:m",)), decision).violations
    assert [v for v in found if "forbidden" in v] == ["u is split as [m] S1, R -> S1, which is forbidden"]


@pytest.mark.parametrize("search", ["gshard", "mesh-tensorflow", "mesh-tensorflow-memory", "tofu", "leanest"])
def test_every_search_keeps_away_from_what_is_forbidden(search: str) -> None:
    one = Setting(_named(), ideal_mesh((4,)), forbidden=("MatMul:n", "layers.0.mlp*:*"))
    answer = get(search)(one)
    assert answer.verdict.violations == []
    splits = {name: c.splits for name, c in answer.decision.items() if isinstance(c, Strategy)}
    assert splits["op:u"] == ("",)
    assert all("n" not in splits[f"op:{k}"] for k in ("q0", "k0", "v0", "o", "d"))


def test_an_operator_left_no_way_to_run_is_named() -> None:
    options = Options(replicate=False, partial=False)
    with pytest.raises(InfeasibleError, match="node_q0: all ways to run the operator are forbidden"):
        formulate(Setting(_named(), ideal_mesh((4,)), options=options, forbidden=("q0:*",)))


def test_blocks_are_sharded_without_them() -> None:
    chain, graph, prices = _one_block()
    costs = inner_costs(chain, prices, Setting(graph, ideal_mesh((8,)), forbidden=("MatMul:k", "MatMul:n")))
    for points in costs.blocks[1].points.values():
        for point in points:
            products = [point.decision[f"op:{k}"] for k in ("q0", "k0", "v0", "o", "u", "d")]
            assert not any(set(s.splits) & {"n", "k"} for s in products if isinstance(s, Strategy))


def test_blocks_that_differ_by_what_is_forbidden_are_not_alike() -> None:
    chain, graph, prices = _one_block()
    setting = Setting(graph, ideal_mesh((8,)), saved=prices.saved)
    free, bound = (GraphFacts.of(each) for each in (setting, replace(setting, forbidden=("u:n",))))
    keys = [BlockView.of(chain, graph, 1, facts).key(chain.blocks[1], graph, facts, {}) for facts in (free, bound)]
    assert keys[0] != keys[1]


def test_patterns_that_rule_nothing_out_are_named() -> None:
    graph = _named()
    assert unmatched(graph, ["MatMul:k", "layers.0.attn*:n", "u:-1", "Attention:ring"]) == ()
    found = unmatched(graph, ["Matmul:k", "layers.0.atn:n", "MatMul:heads", "MatMul", "u:3"])
    assert [p.where for p in found] == ["Matmul:k", "layers.0.atn:n", "MatMul:heads", "MatMul", "u:3"]
    assert found[0].hint.startswith("did you mean 'MatMul'")
    assert "did you mean 'layers.0.attn'" in found[1].hint
    assert found[2].message == "none of its 6 operators can be split so"
    assert found[2].hint == "known: b0, k, m, n, or the number of a dimension of the result"
    assert found[3].message == "a split to forbid has two sides"

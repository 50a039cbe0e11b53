"""The search of one block: all boundaries at once find what each alone finds, and tied axes still give legal points."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from planner.hardware import load_cluster
from planner.sharding import (
    Boundaries,
    BoundaryLayout,
    GraphFacts,
    Mesh,
    Setting,
    Strategy,
    block_search,
    evaluate,
    ideal_mesh,
    inner_costs,
    mesh_on,
)
from planner.sharding.block_search import BlockPoints
from planner.sharding.elimination import minimise
from planner.sharding.inner import seconds_key
from planner.sharding.inner_points import BlockProblem, BlockView
from tests.sharding.graphs import products
from tests.sharding.test_inner import _one_block

REPLICATED, SEQUENCE = BoundaryLayout.REPLICATED, BoundaryLayout.SEQUENCE


def _problem(mesh: Mesh) -> BlockProblem:
    chain, graph, prices = _one_block(1e-4)
    setting = Setting(
        graph, mesh, chain.blocks[1].nodes, prices.forward_s, prices.backward_s, prices.saved, sharded_states=False
    )
    facts = GraphFacts.of(setting)
    return BlockProblem(setting, facts, BlockView.of(chain, graph, 1, facts), prices.workspace_bytes)


def _alone_s(block: BlockProblem, boundary: Boundaries) -> float:
    """The least time with the boundary tensors pinned one by one."""
    pinned = block.free.restricted(block.ends_under([boundary]))
    return minimise(pinned.sizes, pinned.factors())[0]


@pytest.mark.parametrize("ranks", [{"tensor": 8}, {"data": 2, "tensor": 4}])
def test_all_boundaries_at_once_find_what_each_finds_alone(ranks: dict[str, int]) -> None:
    block = _problem(mesh_on(load_cluster("dgx-a100"), ranks))
    boundaries = tuple({(a,) * len(ranks) for a in (REPLICATED, SEQUENCE)} | {(REPLICATED, SEQUENCE)[: len(ranks)]})
    found = BlockPoints(block, boundaries)
    assert found.tied == ()
    for boundary in boundaries:
        least = _alone_s(block, boundary)
        assert found.least_s(boundary) == pytest.approx(least)
        fastest = min(p.forward_s + p.backward_s + p.step_s for p in found[boundary])
        assert fastest == pytest.approx(least)


def test_axes_are_tied_where_tables_would_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points still legal; every operator does the same on both axes, as on one axis of 8 ranks; no faster than free."""
    mesh = mesh_on(load_cluster("dgx-a100"), {"data": 2, "tensor": 4})
    free = BlockPoints(_problem(mesh), [(REPLICATED, SEQUENCE)])
    monkeypatch.setattr(block_search, "LIMIT", 50_000)
    block = _problem(mesh)
    tied = BlockPoints(block, [(REPLICATED, SEQUENCE)])
    assert tied.tied == (0, 1)
    for point in tied[REPLICATED, SEQUENCE]:
        assert evaluate(block.setting, point.decision).violations == []
        chosen = [c for c in point.decision.values() if isinstance(c, Strategy)]
        assert all(len(set(c.splits)) == 1 for c in chosen)
    assert tied.least_s((REPLICATED, SEQUENCE)) >= free.least_s((REPLICATED, SEQUENCE))


def test_a_block_is_left_whole_where_nothing_else_can_be_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points still legal, and every rank runs all operators; a block that even so is too large has none."""
    monkeypatch.setattr(block_search, "LIMIT", 1_000)
    block = _problem(mesh_on(load_cluster("dgx-a100"), {"tensor": 8}))
    found = BlockPoints(block, [(REPLICATED,), (SEQUENCE,)])
    assert found.uncut
    for boundary in ((REPLICATED,), (SEQUENCE,)):
        for point in found[boundary]:
            assert evaluate(block.setting, point.decision).violations == []
            assert not any(any(c.splits) for c in point.decision.values() if isinstance(c, Strategy))
    monkeypatch.setattr(block_search, "LIMIT", 1)
    unsolved = BlockPoints(block, [(REPLICATED,)])
    assert unsolved.unsolved
    assert unsolved.least_s((REPLICATED,)) == np.inf
    assert unsolved[REPLICATED,] == ()


def test_what_is_given_up_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, graph, prices = _one_block(1e-4)
    mesh = mesh_on(load_cluster("dgx-a100"), {"data": 2, "tensor": 4})
    assert inner_costs(chain, prices, Setting(graph, mesh)).given_up == ()
    monkeypatch.setattr(block_search, "LIMIT", 50_000)
    assert inner_costs(chain, prices, Setting(graph, mesh)).given_up == (
        "layouts of 1 blocks (layer, ...) that treat the mesh axes data and tensor differently",
    )
    monkeypatch.setattr(block_search, "LIMIT", 1)
    assert inner_costs(chain, prices, Setting(graph, mesh)).given_up == (
        "2x4 ranks (scale needs too large tables there)",
    )


def test_nodes_alike_whole_but_not_in_parts_are_told_apart() -> None:
    """Both take 1 s and 2 s whole; an eighth of the first takes an eighth, of the second half (it is launch-bound)."""
    graph = products([8, 8, 8])
    whole = np.array([1.0, 1.0])

    def work_s(share: float, pieces: int = 1, /) -> tuple[np.ndarray, np.ndarray]:
        part = np.array([share, max(share, 0.5)])
        return part, 2 * part

    setting = Setting(graph, ideal_mesh((8,)), forward_s=whole, backward_s=2 * whole, work_s=work_s)

    def equal(*shares: float) -> bool:
        first, second = (seconds_key(setting, [node], [(share, 1) for share in shares]) for node in (0, 1))
        return first == second

    assert equal(1.0)
    assert not equal(1.0, 0.125)
    assert equal(0.5)


def test_where_parts_gain_nothing_nothing_is_cut() -> None:
    chain, graph, prices = _one_block()
    stubborn = SimpleNamespace(**{**vars(prices), "at": lambda share, pieces=1: (prices.forward_s, prices.backward_s)})
    mesh = mesh_on(load_cluster("dgx-a100"), {"tensor": 8})
    point = inner_costs(chain, stubborn, Setting(graph, mesh)).blocks[1].points[REPLICATED,][0]
    assert point.forward_s + point.backward_s == pytest.approx(float(np.sum(prices.forward_s + prices.backward_s)))
    assert point.communication_s == 0.0

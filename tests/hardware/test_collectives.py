"""Collectives and transfers against sums written out by hand, measured tables and general laws."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.hardware import (
    COLUMNS,
    Cluster,
    Collective,
    CollectiveFit,
    Level,
    Terms,
    collective_s,
    collective_terms,
    load_cluster,
    send_terms,
)
from tests.hardware.toy import cluster, shared_card, two_nodes
from tests.shared_data import shared_path

GROUPS = [kind for kind in Collective if kind is not Collective.SEND]


def _columns(terms: Terms) -> dict[str, tuple[float, float]]:
    """Latency in us and ns a byte by algorithm, those that apply."""
    pairs = zip(COLUMNS, terms.latency_s.tolist(), terms.s_per_byte.tolist(), strict=True)
    return {name: (alpha * 1e6, beta * 1e9) for name, alpha, beta in pairs if alpha != float("inf")}


def _close(found: Mapping[str, tuple[float, float]], expected: Mapping[str, tuple[float, float]]) -> None:
    assert found.keys() == expected.keys()
    for name, pair in expected.items():
        assert found[name] == pytest.approx(pair, rel=1e-12), name


def test_all_reduce_inside_a_node() -> None:
    found = _columns(collective_terms(two_nodes(), Collective.ALL_REDUCE, range(4)))
    # ring: 6 steps of 1 us, 2 * 3/4 of the payload at 100 GB/s; tree: two levels up and down, payload both ways
    _close(found, {"ring": (6, 1.5 / 100), "tree": (4, 2 / 100)})


def test_all_reduce_across_nodes() -> None:
    found = _columns(collective_terms(two_nodes(), Collective.ALL_REDUCE, range(8)))
    # ring: 14 steps of 10 us; four rings use the four cards, 40 GB/s
    # tree: 2 (2 * 1 us + 10 us); hierarchical: scatter and gather of 4 inside (6 us, 1.5/100), all-reduce of a quarter
    # over two nodes at 10 GB/s a device (20 us, 1/4 * 1/10)
    expected = {"ring": (140, 1.75 / 40), "tree": (24, 2 / 40), "hierarchical": (26, 0.015 + 0.025)}
    _close(found, expected)


def test_the_cheapest_algorithm_depends_on_the_size() -> None:
    terms = collective_terms(two_nodes(), Collective.ALL_REDUCE, range(8))
    assert terms.algorithm(1e3) == "tree"
    assert terms.algorithm(1e9) == "hierarchical"
    assert float(terms.seconds(1e9)) == pytest.approx(26e-6 + 0.040, rel=1e-12)


@pytest.mark.parametrize("kind", [Collective.REDUCE_SCATTER, Collective.ALL_GATHER])
def test_scatter_and_gather_are_half_an_all_reduce(kind: Collective) -> None:
    found = _columns(collective_terms(two_nodes(), kind, range(8)))
    _close(found, {"ring": (70, 0.875 / 40), "hierarchical": (13, 0.0075 + 0.0125)})


def test_broadcast() -> None:
    found = _columns(collective_terms(two_nodes(), Collective.BROADCAST, range(8)))
    _close(found, {"tree": (12, 1 / 40)})


def test_all_to_all() -> None:
    found = _columns(collective_terms(two_nodes(), Collective.ALL_TO_ALL, range(8)))
    # pairwise: 3 peers at 1 us and 4 at 10 us; 4 * 4/8 of the payload leave a node at 40 GB/s
    # Bruck: 3 rounds of 10 us, 3/2 of the payload at 10 GB/s a device
    _close(found, {"pairwise": (43, 2 / 40), "bruck": (30, 1.5 / 10)})


def test_copies_of_a_row_cross_a_link_once() -> None:
    found = _columns(collective_terms(two_nodes(), Collective.ALL_TO_ALL, range(8), copies=2))
    # Of two copies that are on either node by chance, 1 - 1/2 * 1/2 = 3/4 of each node's receive one: 1.5 of 2.
    _close(found, {"pairwise": (43, 0.75 * 2 / 40), "bruck": (30, 0.75 * 1.5 / 10)})
    # Inside a node, of three copies on four devices 4 (1 - (3/4)^3) = 2.3125 devices receive one.
    found = _columns(collective_terms(two_nodes(), Collective.ALL_TO_ALL, range(4), copies=3))
    _close(found, {"pairwise": (3, 2.3125 / 3 * 0.75 / 100), "bruck": (2, 2.3125 / 3 * 1 / 100)})


@pytest.mark.parametrize("side", [4, 6])
def test_all_to_all_on_a_square_torus_is_what_its_busiest_link_carries(side: int) -> None:
    """Every pair's n-th of the payload routed along rows, then columns, the shorter way, ties half each way."""
    n, loads = side * side, dict[tuple[int, int, int, int], float]()
    for source, target in itertools.permutations(range(n), 2):
        at, end = list(divmod(source, side)), divmod(target, side)
        for axis in (1, 0):
            away = (end[axis] - at[axis]) % side
            ways = [(1, away), (-1, side - away)] if 2 * away == side else [(1, away)]
            if 2 * away > side:
                ways = [(-1, side - away)]
            for step, hops in ways:
                place = list(at)
                for _ in range(hops):
                    link = (place[0], place[1], axis, step)
                    loads[link] = loads.get(link, 0.0) + 1 / n / len(ways)
                    place[axis] = (place[axis] + step) % side
            at[axis] = end[axis]
    link_byte_per_s = 10e9
    torus = Level("torus", n, 4 * link_byte_per_s, 4 * link_byte_per_s, 0.0, peer_byte_per_s=link_byte_per_s, torus=2)
    found = collective_s(cluster(torus), Collective.ALL_TO_ALL, range(n), 1e9)
    assert found == pytest.approx(max(loads.values()) * 1e9 / link_byte_per_s)
    assert found == pytest.approx(side / 8 * 1e9 / link_byte_per_s)


def test_all_to_all_on_a_pod_grows_with_its_side() -> None:
    """GShard: sixteen times the devices of a 2-D torus, four times the time for the same bytes a device."""
    small, large = (load_cluster("tpu-v3-pod", nodes=n) for n in (16, 256))
    times = [collective_s(c, Collective.ALL_TO_ALL, range(c.device_count), 1e9) for c in (small, large)]
    assert times[1] / times[0] == pytest.approx(4, rel=0.01)


def test_one_device_a_node_uses_its_own_card() -> None:
    found = _columns(collective_terms(two_nodes(), Collective.ALL_REDUCE, [0, 4]))
    _close(found, {"ring": (20, 1 / 10), "tree": (20, 2 / 10)})


def test_siblings_share_the_ports_of_a_node() -> None:
    alone = collective_terms(shared_card(), Collective.ALL_REDUCE, [1, 5])
    assert _columns(alone)["ring"] == pytest.approx((20, 1 / 40))
    together = collective_terms(shared_card(), Collective.ALL_REDUCE, [1, 5], concurrent=4)
    assert _columns(together)["ring"] == pytest.approx((20, 1 / 10))
    # Four groups of one rank a node are all that fit.
    assert _columns(collective_terms(shared_card(), Collective.ALL_REDUCE, [1, 5], concurrent=99)) == _columns(together)
    # With a card a device, sharing costs nothing.
    own = collective_terms(two_nodes(), Collective.ALL_REDUCE, [1, 5], concurrent=4)
    assert _columns(own)["ring"] == pytest.approx((20, 1 / 10))


def test_uneven_groups_go_at_the_pace_of_the_smaller_part() -> None:
    nodes = cluster(Level("inside", 8, 100e9, 100e9, 1e-6), Level("between", 2, 80e9, 10e9, 10e-6))
    found = _columns(collective_terms(nodes, Collective.ALL_REDUCE, [5, 6, 7, 8, 9, 10, 11, 12]))
    # three cards on the first node: 30 GB/s; the tree has 3 levels inside (5 ranks) and 1 between
    _close(found, {"ring": (140, 1.75 / 30), "tree": (2 * (3 + 10), 2 / 30)})


def test_three_levels() -> None:
    tower = cluster(
        Level("inside", 2, 100e9, 100e9, 1e-6),
        Level("leaf", 2, 20e9, 10e9, 4e-6),
        Level("spine", 2, 20e9, 10e9, 9e-6),
    )
    found = _columns(collective_terms(tower, Collective.ALL_REDUCE, range(8)))
    # hierarchical, there and back: half of all inside at 100, half of a half over the leaf at 10, half of a quarter
    # over the spine, where the four devices of a leaf share 20 GB/s: 5 each
    seconds = 2 * (0.5 / 100 + 0.5 / 2 / 10 + 0.5 / 4 / 5)
    expected = {"ring": (14 * 9, 1.75 / 20), "tree": (2 * 14, 2 / 20), "hierarchical": (2 * 14, seconds)}
    _close(found, expected)


def test_a_mesh_gives_a_small_group_only_its_own_wires() -> None:
    mesh = cluster(Level("mesh", 8, 448e9, 448e9, 1e-6, peer_byte_per_s=64e9))
    assert _columns(collective_terms(mesh, Collective.ALL_REDUCE, [0, 1]))["ring"] == pytest.approx((2, 1 / 64))
    assert _columns(collective_terms(mesh, Collective.ALL_REDUCE, range(4)))["ring"] == pytest.approx((6, 1.5 / 192))
    assert _columns(collective_terms(mesh, Collective.ALL_REDUCE, range(8)))["ring"] == pytest.approx((14, 1.75 / 448))
    assert _columns(send_terms(mesh, 0, 7))["direct"] == pytest.approx((1, 1 / 64))


def test_efficiency_lowers_every_bandwidth() -> None:
    half = cluster(Level("inside", 4, 100e9, 100e9, 1e-6, efficiency=0.5))
    found = _columns(collective_terms(half, Collective.ALL_REDUCE, range(4)))
    _close(found, {"ring": (6, 1.5 / 50), "tree": (4, 2 / 50)})


def test_send() -> None:
    _close(_columns(send_terms(two_nodes(), 1, 2)), {"direct": (1, 1 / 100)})
    assert _columns(send_terms(two_nodes(), 3, 4))["direct"] == pytest.approx((10, 1 / 10))
    assert _columns(send_terms(shared_card(), 3, 4))["direct"] == pytest.approx((10, 1 / 40))
    assert _columns(send_terms(shared_card(), 3, 4, concurrent=4))["direct"] == pytest.approx((10, 1 / 10))
    assert _columns(send_terms(two_nodes(), 3, 3)) == {"direct": (0, 0)}
    both = send_terms(two_nodes(), np.array([0, 0]), np.array([1, 7])).seconds(1e9)
    assert both == pytest.approx([1e-6 + 0.01, 10e-6 + 0.1])
    pair = collective_terms(two_nodes(), Collective.SEND, [0, 7])
    assert _columns(pair) == _columns(send_terms(two_nodes(), 0, 7))


def test_a_measured_collective_replaces_the_model() -> None:
    fits = (CollectiveFit(Collective.ALL_REDUCE, 4, 50e-6, 80e9), CollectiveFit(Collective.ALL_GATHER, 4, 20e-6, 70e9))
    nodes = cluster(Level("inside", 4, 100e9, 100e9, 1e-6, fits=fits), Level("between", 2, 40e9, 10e9, 10e-6))
    found = {kind: _columns(collective_terms(nodes, kind, range(4))) for kind in GROUPS}
    _close(found[Collective.ALL_REDUCE], {"measured": (50, 1.5 / 80)})
    _close(found[Collective.ALL_GATHER], {"measured": (20, 0.75 / 70)})
    # no figure of its own: half of the all-reduce
    _close(found[Collective.REDUCE_SCATTER], {"measured": (25, 0.75 / 80)})
    assert "measured" not in found[Collective.BROADCAST]
    three = collective_terms(nodes, Collective.ALL_REDUCE, range(3))
    _close(_columns(three), {"ring": (4, 4 / 3 / 100), "tree": (4, 2 / 100)})
    # inside a hierarchical all-reduce it stands for the scatter and the gather
    whole = _columns(collective_terms(nodes, Collective.ALL_REDUCE, range(8)))
    assert whole["hierarchical"] == pytest.approx((50 + 20, 1.5 / 80 + 0.025))


@pytest.mark.parametrize(("name", "table"), [("dgx-a100", "a100_nvswitch"), ("dgx-1v", "v100_dgx1")])
def test_bundled_nodes_follow_the_measured_tables(name: str, table: str) -> None:
    facts = json.loads(shared_path("reference/hardware_facts.json").read_text())["nccl_allreduce_fit"][table]
    node = load_cluster(name)
    for ranks, row in facts.items():
        n = int(ranks)
        for payload in (1e6, 64e6, 1e9):
            expected = row["alpha_us"] * 1e-6 + 2 * (n - 1) / n * payload / (row["busbw_gbps"] * 1e9)
            assert collective_s(node, Collective.ALL_REDUCE, range(n), payload) == pytest.approx(expected)


def test_wrong_groups_are_refused() -> None:
    nodes = two_nodes()
    for ranks in ([], [0, 0], [7, 8], [-1, 0]):
        with pytest.raises(ValueError, match="rank"):
            collective_terms(nodes, Collective.ALL_REDUCE, ranks)
    with pytest.raises(ValueError, match="two ranks"):
        collective_terms(nodes, Collective.SEND, [0, 1, 2])


def _level(size: int, port: int, share: int, latency: int, peer: bool) -> Level:
    device = port * 1e9 / share
    return Level("l", size, port * 1e9, device, latency * 1e-6, 0.9, peer_byte_per_s=device / 3 if peer else None)


levels = st.lists(
    st.builds(
        _level, st.integers(1, 4), st.integers(1, 400), st.sampled_from([1, 2, 4]), st.integers(0, 30), st.booleans()
    ),
    min_size=1,
    max_size=3,
)


@st.composite
def clusters_with_ranks(draw: st.DrawFn) -> tuple[Cluster, list[int]]:
    machine = cluster(*draw(levels))
    ranks = draw(st.lists(st.integers(0, machine.device_count - 1), min_size=1, unique=True))
    return machine, ranks


@settings(deadline=None, max_examples=150)
@given(clusters_with_ranks(), st.sampled_from(GROUPS), st.integers(1, 8))
def test_laws_of_any_group(case: tuple[Cluster, list[int]], kind: Collective, concurrent: int) -> None:
    machine, ranks = case
    payloads = np.array([0.0, 1.0, 1e3, 1e6, 1e9])
    terms = collective_terms(machine, kind, ranks, concurrent)
    seconds = terms.seconds(payloads)
    assert np.all(np.isfinite(seconds))
    assert np.all(np.diff(seconds) >= 0), "more bytes are never cheaper"
    assert np.all(seconds == 0) if len(ranks) == 1 else seconds[-1] > 0
    again = collective_terms(machine, kind, ranks[::-1], concurrent).seconds(payloads)
    assert np.array_equal(seconds, again), "the order of the ranks does not matter"
    alone = collective_terms(machine, kind, ranks).seconds(payloads)
    assert np.all(seconds >= alone), "siblings never help"


@settings(deadline=None, max_examples=100)
@given(clusters_with_ranks())
def test_an_all_reduce_costs_a_scatter_and_a_gather_at_most(case: tuple[Cluster, list[int]]) -> None:
    machine, ranks = case
    for payload in (0.0, 1e5, 1e9):
        both = sum(collective_s(machine, kind, ranks, payload) for kind in (GROUPS[1], GROUPS[2]))
        assert collective_s(machine, Collective.ALL_REDUCE, ranks, payload) <= both * (1 + 1e-12)


@settings(deadline=None, max_examples=100)
@given(levels, st.integers(1, 4), st.data())
def test_tables_of_sends_agree_with_single_ones(tiers: list[Level], concurrent: int, data: st.DataObject) -> None:
    machine = cluster(*tiers)
    pairs = data.draw(st.lists(st.tuples(*[st.integers(0, machine.device_count - 1)] * 2), min_size=1, max_size=6))
    sent = send_terms(machine, *np.array(pairs).T, concurrent)
    for i, pair in enumerate(pairs):
        one = send_terms(machine, *pair, concurrent)
        assert np.array_equal(one.latency_s, sent.latency_s[i])
        assert np.array_equal(one.s_per_byte, sent.s_per_byte[i])


def test_hierarchy_pays_when_links_between_nodes_are_slow() -> None:
    for name in ("dgx-1v", "p4d.24xlarge", "superpod-h100", "tpu-v4-pod"):
        machine = load_cluster(name, nodes=4)
        found = _columns(collective_terms(machine, Collective.REDUCE_SCATTER, range(machine.device_count)))
        assert found["hierarchical"][0] < found["ring"][0], "fewer slow steps"

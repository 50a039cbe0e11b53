"""Levels that carry less than their children send, devices of one type with unlike links, and the order of devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import HardwareError
from planner.hardware import (
    ClusterSketch,
    Collective,
    Stack,
    collective_s,
    lint,
    load_cluster,
    profile_yaml,
    read_link,
    resolved_profile,
    send_terms,
    sized,
    sketch_text,
    warnings,
)

TREE = """\
cluster: tree
devices: h100-sxm-80gb
nodes: 4
node:
  - level: nvlink
    size: 8
    port: {value: 450 GB/s, direction: per-direction}
    latency: 5 us
    efficiency: 80%
network:
  - level: leaf
    size: 2
    port: {value: 400 Gbit/s, direction: per-direction, count: 8}
    latency: 10 us
    efficiency: 80%
  - level: spine
    port: {value: 400 Gbit/s, direction: per-direction, count: 16}
    oversubscription: RATIO
    latency: 20 us
    efficiency: 80%
"""


def tree(folder: Path, ratio: str) -> Path:
    path = folder / f"tree{ratio.replace(':', '-')}.yaml"
    path.write_text(TREE.replace("RATIO", ratio))
    return path


@pytest.mark.parametrize(
    ("ratio", "factor"), [("2:1", 2.0), ("2", 2.0), ("3:2", 1.5), ("1:1", 1.0), ("{value: 4:1}", 4.0)]
)
def test_what_crosses_an_oversubscribed_level_gets_its_share(ratio: str, factor: float, tmp_path: Path) -> None:
    cluster = load_cluster(tree(tmp_path, ratio), stack=Stack())
    spine = cluster.levels[2]
    assert spine.byte_per_s == pytest.approx(16 * 50e9 / factor)
    assert cluster.levels[1].byte_per_s == 8 * 50e9
    # Between the first devices of the two leaves: one port of 50 GB/s, of which 80 % is achievable, over the ratio.
    send = send_terms(cluster, 0, 16).seconds(1e9)
    assert float(send) == pytest.approx(20e-6 + 1e9 / (0.8 * 50e9 / factor), rel=1e-9)
    # A ring of two: both rounds move half of the payload, at the same rate, with the latency of the spine each.
    ring = collective_s(cluster, Collective.ALL_REDUCE, [0, 16], 1e9)
    assert ring == pytest.approx(2 * 20e-6 + 1e9 / (0.8 * 50e9 / factor), rel=1e-6)
    # Inside a leaf nothing changes.
    assert float(send_terms(cluster, 0, 8).seconds(1e9)) == pytest.approx(10e-6 + 1e9 / (0.8 * 50e9), rel=1e-9)


def test_all_ranks_at_once_share_what_is_left(tmp_path: Path) -> None:
    """16 devices of a leaf exchange with their peers of the other leaf: 800 GB/s of ports carry 400 GB/s at 2:1."""
    cluster = load_cluster(tree(tmp_path, "2:1"))
    seconds = collective_s(cluster, Collective.ALL_REDUCE, [0, 16], 1e9, concurrent=16)
    assert seconds == pytest.approx(2 * 20e-6 + 1e9 / (0.8 * 400e9 / 16), rel=1e-6)


def test_a_changed_figure_oversubscribes(tmp_path: Path) -> None:
    changed = load_cluster("dgx-h100", nodes=2, changes=["network.oversubscription=2:1"])
    assert changed.levels[1].byte_per_s == load_cluster("dgx-h100", nodes=2).levels[1].byte_per_s / 2
    assert changed.fingerprint != load_cluster("dgx-h100", nodes=2).fingerprint
    inner = load_cluster("dgx-a100", changes=["nvlink.oversubscription=2"])
    assert inner.levels[0].fits == ()
    assert inner.levels[0].byte_per_s == 150e9


def test_the_sketch_of_a_link_and_the_resolved_profile_have_it(tmp_path: Path) -> None:
    outer = read_link("infiniband:400Gbit/s,ports=8,oversubscription=2:1")
    inside = sized([read_link("nvlink:450GB/s")], 8, where="--inside")
    path = tmp_path / "lab.yaml"
    path.write_text(sketch_text(ClusterSketch("lab", "h100-sxm-80gb", inside, (outer,), 4)))
    assert lint(path) == []
    cluster = load_cluster(path)
    assert cluster.levels[1].byte_per_s == 200e9
    again = tmp_path / "again.yaml"
    again.write_text(profile_yaml(resolved_profile(path)))
    assert load_cluster(again).fingerprint == cluster.fingerprint


@pytest.mark.parametrize(
    ("ratio", "words"),
    [("1:2", "below 1"), ("0.5", "below 1"), ("two", "no ratio"), ("2:0", "no ratio"), ("true", "no ratio")],
)
def test_a_ratio_that_is_none_is_refused(ratio: str, words: str, tmp_path: Path) -> None:
    (problem,) = lint(tree(tmp_path, ratio))
    assert words in problem.message
    assert problem.where.endswith(":18:23")


def test_doubtful_ratios_are_warned_of(tmp_path: Path) -> None:
    assert [p.message for p in warnings(tree(tmp_path, "64:1"))] == ["an oversubscription of 64:1 is not plausible"]
    path = tree(tmp_path, "2:1")
    measured = "    measured: {all_reduce: [{ranks: 2, latency: 30 us, bandwidth: 100 GB/s}]}\n"
    path.write_text(path.read_text() + measured)
    assert any("as they were measured" in p.message for p in warnings(path))


PAIRS = """\
cluster: pairs
devices:
  - {type: a40-48gb, count: 2}
  - {type: a40-48gb, count: 2, links: single}
order: [0, 2, 1, 3]
node:
  - level: nvlink
    size: 2
    port: {value: 14.0625 GB/s, direction: per-direction, count: 4}
    latency: 5 us
    efficiency: 80%
    nodes_of:
      single: {port: {value: 31 GB/s, direction: per-direction}, latency: 15 us, efficiency: 60%}
  - level: pcie
    size: 2
    port: {value: 31 GB/s, direction: per-direction}
    latency: 15 us
    efficiency: 60%
"""


def test_a_bridged_pair_beside_single_cards_is_stated(tmp_path: Path) -> None:
    path = tmp_path / "pairs.yaml"
    path.write_text(PAIRS)
    assert lint(path) == []
    cluster = load_cluster(path)
    assert [device.name for device in cluster.devices] == ["a40-48gb", "a40-48gb (single)"]
    assert cluster.device_types.tolist() == [0, 0, 1, 1]
    assert cluster.device_order == (0, 2, 1, 3)
    bridged = collective_s(cluster, Collective.ALL_REDUCE, [0, 1], 1e9)
    assert bridged == pytest.approx(2 * 5e-6 + 1e9 / (0.8 * 56.25e9), rel=1e-6)
    for pair in ([2, 3], [0, 2], [1, 3]):
        seconds = collective_s(cluster, Collective.ALL_REDUCE, pair, 1e9)
        assert seconds == pytest.approx(2 * 15e-6 + 1e9 / (0.6 * 31e9), rel=1e-6)
    again = tmp_path / "again.yaml"
    again.write_text(profile_yaml(resolved_profile(path)))
    assert load_cluster(again).fingerprint == cluster.fingerprint
    assert load_cluster(again).device_order == (0, 2, 1, 3)


def test_nodes_unlike_each_other_are_stated(tmp_path: Path) -> None:
    """Two nodes of two cards, bridges in the first one only."""
    path = tmp_path / "nodes.yaml"
    text = PAIRS.replace("order: [0, 2, 1, 3]\n", "nodes: 2\n").replace(
        "  - level: pcie\n    size: 2\n", "network:\n  - level: pcie\n"
    )
    path.write_text(text.replace("network:", "network:", 1))
    assert lint(path) == []
    cluster = load_cluster(path)
    assert cluster.node_size == 2
    fast, slow = (collective_s(cluster, Collective.ALL_REDUCE, ranks, 1e9) for ranks in ([0, 1], [2, 3]))
    assert fast == pytest.approx(2 * 5e-6 + 1e9 / (0.8 * 56.25e9), rel=1e-6)
    assert slow == pytest.approx(2 * 15e-6 + 1e9 / (0.6 * 31e9), rel=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[0, 2, 1, 3]", "[0, 2, 1]", "3 different devices in the order of a node of 4"),
        ("[0, 2, 1, 3]", "[0, 2, 2, 3]", "3 different devices"),
        ("[0, 2, 1, 3]", "[0, 2, 1, -3]", "at least 0"),
        ("links: single", "links: alone", "no level has figures of the links 'alone'"),
        ("      single:", "      lonely:", "no node has devices of type 'lonely', or links of that name"),
    ],
)
def test_orders_and_links_that_do_not_fit_are_found(old: str, new: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.yaml"
    path.write_text(PAIRS.replace(old, new))
    assert any(words in problem.message for problem in lint(path))
    with pytest.raises(HardwareError):
        load_cluster(path)


def test_a_part_of_a_node_keeps_its_first_devices(tmp_path: Path) -> None:
    path = tmp_path / "pairs.yaml"
    path.write_text(PAIRS)
    assert load_cluster(path, nodes="1x2").device_order == (0, 2)
    assert [device.name for device in load_cluster(path, nodes="1x2").devices] == ["a40-48gb"]


def test_the_usual_order_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "pairs.yaml"
    path.write_text(PAIRS.replace("[0, 2, 1, 3]", "[0, 1, 2, 3]"))
    assert load_cluster(path).device_order == ()

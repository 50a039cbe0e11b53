"""Nodes from what `nvidia-smi topo -m` and `rocm-smi --showtopo` print: levels, order, speeds, and what is left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import HardwareError, ShardplanError
from planner.hardware import (
    Cluster,
    ClusterSketch,
    Collective,
    collective_s,
    from_topology,
    kind_of,
    lint,
    load_cluster,
    sketch_text,
)
from tests.hardware.topologies import among, joined, matrix, showtopo
from tests.shared_data import shared_path

A40, A100, V100, L40S = "a40-48gb", "a100-sxm-80gb", "v100-sxm2-16gb", "l40s-48gb"


def node(text: str, device: str, folder: Path) -> tuple[Cluster, ClusterSketch]:
    """The cluster of a topology, by way of its profile."""
    assert kind_of(text) == "topology"
    sketch = from_topology(text, name="lab", device=device)
    path = folder / "lab.yaml"
    path.write_text(sketch_text(sketch))
    assert lint(path) == []
    return load_cluster(path), sketch


def levels(cluster: Cluster) -> list[tuple[str, int, float]]:
    """Name, size, and GB/s of one child, of each level."""
    return [(level.name, level.size, level.byte_per_s / 1e9) for level in cluster.levels]


def test_bridges_between_others_than_neighbours_set_the_order(tmp_path: Path) -> None:
    """Two bridges 0-2 and 1-3: ranks 0 and 1 are devices 0 and 2, which are linked; 0 and 1 are not."""
    text = matrix(joined(4, lambda i, j: "SYS", {(0, 2): "NV4", (1, 3): "NV4"}))
    cluster, _ = node(text, A40, tmp_path)
    assert cluster.device_order == (0, 2, 1, 3)
    assert "order: [0, 2, 1, 3]\n" in (tmp_path / "lab.yaml").read_text()
    assert levels(cluster) == [("nvlink", 2, 56.25), ("pcie-sys", 2, 6.0)]
    # A ring of two moves each byte once; four links of 14.0625 GB/s, of which 80 % is taken as achievable.
    seconds = collective_s(cluster, Collective.ALL_REDUCE, [0, 1], 1e9)
    assert seconds == pytest.approx(2 * 5e-6 + 1e9 / (56.25e9 * 0.8), rel=1e-6)
    # Ranks 1 and 2 are devices 2 and 1, on two sockets: 6 GB/s as it was measured.
    seconds = collective_s(cluster, Collective.ALL_REDUCE, [1, 2], 1e9)
    assert seconds == pytest.approx(2 * 20e-6 + 1e9 / 6e9, rel=1e-3)


def test_bridges_across_sockets_leave_out_what_is_nearer_and_say_so(tmp_path: Path) -> None:
    sockets = joined(8, lambda i, j: "NODE" if i // 4 == j // 4 else "SYS", {(i, i + 4): "NV4" for i in range(4)})
    cluster, sketch = node(matrix(sockets), A40, tmp_path)
    assert cluster.device_order == (0, 4, 1, 5, 2, 6, 3, 7)
    assert levels(cluster) == [("nvlink", 2, 56.25), ("pcie-sys", 4, 6.0)]
    (note,) = (note for note in sketch.notes if note.startswith("NODE"))
    assert "GPU0-GPU1" in note
    assert "SYS" in note


def test_switches_host_bridges_numa_nodes_and_sockets_are_levels_of_their_own(tmp_path: Path) -> None:
    def joint(i: int, j: int) -> str:
        if i // 2 == j // 2:
            return "PIX"
        return "NODE" if i // 4 == j // 4 else "SYS"

    cluster, sketch = node(matrix(joined(8, joint)), L40S, tmp_path)
    assert levels(cluster) == [("pcie-pix", 2, 30.7), ("pcie-node", 2, 30.7), ("pcie-sys", 2, 6.0)]
    assert cluster.device_order == ()
    entries = sketch.document()["node"]
    assert [entry["port"]["source"] for entry in entries] == ["assumed", "assumed", "nccl1817"]
    assert not any(entry["port"]["verified"] for entry in entries)
    # All eight in a ring, at the pace of the sockets: 2 * 7 / 8 of the payload at 6 GB/s, 14 steps of 20 us.
    seconds = collective_s(cluster, Collective.ALL_REDUCE, range(8), 1e9)
    assert seconds <= 14 * 20e-6 + 1.75e9 / 6e9
    assert seconds > 1e9 / 6e9


@pytest.mark.parametrize("joint", ["PIX", "PXB", "PHB", "NODE", "SYS"])
def test_each_way_over_pcie_is_a_level(joint: str, tmp_path: Path) -> None:
    cluster, _ = node(matrix(among(4, joint)), L40S, tmp_path)
    assert [(level.name, level.size) for level in cluster.levels] == [(f"pcie-{joint.lower()}", 4)]
    older = "SOC" if joint == "SYS" else joint  # drivers of before 2017
    assert node(matrix(among(4, older)), L40S, tmp_path)[0].levels == cluster.levels


def test_numbering_across_sockets_is_put_in_order(tmp_path: Path) -> None:
    """Even GPUs on one socket, odd ones on the other."""
    cluster, _ = node(matrix(joined(4, lambda i, j: "PHB" if i % 2 == j % 2 else "SYS")), L40S, tmp_path)
    assert cluster.device_order == (0, 2, 1, 3)
    assert [level.size for level in cluster.levels] == [2, 2]


@pytest.mark.parametrize(
    ("device", "links", "gb_per_s"),
    [
        ("a40-48gb", 4, 4 * 14.0625),
        ("rtx-3090-24gb", 4, 4 * 14.0625),
        ("rtx-a6000-48gb", 4, 4 * 14.0625),
        ("p100-sxm2-16gb", 4, 80),
        ("v100-sxm2-16gb", 6, 150),
        ("a100-pcie-80gb", 12, 300),
        ("h100-sxm-80gb", 18, 450),
        ("h800-sxm-80gb", 8, 200),
        ("b200-sxm-180gb", 18, 900),
        ("gb200-186gb", 18, 900),
    ],
)
def test_links_are_as_fast_as_those_of_the_device(device: str, links: int, gb_per_s: float, tmp_path: Path) -> None:
    cluster, _ = node(matrix(among(2, f"NV{links}")), device, tmp_path)
    assert levels(cluster) == [("nvlink", 2, gb_per_s)]


def test_a_switch_gives_all_links_to_any_peer(tmp_path: Path) -> None:
    (level,) = node(matrix(among(8, "NV12")), A100, tmp_path)[0].levels
    assert (level.name, level.size, level.byte_per_s, level.peer_byte_per_s) == ("nvlink", 8, 300e9, None)


def test_wires_without_a_switch_are_dealt_out_to_the_peers(tmp_path: Path) -> None:
    """Four A100: NV4 to each of three others are the twelve links that it has."""
    (level,) = node(matrix(among(4, "NV4")), A100, tmp_path)[0].levels
    assert (level.byte_per_s, level.peer_byte_per_s) == (300e9, 100e9)


def test_a_hybrid_cube_mesh_has_single_wires(tmp_path: Path) -> None:
    """A DGX-1: six links a GPU, two to some, one to others, none to three."""
    pairs = {(0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 1, (2, 6): 2}
    pairs |= {(3, 7): 2, (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 1}
    cells = joined(8, lambda i, j: "SYS", {pair: f"NV{count}" for pair, count in pairs.items()})
    cluster, _ = node(matrix(cells), V100, tmp_path)
    (level,) = cluster.levels
    assert (level.byte_per_s, level.peer_byte_per_s) == (6 * 25e9, 25e9)
    assert cluster.device_order == ()


def test_neighbours_of_a_mesh_are_linked(tmp_path: Path) -> None:
    """A ring 0-2-1-3-0: ranks 0 and 1 are devices 0 and 2, ranks 2 and 3 devices 1 and 3."""
    cells = joined(4, lambda i, j: "SYS", {(0, 2): "NV2", (1, 2): "NV1", (1, 3): "NV2", (0, 3): "NV1"})
    assert node(matrix(cells), V100, tmp_path)[0].device_order == (0, 2, 1, 3)


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_a_bridged_pair_beside_single_cards(count: int, tmp_path: Path) -> None:
    """Devices 1 and 2 are bridged. Their exchange is fast, that of any others is not."""
    cluster, sketch = node(matrix(joined(count, lambda i, j: "PHB", {(1, 2): "NV4"})), A40, tmp_path)
    order = cluster.device_order or tuple(range(count))
    pair = sorted(order.index(device) for device in (1, 2))
    assert pair[1] == pair[0] + 1
    bridged = 2 * 5e-6 + 1e9 / (56.25e9 * 0.8)
    lanes = 2 * 15e-6 + 1e9 / (30.7e9 * 0.6)
    for first in range(count):
        for second in range(first):
            seconds = collective_s(cluster, Collective.ALL_REDUCE, [second, first], 1e9)
            assert seconds == pytest.approx(bridged if [second, first] == pair else lanes, rel=1e-6)
    assert not any("nvlink" in note for note in sketch.notes)
    assert sum(cluster.device_types.tolist()) in (2, count - 2)


def test_groups_of_four_and_of_two(tmp_path: Path) -> None:
    """Four GPUs wired to each other beside two bridged pairs: pairs are a level, joined by NVLink in the first four."""
    pairs = {(i, j): "NV4" for i in range(4) for j in range(i)} | {(4, 5): "NV4", (6, 7): "NV4"}
    cluster, _ = node(matrix(joined(8, lambda i, j: "SYS", pairs)), A100, tmp_path)
    assert [(level.name, level.size) for level in cluster.levels] == [("nvlink", 2), ("nvlink-2", 2), ("pcie-sys", 2)]
    fast = collective_s(cluster, Collective.ALL_REDUCE, range(4), 1e9)
    slow = collective_s(cluster, Collective.ALL_REDUCE, range(4, 8), 1e9)
    assert fast < 0.05
    assert slow > 1e9 / 6e9


def test_groups_that_no_levels_can_hold_are_left_out_by_name(tmp_path: Path) -> None:
    cells = joined(5, lambda i, j: "SYS", {(0, 1): "NV4", (2, 3): "NV4"})
    cluster, sketch = node(matrix(cells), A40, tmp_path)
    assert levels(cluster) == [("pcie-sys", 5, 6.0)]
    assert "nvlink between GPU0-GPU1; GPU2-GPU3" in sketch.notes[0]


def test_links_of_unlike_groups_count_as_the_fewest_and_are_named(tmp_path: Path) -> None:
    cluster, sketch = node(matrix(joined(4, lambda i, j: "SYS", {(0, 1): "NV4", (2, 3): "NV2"})), A40, tmp_path)
    assert levels(cluster)[0] == ("nvlink", 2, 28.125)
    assert "[4] links" in sketch.notes[0]


def test_network_cards_and_affinity_are_named_where_they_are_dropped() -> None:
    notes = from_topology(matrix(among(2, "NV12"), nics=2), name="lab", device=A100).notes
    assert any("NIC0 (mlx5_0) PXB of GPU0 GPU1" in note and "--between" in note for note in notes)
    assert any("CPU Affinity" in note for note in notes)
    text = sketch_text(from_topology(matrix(among(2, "NV12"), nics=2), name="lab", device=A100))
    assert all(f"# not taken: {note}\n" in text for note in notes)


@pytest.mark.parametrize("device", [L40S, "l4-24gb", "rtx-4090-24gb", "t4-16gb", "a10g-24gb", "h100-a100-pool"])
def test_links_of_a_device_that_has_none_are_refused(device: str) -> None:
    with pytest.raises(ShardplanError) as caught:
        from_topology(matrix(among(2, "NV4")), name="lab", device=device)
    if device != "h100-a100-pool":
        assert "GPU0 and GPU1" in caught.value.problem.message
        hint = caught.value.problem.hint
        assert "a40-48gb" in hint
        from_topology(matrix(among(2, "NV4")), name="lab", device="a40-48gb")  # the remedy


def test_a_device_of_a_file_brings_its_own_links(tmp_path: Path) -> None:
    body = [
        "device: card",
        "memory: 16 GiB",
        "memory_bandwidth: {value: 500 GB/s, source: sheet}",
        "matrix: {fp16: 60 TFLOP/s}",
        "vector: 15 TFLOP/s",
        "peer_links: {value: 10 GB/s, direction: per-direction, count: 2}",
        "sources: {sheet: the maker's sheet}",
    ]
    (tmp_path / "card.yaml").write_text("\n".join(body))
    cluster, _ = node(matrix(among(2, "NV2")), str(tmp_path / "card.yaml"), tmp_path)
    assert levels(cluster) == [("nvlink", 2, 20.0)]
    assert cluster.devices[0].name == "card"


def test_more_links_than_the_device_has_are_doubted() -> None:
    notes = from_topology(matrix(among(2, "NV12")), name="lab", device=A40).notes
    assert any("12 links" in note and "the 4 of a40-48gb" in note for note in notes)


def test_xgmi_of_all_to_all(tmp_path: Path) -> None:
    text = showtopo(8, lambda i, j: "XGMI", lambda i, j: 1, lambda i, j: 15)
    (level,) = node(text, "mi300x-192gb", tmp_path)[0].levels
    assert (level.name, level.size, level.byte_per_s, level.peer_byte_per_s) == ("xgmi", 8, 7 * 64e9, 64e9)


def test_xgmi_of_each_socket_and_pcie_between(tmp_path: Path) -> None:
    def same(i: int, j: int) -> bool:
        return i // 2 == j // 2

    text = showtopo(
        4,
        lambda i, j: "XGMI" if same(i, j) else "PCIE",
        lambda i, j: 1 if same(i, j) else 3,
        lambda i, j: 15 if same(i, j) else 72,
    )
    assert levels(node(text, "mi300x-192gb", tmp_path)[0]) == [("xgmi", 2, 64.0), ("pcie-sys", 2, 6.0)]


@pytest.mark.parametrize("tables", ["hops", "weight", "none"])
def test_pcie_of_rocm_is_told_by_hops_weights_or_numa_nodes(tables: str, tmp_path: Path) -> None:
    def same(i: int, j: int) -> bool:
        return i // 2 == j // 2

    text = showtopo(
        4,
        lambda i, j: "PCIE",
        (lambda i, j: 2 if same(i, j) else 3) if tables == "hops" else None,
        (lambda i, j: 40 if same(i, j) else 52) if tables == "weight" else None,
    )
    cluster, _ = node(text, "mi300x-192gb", tmp_path)
    assert [(level.name, level.size) for level in cluster.levels] == [("pcie-phb", 2), ("pcie-sys", 2)]


def test_xgmi_over_other_devices_is_no_wire(tmp_path: Path) -> None:
    """A ring of four dies: two wires each, weight 15; the way across has 30."""
    text = showtopo(4, lambda i, j: "XGMI", lambda i, j: 1, lambda i, j: 30 if abs(i - j) == 2 else 15)
    (level,) = node(text, "mi250x-gcd-64gb", tmp_path)[0].levels
    assert (level.size, level.byte_per_s, level.peer_byte_per_s) == (4, 100e9, 50e9)


def test_amd_smi_names_devices_by_their_bus(tmp_path: Path) -> None:
    names = ["0000:05:00.0", "0000:26:00.0"]
    lines = ["WEIGHT TABLE:", "   " + " ".join(names), f"{names[0]} 0 15", f"{names[1]} 15 0", ""]
    lines += ["LINK TYPE TABLE:", "   " + " ".join(names), f"{names[0]} SELF XGMI", f"{names[1]} XGMI SELF", ""]
    cluster, _ = node("\n".join(lines), "mi300x-192gb", tmp_path)
    assert levels(cluster) == [("xgmi", 2, 64.0)]


def test_quoted_and_coloured_text_is_read() -> None:
    plain = from_topology(matrix(among(4, "NV4")), name="lab", device=A100)
    text = "\n".join("> | " + line.replace("\t", " | ") for line in matrix(among(4, "NV4")).splitlines())
    coloured = text.replace("GPU0", "\x1b[4mGPU0\x1b[0m")
    assert from_topology(coloured, name="lab", device=A100).inside == plain.inside


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (matrix([[" X ", "NV4"], ["NV2", " X "]]), 2, "line 3"),
        (matrix([[" X ", "WAT"], ["WAT", " X "]]), 2, "'WAT' from GPU0 to GPU1"),
        (matrix([[" X ", "NV99"], ["NV99", " X "]]), 2, "99 NVLinks"),
        (matrix(among(2, "OK")), 2, "may be read directly"),
        (matrix(among(3, "SYS")).replace("GPU2\tSYS", "GPU1\tSYS"), 4, "GPU1 has two rows"),
        ("\tGPU0\tGPU1\tGPU2\nGPU0\t X \tSYS\tSYS\nGPU1\tSYS\t X \tSYS\n", 1, "GPU2 has a column and no row"),
        ("\tGPU0\tGPU1\nGPU0\t X \nGPU1\tSYS\t X \n", 2, "ends before"),
        (showtopo(2, lambda i, j: "WIFI"), 4, "'WIFI' from GPU0 to GPU1"),
        (showtopo(2, lambda i, j: "PCIE" if i else "XGMI"), 4, "line 5"),
        (showtopo(2, lambda i, j: "PCIE", lambda i, j: "far"), 4, "'far'"),
    ],
)
def test_errors_say_the_line(text: str, line: int, words: str) -> None:
    with pytest.raises(HardwareError) as caught:
        from_topology(text, name="lab", device=A100, where="topo.txt")
    assert caught.value.problem.where == f"topo.txt:{line}"
    assert words in caught.value.problem.message


@pytest.mark.parametrize(
    "text", ["", "GPU0 X NV4\n", "\tGPU0\tCPU Affinity\nGPU0\t X \t0-3\n", "= Hops between two GPUs ="]
)
def test_what_is_no_matrix_is_refused(text: str) -> None:
    with pytest.raises(HardwareError) as caught:
        from_topology(text, name="lab", device=A100)
    assert caught.value.problem.hint


@pytest.mark.parametrize("name", ["pcie8.txt", "bridges.txt"])
def test_topologies_of_the_report(name: str, tmp_path: Path) -> None:
    text = shared_path(f"cases/bug-17/{name}").read_text()
    cluster, _ = node(text, A40 if name == "bridges.txt" else L40S, tmp_path)
    expected = {
        "pcie8.txt": [("pcie-pix", 2, 30.7), ("pcie-node", 2, 30.7), ("pcie-sys", 2, 6.0)],
        "bridges.txt": [("nvlink", 2, 56.25), ("pcie-sys", 4, 6.0)],
    }
    assert levels(cluster) == expected[name]

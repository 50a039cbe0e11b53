"""The bundled profiles: they load, say where each figure comes from, and agree with the published figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.errors import HardwareError
from planner.hardware import cluster_names, device_names, lint, load_cluster, load_device, resolved_profile
from planner.hardware.document import _folder_of, profile_folder
from tests.shared_data import shared_path

FACTS = {
    "v100-sxm2-16gb": "V100-SXM2-16GB",
    "v100-sxm2-32gb": "V100-SXM2-32GB",
    "v100-pcie-16gb": "V100-PCIe-16GB",
    "p100-sxm2-16gb": "P100-SXM2-16GB",
    "a100-sxm-40gb": "A100-SXM-40GB",
    "a100-sxm-80gb": "A100-SXM-80GB",
    "a100-pcie-80gb": "A100-PCIe-80GB",
    "h100-sxm-80gb": "H100-SXM-80GB",
    "h100-pcie-80gb": "H100-PCIe-80GB",
    "h200-sxm-141gb": "H200-SXM-141GB",
    "b200-sxm-180gb": "B200-SXM",
    "b300-sxm-288gb": "B300-SXM",
    "gb200-186gb": "GB200 (per GPU, NVL72)",
    "gb300-288gb": "GB300 (per GPU, NVL72)",
    "t4-16gb": "T4",
    "l4-24gb": "L4",
    "a10g-24gb": "A10G",
    "l40s-48gb": "L40S",
    "rtx-4090-24gb": "RTX 4090",
    "mi300x-192gb": "MI300X",
    "tpu-v2": "TPU v2",
    "tpu-v3": "TPU v3",
    "tpu-v4": "TPU v4",
    "tpu-v5e": "TPU v5e",
    "tpu-v5p": "TPU v5p",
    "tpu-v6e": "TPU v6e (Trillium)",
    "trainium1": "Trainium1",
    "trainium2": "Trainium2",
    "gaudi2": "Gaudi2",
    "gaudi3": "Gaudi3",
}


def figures(part: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The entries of a profile that state figures."""
    for item in part.values():
        if isinstance(item, dict):
            yield from [item] if {"value", "points"} & item.keys() else figures(item)


def test_there_are_enough() -> None:
    assert len(device_names()) >= 20
    assert len(cluster_names()) >= 15


@pytest.mark.parametrize("name", device_names())
def test_every_device_figure_has_a_source(name: str) -> None:
    assert lint(profile_folder() / "devices" / f"{name}.yaml") == []
    device = load_device(name)
    assert device.name == name
    stated = resolved_profile(name)
    assert {"memory", "reserve", "memory_bandwidth", "vector", "matrix_efficiency"} <= stated.keys()
    for figure in figures(stated):
        assert figure.get("source", "default") != "default", figure
    assert 0 < device.usable_bytes <= device.memory_bytes
    for curve in (device.matrix_efficiency, device.memory_efficiency):
        grown = curve.at(np.logspace(0, 15, 50))
        assert np.all((grown > 0) & (grown <= 1))
        assert np.all(np.diff(grown) >= 0)


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_figure_has_a_source(name: str) -> None:
    assert lint(profile_folder() / f"{name}.yaml") == []
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.device_count % cluster.node_size == 0
    assert cluster.group_sizes()[-1] == cluster.device_count
    for level in cluster.levels:
        assert level.device_byte_per_s <= level.byte_per_s
    stated = resolved_profile(name)
    for entry in (*stated.get("node", ()), *stated.get("network", ())):
        assert all(entry[figure]["source"] for figure in ("port", "latency", "efficiency"))


@pytest.mark.parametrize(("name", "key"), FACTS.items())
def test_device_figures_agree_with_the_published_ones(name: str, key: str) -> None:
    facts = json.loads(shared_path("reference/hardware_facts.json").read_text())["devices"][key]
    device, stated = load_device(name), resolved_profile(name)
    # what a driver reports: at most that many GiB, and some percent less where error correction takes a part
    assert 0.91 * facts["mem_gb"]["v"] * 10**9 < device.memory_bytes <= facts["mem_gb"]["v"] * 2**30
    assert device.memory_byte_per_s == facts["mem_bw"]["v"] * 1e9
    for kind, peak in device.matrix_flop_per_s.items():
        if kind in facts:
            assert peak == pytest.approx(facts[kind]["v"] * 1e12, rel=1e-12)
            assert stated["matrix"][kind].get("verified", True) == facts[kind]["verified"]
    assert stated["memory_bandwidth"].get("verified", True) == facts["mem_bw"]["verified"]
    if "best_matmul_bf16" in facts:
        # what a training run sustains stays below the best matmul ever measured alone
        sustained = device.matrix_efficiency.fractions[-1] * device.matrix_flop_per_s["bf16"]
        assert 0.8 < sustained / (facts["best_matmul_bf16"]["v"] * 1e12) < 1.01


def test_a_dgx_a100() -> None:
    cluster = load_cluster("dgx-a100", nodes=2)
    assert cluster.name == "dgx-a100 (2 nodes)"
    assert (cluster.device_count, cluster.node_size, cluster.group_sizes()) == (16, 8, (8, 16))
    nvlink, network = cluster.levels
    # 600 GB/s bidirectional is 300 each way; eight ports of 200 Gbit/s a node, one a device
    assert (nvlink.byte_per_s, nvlink.device_byte_per_s) == (300e9, 300e9)
    assert (network.byte_per_s, network.device_byte_per_s) == (200e9, 25e9)
    device = cluster.device(15)
    assert device.memory_bytes == round(79.15 * 2**30)
    assert device.matrix_flop_per_s["bf16"] == 312e12
    assert device.usable_bytes == device.memory_bytes - 2_000_000_000


def test_ports_are_dealt_out_to_devices() -> None:
    shared = load_cluster("p3.16xlarge", nodes=2).levels[1]
    assert (shared.byte_per_s, shared.device_byte_per_s) == (3.125e9, 3.125e9)  # one port, any device may fill it
    halved = load_cluster("p4d.24xlarge", nodes=2).levels[1]
    assert (halved.byte_per_s, halved.device_byte_per_s) == (50e9, 12.5e9)  # four ports, eight devices
    several = load_cluster("p5.48xlarge", nodes=2).levels[1]
    assert (several.byte_per_s, several.device_byte_per_s) == (400e9, 50e9)  # four ports a device
    price = load_cluster("p5.48xlarge").devices[0].price_per_hour
    assert price == pytest.approx(98.32 / 8)


def test_switch_tiers_fill_from_the_inside() -> None:
    assert [level.size for level in load_cluster("superpod-h100", nodes=1).levels] == [8]
    assert [level.size for level in load_cluster("superpod-h100", nodes=8).levels] == [8, 8]
    assert [level.size for level in load_cluster("superpod-h100", nodes=96).levels] == [8, 32, 3]
    with pytest.raises(HardwareError, match="40 nodes do not fill groups of 32"):
        load_cluster("superpod-h100", nodes=40)


def test_mixed_pools_repeat_their_pattern() -> None:
    pool = load_cluster("mixed-pool")
    assert [device.name for device in pool.devices] == ["v100-pcie-16gb", "rtx-4090-24gb", "a10g-24gb", "t4-16gb"]
    assert pool.device_types.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert load_cluster("mixed-pool", nodes=5).device_types.tolist()[16:] == [0] * 4
    assert len(load_cluster("mixed-pool", nodes=1).devices) == 1


def test_a_device_is_a_cluster_of_one() -> None:
    cluster = load_cluster("h100-sxm-80gb")
    assert (cluster.device_count, cluster.levels) == (1, ())
    with pytest.raises(HardwareError, match="single device"):
        load_cluster("h100-sxm-80gb", nodes=2)


def test_the_fingerprint_is_of_the_machine() -> None:
    one = load_cluster("dgx-a100").fingerprint
    assert one == load_cluster("dgx-a100", nodes=1).fingerprint
    assert one != load_cluster("dgx-a100", nodes=2).fingerprint
    assert len(one) == 64


@pytest.mark.parametrize(
    ("name", "nodes", "message"),
    [
        ("dgx-a10", None, "did you mean 'dgx-a100'"),
        ("a100-sxm-80", None, "did you mean 'a100-sxm-80gb'"),
        ("nothing like it", None, "see `shardplan hardware list`"),
        ("missing.yaml", None, "no such hardware profile file"),
        ("dgx-a100", 0, "0 nodes make no cluster"),
        ("v100-pcie-4", 2, "no level joins nodes"),
        ("tpu-v3-pod", 257, "more than max_nodes: 256"),
    ],
)
def test_what_is_not_there(name: str, nodes: int | None, message: str) -> None:
    with pytest.raises(HardwareError) as caught:
        load_cluster(name, nodes=nodes)
    assert message in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_cluster_is_not_a_device() -> None:
    with pytest.raises(HardwareError, match="is a cluster, not a device"):
        load_device("dgx-a100")


def test_no_profile_relies_on_defaults() -> None:
    for name in device_names():
        assert "default" not in resolved_profile(name)["sources"], name


def test_the_folder_in_a_wheel_and_beside_a_checkout(tmp_path: Path) -> None:
    package = tmp_path / "planner"
    package.mkdir()
    with pytest.raises(HardwareError, match="are missing"):
        _folder_of(package)
    beside = tmp_path / "hardware_profiles"
    beside.mkdir()
    (beside / "sources.yaml").write_text("a: b\n")
    assert _folder_of(package) == beside
    inside = package / "hardware_profiles"
    inside.mkdir()
    (inside / "sources.yaml").write_text("a: b\n")
    assert _folder_of(package) == inside

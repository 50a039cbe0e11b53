"""The clusters of 2025 against the published figures of their systems, and clusters of which a part is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import planner
from planner.errors import HardwareError
from planner.hardware import (
    Collective,
    collective_s,
    lint,
    load_cluster,
    profile_yaml,
    resolved_profile,
    send_terms,
)
from tests.shared_data import shared_path

SYSTEMS = {
    "dgx-h100": "H100-SXM",
    "grand-teton-h100": "H100-SXM-96GB-GrandTeton",
    "dgx-h200": "H200",
    "h800-8": "H800",
    "dgx-b200": "B200",
    "dgx-b300": "B300",
    "gb200-nvl72": "GB200-NVL72",
    "gb300-nvl72": "GB300-NVL72",
    "nd-mi300x-v5": "MI300X",
    "mi355x-8": "MI355X",
    "tpu-v5p-pod": "TPU v5p",
    "tpu-v6e-pod": "TPU v6e",
    "tpu7x-pod": "TPU7x (Ironwood)",
    "trn2.48xlarge": "Trainium2",
}


@pytest.mark.parametrize(("name", "system"), SYSTEMS.items())
def test_figures_agree_with_the_published_ones(name: str, system: str) -> None:
    said = json.loads(shared_path("reference/systems.json").read_text())["systems"][system]
    cluster = load_cluster(name, nodes=2)
    device, inside, outside = cluster.devices[0], cluster.levels[0], cluster.levels[-1]
    peaks = {kind: peak["value"] * 1e12 for kind, peak in said["peak_dense_tflops"].items() if peak}
    assert {kind: device.matrix_flop_per_s[kind] for kind in peaks} == peaks
    narrow = {"fp8", "mxfp8", "mxfp4", "nvfp4", "fp4"}
    assert narrow & device.matrix_flop_per_s.keys() == narrow & peaks.keys()
    assert device.memory_byte_per_s == said["memory_bw_gb_s"]["value"] * 1e9
    assert 0.91 * said["memory_gb"]["value"] * 1e9 < device.memory_bytes <= said["memory_gb"]["value"] * 2**30
    assert inside.device_byte_per_s == pytest.approx(
        1e9 * said["nvlink_gb_s_per_gpu_per_direction"]["value"], rel=0.002
    )
    if "topology" in said:
        assert outside.torus == int(said["topology"][0])
    else:
        assert cluster.node_size == said["nvlink_domain_gpus"]["value"]
        assert outside.device_byte_per_s == said["network_gbit_s_per_gpu_per_direction"]["value"] * 1e9 / 8


@pytest.mark.parametrize(
    ("devices", "nodes", "used"), [(8, 1, 8), (64, 1, 64), (72, 1, 72), (128, 2, 64), (256, 4, 64), (144, 2, 72)]
)
def test_racks_of_72_give_as_many_devices_each(devices: int, nodes: int, used: int) -> None:
    cluster = load_cluster("gb200-nvl72", devices=devices)
    assert (cluster.device_count, cluster.node_size) == (devices, used)
    assert cluster.fingerprint == load_cluster("gb200-nvl72", nodes=f"{nodes}x{used}").fingerprint
    assert cluster.levels[0].size == used
    if nodes > 1:
        # a port of 50 GB/s a GPU: those of GPUs that are not used idle
        assert cluster.levels[1].byte_per_s == used * 50e9
        assert cluster.levels[1].device_byte_per_s == 50e9


def test_a_part_of_a_node_is_named_and_can_be_written_out(tmp_path: Path) -> None:
    cluster = load_cluster("gb200-nvl72", nodes="4x64")
    assert cluster.name == "gb200-nvl72 (4 nodes of 64)"
    path = tmp_path / "part.yaml"
    path.write_text(profile_yaml(resolved_profile("gb200-nvl72", "4x64")))
    assert load_cluster(path).fingerprint == cluster.fingerprint


def test_shared_ports_and_unlike_devices_of_a_part() -> None:
    halved = load_cluster("p4d.24xlarge", nodes="2x4").levels[1]
    assert (halved.byte_per_s, halved.device_byte_per_s) == (50e9, 12.5e9)  # four ports that four devices have now
    assert load_cluster("mixed-pool", nodes="4x2").device_types.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    price = load_cluster("p5.48xlarge", nodes="1x4").devices[0].price_per_hour
    assert price == pytest.approx(98.32 / 4)  # the idle half is paid for


@pytest.mark.parametrize(
    ("nodes", "devices", "message"),
    [("4x", None, "4x nodes make no cluster"), ("2x73", None, "no 73 devices of a node"), (None, 0, "no 0 devices")],
)
def test_parts_that_are_not_there(nodes: str | None, devices: int | None, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        load_cluster("gb200-nvl72", nodes=nodes, devices=devices)


POOL = """
cluster: pool
devices:
  - {type: h100-sxm-80gb, count: 2}
  - {type: a100-sxm-80gb, count: 2}
nodes: 2
node:
  - level: inside
    size: 2
    port: {value: 100 GB/s, direction: per-direction}
    latency: 1 us
    efficiency: 100%
    nodes_of:
      a100-sxm-80gb: {port: {value: 40 GB/s, direction: per-direction}, latency: 3 us, efficiency: 50%}
network:
  - level: between
    port: {value: 10 GB/s, direction: per-direction, count: 2}
    latency: 10 us
    efficiency: 100%
    nodes_of:
      a100-sxm-80gb: {port: {value: 4 GB/s, direction: per-direction, count: 2}}
"""


def test_nodes_of_unlike_types_have_links_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(POOL)
    pool = load_cluster(path)
    payload, gather = 1e9, Collective.ALL_GATHER  # half of it passes the link of each of two ranks
    assert collective_s(pool, gather, [0, 1], payload) == pytest.approx(1e-6 + 0.5e9 / 100e9)
    assert collective_s(pool, gather, [2, 3], payload) == pytest.approx(3e-6 + 0.5e9 / (0.5 * 40e9))
    assert collective_s(pool, gather, [1, 2], payload) == pytest.approx(10e-6 + 0.5e9 / 4e9)  # the slower port counts
    whole = collective_s(pool, gather, range(4), payload)
    assert whole > collective_s(load_cluster(path, nodes=1), gather, [0, 1], payload)
    assert send_terms(pool, 0, 1).seconds(payload) >= 1e9 / (0.5 * 40e9)  # a transfer takes the slowest links
    alike = load_cluster(path, nodes=1)
    assert collective_s(alike, gather, [0, 1], payload) == pytest.approx(1e-6 + 0.5e9 / 100e9)


def test_links_of_devices_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    path.write_text(
        POOL.replace("      a100-sxm-80gb: {port: {value: 4 GB", "      a100-sxm-40gb: {port: {value: 4 GB")
    )
    assert [p.message for p in lint(path)] == ["no node has devices of type 'a100-sxm-40gb', or links of that name"]
    assert lint(path)[0].hint.startswith("did you mean 'a100-sxm-80gb'")


def test_groups_that_no_rack_of_72_holds() -> None:
    graph = planner.load_graph("gpt2", dims={"seq": 128})
    with pytest.raises(planner.JobError, match="on gb200-nvl72: take --nodes 1x64"):
        planner.plan(graph, load_cluster("gb200-nvl72"), planner.Job(64, tensor_parallel=(16,)))

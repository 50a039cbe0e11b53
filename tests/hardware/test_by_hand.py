"""Profiles from a few figures and from what other tools say; figures that cannot be are doubted."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from ruamel.yaml import YAML

from planner.errors import HardwareError, UsageError
from planner.hardware import (
    ClusterSketch,
    Collective,
    cluster_names,
    collective_s,
    from_astra,
    from_calculon,
    from_nccl_tests,
    kind_of,
    lint,
    load_cluster,
    profile_json_schema,
    read_link,
    sized,
    sketch_text,
    warnings,
    with_measured,
)
from planner.hardware.document import profile_folder

A100 = "a100-sxm-80gb"


def written(sketch: ClusterSketch, folder: Path) -> Path:
    path = folder / "lab.yaml"
    path.write_text(sketch_text(sketch))
    assert lint(path) == []
    return path


def nccl(ranks: int, latency_us: float, gb_per_s: float, test: str = "all_reduce_perf") -> str:
    """What nccl-tests print for a collective of exactly this latency and bus bandwidth."""
    factor = {"all_reduce_perf": 2 * (ranks - 1) / ranks, "broadcast_perf": 1}.get(test, (ranks - 1) / ranks)
    lines = ["# nccl-tests version 2.20.0", f"# Collective test starting: {test}", "# Using devices"]
    lines += [f"#  Rank {r:2} Group  0 Pid 1 on host device {r} [0x07] NVIDIA A100-SXM4-80GB" for r in range(ranks)]
    lines += ["#       size         count      type   redop    root     time   algbw   busbw #wrong     time"]
    for power in range(3, 31, 3):
        size = 2**power
        us = latency_us + size * factor / gb_per_s / 1e3
        row = f"{size:12} {size // 4:12} float sum -1 {us:8.2f} {size / us / 1e3:6.2f} 1.00 0 {us:8.2f} 1.0 1.0 0"
        lines.append(row)
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 60"])


def test_a_measured_collective_is_fitted_and_put_into_a_profile(tmp_path: Path) -> None:
    text = nccl(8, 25.0, 230.0)
    assert kind_of(text) == "nccl"
    kind, row = from_nccl_tests(text)
    assert kind is Collective.ALL_REDUCE
    assert row == {"ranks": 8, "latency": "25 us", "bandwidth": "230 GB/s"}
    path = tmp_path / "measured.yaml"
    path.write_text(with_measured("dgx-h100", "nvlink", {kind: row}, "measured"))
    assert lint(path) == []
    fits = load_cluster(path).levels[0].fits
    assert [(f.collective, f.ranks, f.byte_per_s) for f in fits if f.ranks == 8] == [(kind, 8, 230e9)]
    with pytest.raises(HardwareError, match="no level 'nvl'"):
        with_measured("dgx-h100", "nvl", {kind: row}, "measured")


def test_a_measured_broadcast_is_priced_as_measured(tmp_path: Path) -> None:
    """25 us and the whole payload at 100 GB/s: 10 MB take 125 us, in the profile as in the table."""
    kind, row = from_nccl_tests(nccl(8, 25.0, 100.0, "broadcast_perf"))
    assert row == {"ranks": 8, "latency": "25 us", "bandwidth": "100 GB/s"}
    path = tmp_path / "measured.yaml"
    path.write_text(with_measured("dgx-h100", "nvlink", {kind: row}, "measured"))
    assert collective_s(load_cluster(path), kind, range(8), 10e6) == pytest.approx(125e-6)


def test_a_table_without_its_test_needs_a_name() -> None:
    text = nccl(4, 20.0, 100.0).replace("# Collective test starting: all_reduce_perf", "")
    with pytest.raises(HardwareError, match="does not name the collective"):
        from_nccl_tests(text)
    assert from_nccl_tests(text, collective="all_gather")[0] is Collective.ALL_GATHER
    with pytest.raises(HardwareError, match="rows"):
        from_nccl_tests("\n".join(line for line in text.splitlines() if "float" not in line))


CALCULON = {
    "matrix": {"float16": {"tflops": 312, "gflops_efficiency": [[128, 0.99], [1, 0.6], [0, 0.1]]}},
    "vector": {"float16": {"tflops": 78, "gflops_efficiency": [[0, 0.1]]}},
    "mem1": {"GiB": 80, "GBps": 2048, "MB_efficiency": [[100, 0.95], [0, 0.3]]},
    "networks": [
        {"bandwidth": 300, "efficiency": 0.65, "size": 8, "latency": 0.00001},
        {"bandwidth": 25, "efficiency": 0.9, "size": 65536, "latency": 0.00002},
    ],
}


def test_a_system_of_calculon(tmp_path: Path) -> None:
    text = json.dumps(CALCULON)
    assert kind_of(text) == "calculon"
    path = written(from_calculon(text, name="cal"), tmp_path)
    cluster = load_cluster(path, nodes=2)
    inside, outside = cluster.levels
    assert (inside.size, inside.byte_per_s, inside.efficiency) == (8, 300e9, 0.65)
    assert (outside.size, outside.device_byte_per_s, outside.latency_s) == (2, 25e9, 2e-5)
    (device,) = cluster.devices
    assert device.memory_bytes == 80 * 2**30
    with pytest.raises(HardwareError, match=r"mem1\.GiB is missing"):
        from_calculon(json.dumps({**CALCULON, "mem1": {}}), name="cal")


def test_networks_of_astra_sim(tmp_path: Path) -> None:
    text = "topology: [ Ring, FullyConnected, Switch ]\nnpus_count: [ 2, 8, 4 ]\n"
    text += "bandwidth: [ 200.0, 100.0, 50.0 ]  # GB/s\nlatency: [ 500.0, 500.0, 2000.0 ]  # ns\n"
    assert kind_of(text) == "astra"
    cluster = load_cluster(written(from_astra(text, name="a", device=A100), tmp_path))
    assert [(level.size, level.device_byte_per_s) for level in cluster.levels] == [
        (2, 200e9),
        (8, 700e9 / 2),
        (4, 50e9),
    ]
    old = {"topology-name": "Hierarchical", "topologies-per-dim": ["Switch"], "units-count": [4],
           "links-count": [1], "link-latency": [500], "link-bandwidth": [50]}  # fmt: skip
    (level,) = load_cluster(written(from_astra(json.dumps(old), name="a", device=A100), tmp_path)).levels
    assert (level.size, level.byte_per_s) == (4, 50e9)
    with pytest.raises(HardwareError):
        from_astra(text.replace("Ring", "Torus"), name="a", device=A100)
    with pytest.raises(HardwareError):
        from_astra(text.replace("[ 2, 8, 4 ]", "[ 2, 8 ]"), name="a", device=A100)


def test_a_cluster_of_a_few_figures_says_its_defaults(tmp_path: Path) -> None:
    inside = sized([read_link("nvlink:450GB/s")], 8, where="--inside")
    outer = read_link("infiniband:400Gbit/s,ports=8,latency=9us")
    path = written(ClusterSketch("lab", "h100-sxm-80gb", inside, (outer,), 4), tmp_path)
    cluster = load_cluster(path)
    assert (cluster.device_count, cluster.levels[1].byte_per_s, cluster.levels[1].latency_s) == (32, 400e9, 9e-6)
    text = path.read_text()
    assert text.count("source: assumed, verified: false") == 3
    assert "usual for nvlink, not measured here" in text


@pytest.mark.parametrize(
    "text", ["nvlink", "nvlink:450", "nvlink:450Gb/s", "a:1GB/s,port=3", "a:1GB/s,ports=0", "a:1GB/s,latency=1"]
)
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        read_link(text)


def test_links_that_do_not_join_a_node_are_refused() -> None:
    with pytest.raises(UsageError, match="do not join 8"):
        sized([read_link("nvlink:1GB/s,size=3")], 8, where="--inside")
    with pytest.raises(UsageError, match="join 2 of 8"):
        sized([read_link("nvlink:1GB/s,size=2")], 8, where="--inside")
    with pytest.raises(UsageError, match="no device 'h100'"):
        ClusterSketch("lab", "h100").document()


LAB = """\
cluster: lab
devices: a100-sxm-80gb
node:
  - level: pcie
    size: 4
    port: {value: 32 GB/s, direction: per-direction}
    latency: 5 us
    efficiency: 76%
network:
  - level: ethernet
    port: {value: 100 Gbit/s, direction: per-direction}
    latency: 50 us
    efficiency: 0.8
nodes: 2
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("32 GB/s", "32 TB/s", 6, "PCIe of 32 TB/s is not plausible"),
        ("5 us", "10 s", 7, "a latency of 10 s is not plausible"),
        ("50 us", "20 ns", 12, "a latency of 20 ns is not plausible"),
        ("100 Gbit/s", "32 Tbit/s", 11, "a device sends 32.9 times as fast into 'ethernet' as into 'pcie'"),
        ("efficiency: 0.8", "efficiency: 0.01", 13, "1.0% of the bandwidth is not plausible"),
    ],
)
def test_what_cannot_be_is_doubted(old: str, new: str, line: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(LAB)
    assert warnings(path) == []
    path.write_text(LAB.replace(old, new, 1))
    assert lint(path) == []
    (found, *_) = [problem for problem in warnings(path) if problem.message == message]
    assert found.where.startswith(f"{path}:{line}:")
    assert found.hint


DEVICE = """\
device: mine
memory: 24 GB
memory_bandwidth: 600 GB/s
matrix: {bf16: 70 TFLOP/s, fp32: 35 TFLOP/s}
vector: 35 TFLOP/s
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("24 GB", "24 KB", "memory of 23.44 KiB is not plausible"),
        ("600 GB/s", "600 MB/s", "a bandwidth of 600 MB/s is not plausible"),
        ("600 GB/s", "3 GB/s", "23,333 FLOP for each byte"),
        ("35 TFLOP/s}", "350 TFLOP/s}", "fp32 is faster than 16-bit formats"),
        ("vector:", "reserve: 9 GB\nvector:", "the reserve is more than a quarter"),
    ],
)
def test_devices_that_cannot_be_are_doubted(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(DEVICE)
    assert warnings(path) == []
    path.write_text(DEVICE.replace(old, new, 1))
    assert any(message in problem.message for problem in warnings(path))


@pytest.mark.parametrize(
    ("matrix", "doubted"),
    [
        ("fp16: 70 TFLOP/s, fp32: 150 TFLOP/s", True),  # one 16-bit format is enough to compare with
        ("bf16: 70 TFLOP/s, fp32: 150 TFLOP/s", True),
        ("bf16: 40 TFLOP/s, fp16: 80 TFLOP/s, fp32: 150 TFLOP/s", False),  # less than twice the faster one
        ("bf16: 80 TFLOP/s, fp16: 40 TFLOP/s, fp32: 150 TFLOP/s", False),
        ("bf16: 70 TFLOP/s, fp32: 140 TFLOP/s", False),
        ("fp32: 150 TFLOP/s", False),  # nothing to compare with
    ],
)
def test_fp32_is_compared_with_the_faster_16_bit_format(matrix: str, doubted: bool, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(DEVICE.replace("bf16: 70 TFLOP/s, fp32: 35 TFLOP/s", matrix))
    assert lint(path) == []
    assert [p.message for p in warnings(path)] == ["fp32 is faster than 16-bit formats"] * doubted


def test_nothing_bundled_is_doubted() -> None:
    files = [profile_folder() / f"{name}.yaml" for name in cluster_names()]
    files += sorted((profile_folder() / "devices").glob("*.yaml"))
    assert {str(file): [str(p) for p in warnings(file)] for file in files if warnings(file)} == {}


@pytest.mark.parametrize("text", [LAB, DEVICE, LAB.replace("5 us", "+.5e1 us"), LAB.replace("0.8", "80 %")])
def test_the_schema_of_draft_7_accepts_what_lint_accepts(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(text)
    assert lint(path) == []
    schema = profile_json_schema()
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(YAML(typ="safe").load(text))

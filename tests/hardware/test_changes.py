"""Figures changed by hand, `network.bandwidth=200Gbit/s`: on links, devices and software, checked as files are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner import Cluster, HardwareError, ShardplanError, UsageError, load_cluster


@pytest.mark.parametrize(
    ("change", "read", "expected"),
    [
        ("network.bandwidth=200Gbit/s", lambda c: c.levels[1].byte_per_s, 8 * 25e9),
        ("infiniband.latency=5us", lambda c: c.levels[1].latency_s, 5e-6),
        ("network.port.count=4", lambda c: c.levels[1].byte_per_s, 4 * 50e9),
        ("node.0.efficiency=50%", lambda c: c.levels[0].efficiency, 0.5),
        ("device.memory=141 GB", lambda c: c.devices[0].memory_bytes, 141_000_000_000),
        ("device.matrix.bf16=1 PFLOP/s", lambda c: c.devices[0].matrix_flop_per_s["bf16"], 1e15),
        ("stack.launch=2 us", lambda c: c.stack.launch_s, 2e-6),
        ("node_price=80 $/h", lambda c: c.devices[0].price_per_hour, 10.0),
    ],
)
def test_a_field_takes_another_value(change: str, read: Any, expected: float) -> None:
    cluster = load_cluster("dgx-h100", nodes=2, changes=[change])
    assert read(cluster) == pytest.approx(expected)
    assert read(load_cluster("dgx-h100", nodes=2)) != pytest.approx(expected)
    assert cluster.name == f"dgx-h100 (2 nodes), {change}"
    assert cluster.fingerprint != load_cluster("dgx-h100", nodes=2).fingerprint


def test_several_changes_hold_together_and_leave_the_rest() -> None:
    plain = load_cluster("dgx-h100", nodes=2)
    cluster = load_cluster("dgx-h100", nodes=2, changes=["infiniband.latency=5us", "nvlink.latency=1us"])
    assert [level.latency_s for level in cluster.levels] == [1e-6, 5e-6]
    assert [level.byte_per_s for level in cluster.levels] == [level.byte_per_s for level in plain.levels]


def test_measured_collectives_do_not_hide_a_changed_link() -> None:
    assert load_cluster("dgx-a100").levels[0].fits
    changed = load_cluster("dgx-a100", changes=["nvlink.bandwidth=300GB/s"])
    assert (changed.levels[0].fits, changed.levels[0].byte_per_s) == ((), 150e9)


def test_a_single_device_and_devices_of_a_file_can_be_changed(tmp_path: Path) -> None:
    assert load_cluster("h100-sxm-80gb", changes=["device.memory=40GB"]).devices[0].memory_bytes == 40_000_000_000
    profile = tmp_path / "mine.yaml"
    profile.write_text(
        "cluster: mine\ndevices: toy\ndevice_types:\n"
        "  toy: {memory: 10 GB, memory_bandwidth: 1 TB/s, vector: 1 TFLOP/s, matrix: {fp32: 10 TFLOP/s}}\n"
        "node:\n  - {level: bus, size: 2, port: {value: 10 GB/s, direction: per-direction}, latency: 5 us,"
        " efficiency: 80%}\n"
    )
    cluster: Cluster = load_cluster(profile, changes=["device.memory=20 GB", "bus.bandwidth=20 GB/s"])
    assert (cluster.devices[0].memory_bytes, cluster.levels[0].byte_per_s) == (20_000_000_000, 20e9)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ("netwrk.bandwidth=3GB/s", UsageError, "did you mean 'network.bandwidth'"),
        ("network.bandwith=3GB/s", UsageError, "did you mean 'network.bandwidth'"),
        ("device.memry=3GB", UsageError, "did you mean 'device.memory'"),
        ("stack.lunch=3us", UsageError, "did you mean 'stack.launch'"),
        ("network.9.latency=3us", UsageError, "no field 'network.9.latency'"),
        ("cluster=mine", UsageError, "no field 'cluster'"),
        ("network.bandwidth", UsageError, "is no change"),
        ("network.bandwidth=3 GB", HardwareError, "'GB' is not a unit of a bandwidth (write GB/s)"),
        ("network.efficiency=120%", HardwareError, "is more than 1"),
        ("device.matrix.bf17=3 TFLOP/s", HardwareError, "'bf17' is not one of"),
        ("network.port.directoin=per-direction", HardwareError, "unknown key 'directoin'"),
    ],
)
def test_what_cannot_be_changed_is_said(change: str, kind: type[ShardplanError], said: str) -> None:
    with pytest.raises(kind) as error:
        load_cluster("dgx-h100", nodes=2, changes=[change])
    assert said in str(error.value)


def test_a_field_is_changed_once() -> None:
    with pytest.raises(UsageError, match=r"nvlink\.latency is changed twice"):
        load_cluster("dgx-h100", changes=["nvlink.latency=1us", "nvlink.latency=2us"])

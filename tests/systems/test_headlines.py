"""Headlines played from recorded layer times: direction, and size within what docs/systems.md states."""

from __future__ import annotations

import pytest

from benchmarks.headlines_recorded import bench_of, rings_s, two_stages_s
from planner.hardware import load_cluster
from planner.systems import get
from planner.systems._bench import Bench
from planner.systems._published import by_pipedream
from tests.shared_data import shared_path


def recorded(name: str, hardware: str, nodes: int, minibatch: int) -> Bench:
    folder = shared_path(f"instances/pipedream/{name}.graph.txt").parent
    return bench_of(folder, name, load_cluster(hardware, nodes=nodes), minibatch)


def test_vgg16_on_four_servers_over_10_gbit() -> None:
    """Published: 15-1 is 5.28 times as fast as data parallelism; here the direction, and more than three times."""
    bench = recorded("vgg16", "ethernet-10g", 4, 64)
    assert rings_s(bench) / two_stages_s(bench, 64) == pytest.approx(5.28, rel=0.4)


def test_alexnet_on_four_servers_over_10_gbit() -> None:
    """Published: 4.92 times."""
    bench = recorded("alexnet", "ethernet-10g", 4, 256)
    found = by_pipedream(bench, get("pipedream"))
    assert rings_s(bench) / found.iteration_s == pytest.approx(4.92, rel=0.15)


def test_resnet50_stays_data_parallel() -> None:
    """Published: the planner takes 16 replicas, as fast as data parallelism."""
    bench = recorded("resnet50", "ethernet-10g", 4, 128)
    found = by_pipedream(bench, get("pipedream"))
    assert found.plan.startswith("16 replicas")
    assert rings_s(bench) / found.iteration_s == pytest.approx(1.0, rel=0.05)


def test_gnmt_is_faster_in_stages_on_four_devices() -> None:
    """Published: 1.5 times (recalled)."""
    bench = recorded("gnmt", "ethernet-10g", 1, 64)
    assert 1.05 < rings_s(bench) / by_pipedream(bench, get("pipedream")).iteration_s < 1.6

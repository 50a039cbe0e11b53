"""The order of a node's devices goes from the profile into the plan, the exports and the runtime."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import planner
from planner.export import export
from planner.plans import seal

PAIRS = """\
cluster: crossed
devices: a40-48gb
nodes: 2
order: [0, 2, 1, 3]
node:
  - level: nvlink
    size: 2
    port: {value: 14.0625 GB/s, direction: per-direction, count: 4}
    latency: 5 us
    efficiency: 80%
  - level: pcie
    size: 2
    port: {value: 31 GB/s, direction: per-direction}
    latency: 15 us
    efficiency: 60%
network:
  - level: ethernet
    port: {value: 100 Gbit/s, direction: per-direction}
    latency: 20 us
    efficiency: 80%
"""


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "crossed.yaml"
    path.write_text(PAIRS)
    return path


def predicted(profile: Path, nodes: int, zero: int = 1) -> planner.Plan:
    graph = planner.load_graph("gpt2", dims={"seq": 64})
    cluster = planner.load_cluster(profile, nodes=nodes)
    plan = planner.predict(graph, cluster, planner.Job(16), planner.Degrees(zero=zero)).plan
    assert planner.check_plan(plan, graph, cluster).findings == ()
    other = planner.load_cluster(profile, nodes=nodes, changes=["order=[3, 2, 1, 0]"])
    assert planner.check_plan(plan, graph, other).findings != ()
    return plan


@pytest.mark.parametrize(("framework", "zero"), [("megatron", 1), ("deepspeed", 1), ("jax", 1)])
def test_the_script_shows_devices_in_the_order_of_the_ranks(framework: str, zero: int, profile: Path) -> None:
    written = export(predicted(profile, 1, zero), framework)
    assert 'export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0,2,1,3}"\n' in str(written.files["launch.sh"])
    assert "`CUDA_VISIBLE_DEVICES=0,2,1,3`" in str(written.files["EXPORT.md"])


def test_files_for_launchers_name_the_devices(profile: Path) -> None:
    written = export(predicted(profile, 2), "megatron")
    rows = [row.split(",") for row in str(written.files["hosts.csv"]).splitlines()[1:]]
    assert [row[3] for row in rows] == ["0", "2", "1", "3"] * 2
    assert [row[2] for row in rows] == ["node0"] * 4 + ["node1"] * 4


def test_the_plan_says_it(profile: Path) -> None:
    plan = predicted(profile, 1)
    assert plan.hardware.device_order == (0, 2, 1, 3)
    assert [plan.hardware.device_of(rank) for rank in range(4)] == [0, 2, 1, 3]
    assert "0, 2, 1, 3 (`CUDA_VISIBLE_DEVICES`)" in planner.report.report_to_text(planner.report.plan_report(plan))
    usual = planner.load_cluster("dgx-a100")
    graph = planner.load_graph("gpt2", dims={"seq": 64})
    named = planner.predict(graph, usual, planner.Job(16), planner.Degrees()).plan
    assert "device_order" not in planner.dump_plan(named)
    assert [named.hardware.device_of(rank) for rank in range(8)] == list(range(8))
    assert "CUDA_VISIBLE_DEVICES" not in str(export(named, "megatron").files["launch.sh"])


def test_ranks_run_on_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from planner.runtime.device import DeviceChoice

    choice = DeviceChoice("cuda", "nccl", gpus=4, order=(0, 2, 1, 3))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [choice.gpu_of(rank) for rank in range(4)] == [0, 2, 1, 3]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,1,3")
    assert [choice.gpu_of(rank) for rank in range(4)] == [0, 1, 2, 3]
    assert [DeviceChoice("cuda", "nccl", gpus=2).gpu_of(rank) for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("order", [(0, 2, 1), (0, 2, 2, 3)])
def test_an_order_that_is_none_is_found_in_the_file_alone(order: tuple[int, ...], profile: Path) -> None:
    plan = predicted(profile, 1)
    wrong = seal(dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, device_order=order)))
    findings = planner.check_plan(wrong).findings
    assert any("different devices in the order of a machine of 4" in str(finding) for finding in findings)

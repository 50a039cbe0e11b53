"""Rows that a reader would suspect of a handicap: what each system could do at the least, said without running it."""

from __future__ import annotations

import pytest

import planner
from planner.solvers.layouts import wide_meshes
from planner.systems import SystemRow, SystemSetting, compare_systems
from planner.systems.proposals import task_of


def rows(
    model: str, hardware: str, batch: int, *systems: str, nodes: int | None = None, devices: int = 0
) -> dict[str, SystemRow]:
    graph, cluster = planner.load_graph(model), planner.load_cluster(hardware, nodes=nodes)
    job = planner.Job(global_batch=batch, precision="fp16", devices=devices)
    found = compare_systems(planner.Pricer(graph, cluster, job), cluster, job, systems=systems)
    return {row.system: row for row in found.rows}


def test_one_device_takes_every_system_the_same_time() -> None:
    """Nothing to exchange and nothing to cut; weights that blocks share are updated once, 335.2M of them."""
    found = rows(
        "bert-large", "v100-pcie-4", 16, "byteps", "data-parallel", "herring", "pipedream", "gshard", devices=1
    )
    assert len({round(row.iteration_s, 9) for row in found.values()}) == 1
    for row in found.values():
        assert row.memory is not None
        assert row.memory.weights == pytest.approx(335.2e6 * 2, rel=1e-3)
        assert row.sent_bytes == 0
        assert any(words in row.plan for words in ("DP 1 x TP 1 x PP 1", "1 device", "mesh of 1"))


def test_a_mesh_in_one_line_is_never_left_out() -> None:
    """Batch along all 32 devices is data parallelism, which fits 16 GB: one all-reduce of 2 * 31/32 of 1.34 GB each."""
    row = rows("bert-48", "dgx-1v", 256, "mesh-tensorflow", nodes=4)["mesh-tensorflow"]
    assert "mesh of 32" in row.plan
    assert row.sent_bytes == pytest.approx(2 * 31 * 668.6e6 * 2, rel=0.01)


def test_what_there_is_of_a_node_is_a_virtual_worker() -> None:
    """Three devices of a node of four; a node of eight and half of another are three virtual workers of four."""
    three = rows("bert-large", "v100-pcie-4", 24, "hetpipe", devices=3)["hetpipe"]
    assert three.plan.startswith("1 virtual worker (NP)")
    assert three.devices == 3
    twelve = rows("bert-large", "dgx-1v", 96, "hetpipe", nodes=2, devices=12)["hetpipe"]
    assert twelve.plan.startswith("3 virtual workers (NP)")
    assert twelve.devices == 12


def test_reasons_name_bytes() -> None:
    """175B parameters at 16 B over the 8 devices of a virtual worker: 175e9 * 16 / 8 = 350 GB."""
    row = rows("gpt3-175b", "dgx-a100", 1536, "hetpipe", nodes=2)["hetpipe"]
    assert "GiB a device when cut evenly over 8" in row.reason
    stash = rows("gpt3-175b", "dgx-a100", 64, "pipedream", nodes=8)["pipedream"]
    assert "GiB of 75.2 GiB at the least" in stash.reason
    found = rows("resnet50", "fpga-pool", 64, "tofu")["tofu"]
    assert found.reason == "operators are cut over the devices of a node, and there is one"


def test_a_device_too_many_is_left_idle() -> None:
    """Nine devices and a batch of 32: eight share it by a mesh, and eight are a virtual worker of a whole node."""
    found = rows("gpt3-125m", "superpod-h100", 32, "gshard", "mesh-tensorflow", "hetpipe", nodes=2, devices=9)
    for row in found.values():
        assert row.devices == 8, row.system
        assert row.sent_bytes > 0
    assert "mesh of 8" in found["gshard"].plan
    assert found["hetpipe"].plan.startswith("1 virtual worker (NP)")


def test_the_model_axis_is_as_wide_as_weights_and_their_states_need() -> None:
    """GPT-3 in mixed precision with Adam: 174.6 G parameters x 16 bytes = 2.79 TB; 0.6 of 80 GB holds 48 GB, so 59 or
    more devices of nodes of 8: 64, then 96. 1,024 devices leave 16 batch ranks of 64; of 96 there are 10, and 8 divide
    1,536. One A100 holds GPT-2."""
    cluster, job = planner.load_cluster("dgx-a100", nodes=128), planner.Job(global_batch=1536)
    large, small = (
        SystemSetting(planner.Pricer(planner.load_graph(model), cluster, job), cluster, job)
        for model in ("gpt3-175b", "gpt2")
    )
    assert list(wide_meshes(task_of(large))) == [(16, 64), (8, 96)]
    assert list(wide_meshes(task_of(small))) == []

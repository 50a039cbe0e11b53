"""HetPipe on pools: what unlike virtual workers push and keep, and the plan file, which has one cut for all of them."""

from __future__ import annotations

import dataclasses

import pytest

import planner
from planner.hardware import Cluster
from planner.plans import dumps, loads, validate
from planner.systems import get, plan_system
from tests.space.instances import chain, cluster
from tests.systems.toy import run_system, setting

BLOCKS = chain([1.0, 1.0], elements=8.0, boundary=3.0, speeds=(1.0, 0.5))
"""Two blocks of 3 s, or 6 s on the second type, and 32 B of gradients each; 3 B between them, each way."""


def pool(rate: float, memory_bytes: tuple[int, int] = (10**6, 10**6)) -> Cluster:
    """Two nodes of two devices, one type each."""
    joined = cluster((2, 2), (1e6, rate), memory_bytes=memory_bytes, types=(0, 0, 1, 1))
    return dataclasses.replace(joined, node_size=2)


def test_a_wave_of_unlike_workers_is_pushed_and_pulled_through_the_nodes_ports() -> None:
    """A node's worker pushes half of its 64 B to the other node and serves half of the other's: 64 B out at 1 B/s.

    One wave of two mini-batches each is an iteration; the slow node alone takes 2 * 6 s.
    """
    found = run_system(get("hetpipe:policy=NP"), setting(BLOCKS, pool(1.0), 4))
    assert found.plan == "2 virtual workers (NP), Nm 2, PP 2, cut by kind, micro-batch 1 x 2"
    assert found.iteration_s == pytest.approx(64)
    # 2 * 64 B of weights, and 2 workers * 2 mini-batches * (3 + 3) B between stages.
    assert found.sent_bytes == pytest.approx(128 + 24)
    assert found.devices == 4


def test_all_work_at_the_pace_of_the_slowest_worker() -> None:
    found = run_system(get("hetpipe:policy=NP"), setting(BLOCKS, pool(1e6), 4))
    assert found.iteration_s == pytest.approx(12, rel=1e-4)
    # The fast node's two devices are busy for 2 * 3 s of 12 s, the slow one's all the time: (2 * 6 + 2 * 12) / 48.
    assert found.bubble == pytest.approx(1 - 36 / 48, rel=1e-4)


def test_the_fullest_device_is_looked_for_among_all_kinds() -> None:
    """The fast type has less memory, of which 5 % are left free; the slow type sets the pace."""
    found = run_system(get("hetpipe:policy=NP"), setting(BLOCKS, pool(1e6, memory_bytes=(500, 10**6)), 4))
    assert found.capacity_bytes == 475


@pytest.mark.parametrize("policy", ["NP", "HD"])
def test_the_plan_has_one_cut_for_unlike_workers_and_tells_what_that_costs(policy: str) -> None:
    graph, machine = planner.load_graph("resnet50"), planner.load_cluster("mixed-pool")
    job = planner.Job(global_batch=256, precision="fp16")
    name = f"hetpipe:policy={policy}"
    (row,) = planner.compare_systems(planner.Pricer(graph, machine, job), machine, job, systems=[name]).rows
    plan = plan_system(name, graph, machine, job)
    assert validate(loads(dumps(plan)), planner.rebatch(graph, plan.micro_batches.size), machine) == []
    assert plan.system is not None
    note = plan.system.notes[1]
    assert "one cut for all virtual workers" in note
    assert f"{row.iteration_s:.4g} s" in note
    assert row.iteration_s <= plan.predictions.iteration_s * (1 + 1e-3)
    assert sorted(rank for stage in plan.stages for rank in stage.ranks) == list(range(16))

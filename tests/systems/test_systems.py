"""Systems as data, and what they decide on small clusters, by properties that can be said without running them."""

from __future__ import annotations

from functools import cache

import pytest

import planner
from planner.errors import UsageError
from planner.exchange import names as sync_names
from planner.schedules import names as schedule_names
from planner.sharding.searches import names as sharding_names
from planner.systems import SYSTEMS, Comparison, Semantics, SystemRow, compare_systems, names

PUBLISHED = (
    "bapipe", "byteps", "chimera", "gpipe", "gshard", "herring", "hetpipe", "mesh-tensorflow", "parallax", "pipedream",
    "pipedream-2bw", "1f1b", "pipelined-backprop", "pipemare", "tofu",
)  # fmt: skip


@cache
def compared(model: str, hardware: str, batch: int, precision: str, semantics: str = "sync") -> Comparison:
    graph, cluster = planner.load_graph(model), planner.load_cluster(hardware)
    job = planner.Job(global_batch=batch, precision=precision)
    return compare_systems(planner.Pricer(graph, cluster, job), cluster, job, semantics=semantics)


def rows(found: Comparison) -> dict[str, SystemRow]:
    return {row.system: row for row in found.rows}


def test_all_published_systems_are_there() -> None:
    assert set(PUBLISHED) | {"auto", "data-parallel"} == set(names())


@pytest.mark.parametrize("name", names())
def test_a_system_names_what_exists(name: str) -> None:
    system = SYSTEMS.get(name)
    assert system.key == name
    assert set(system.schedules) <= set(schedule_names())
    assert not system.exchange or system.exchange in sync_names()
    if system.layouts is not None:
        assert {system.layouts.search, system.layouts.within_memory or system.layouts.search} <= set(sharding_names())
    assert system.source
    assert system.backend


def test_gnmt_on_four_devices_over_pcie() -> None:
    found = rows(compared("gnmt-8", "v100-pcie-4", 64, "fp32"))
    refused = {name: row.reason for name, row in found.items() if not row.feasible}
    assert refused.keys() == {"megatron", "torchtitan"}
    assert all("trains decoders" in reason for reason in refused.values())
    # What a schedule is known for, whatever the prices: versions and staleness of a pipeline of four.
    assert found["pipelined-backprop"].staleness == 6  # 2 (S - s), S = 4
    assert found["pipelined-backprop"].weight_versions == 1
    assert (found["pipedream-2bw"].weight_versions, found["pipedream-2bw"].staleness) == (2, 1)
    for name in ("gpipe", "1f1b", "chimera", "bapipe", "byteps", "tofu", "gshard", "mesh-tensorflow"):
        assert (found[name].weight_versions, found[name].staleness) == (1, 0)
        assert found[name].semantics is Semantics.SYNC
    alike = [row for row in found.values() if row.feasible and row.semantics is Semantics.SYNC and not row.alters]
    assert found["auto"].iteration_s == min(row.iteration_s for row in alike)


def test_cells_are_within_what_they_can_be() -> None:
    found = rows(compared("gnmt-8", "v100-pcie-4", 64, "fp32"))
    for name, row in found.items():
        if not row.feasible:
            continue
        assert row.memory is not None
        assert 0 < row.memory.total <= row.capacity_bytes, name
        assert 0 <= row.bubble < 1, name
        assert 1 <= row.devices <= row.available == 4, name
        assert (row.sent_bytes > 0) == (row.devices > 1), name
        assert row.samples_per_s == pytest.approx(64 / row.iteration_s), name
        assert row.weight_versions >= 1, name
        assert (row.semantics is Semantics.ASYNC) == (row.staleness > 0), name
        for link in row.links:
            assert 0 < link.out_bytes <= link.total_bytes, name
    # BaPipe and PipeDream compare their plans with data parallelism.
    assert found["bapipe"].iteration_s <= found["data-parallel"].iteration_s * (1 + 1e-9)
    assert found["pipedream"].iteration_s <= found["data-parallel"].iteration_s * (1 + 1e-9)


def test_asynchronous_rows_stand_behind_and_win_only_when_allowed() -> None:
    sync = compared("gnmt-8", "v100-pcie-4", 64, "fp32").rows
    kinds = [row.semantics for row in sync if row.feasible]
    assert kinds == sorted(kinds, key=lambda kind: kind is Semantics.ASYNC)
    free = compared("gnmt-8", "v100-pcie-4", 64, "fp32", "any")
    times = [row.iteration_s for row in free.rows if row.feasible]
    assert times == sorted(times)
    best = rows(free)["auto"]
    assert best.iteration_s == times[0]


def test_less_memory_than_gpipe_for_the_same_cuts() -> None:
    """1F1B never keeps more micro-batches than GPipe, so it is never slower when both choose freely."""
    found = rows(compared("gnmt-8", "v100-pcie-4", 64, "fp32"))
    assert found["1f1b"].iteration_s <= found["gpipe"].iteration_s * (1 + 1e-9)


def test_what_does_not_fit_says_why() -> None:
    graph, cluster = planner.load_graph("gpt2-xl"), planner.load_cluster("v100-pcie-4")
    job = planner.Job(global_batch=4, precision="fp16")
    asked = ["byteps", "data-parallel"]
    found = rows(compare_systems(planner.Pricer(graph, cluster, job), cluster, job, systems=asked))
    for row in found.values():
        assert not row.feasible
        assert "GiB of 15 GiB" in row.reason


def test_unknown_names_are_refused() -> None:
    graph, cluster = planner.load_graph("gnmt-8"), planner.load_cluster("v100-pcie-4")
    job = planner.Job(global_batch=64, precision="fp32")
    pricer = planner.Pricer(graph, cluster, job)
    with pytest.raises(UsageError, match="gpipe"):
        compare_systems(pricer, cluster, job, systems=["gpip"])
    with pytest.raises(UsageError, match="semantics"):
        compare_systems(pricer, cluster, job, semantics="maybe")

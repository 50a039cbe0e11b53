"""Options behind names, allocations of HetPipe, bytes over links, servers of rows: by hand on small cases."""

from __future__ import annotations

from functools import cache

import pytest

import planner
from planner.errors import UsageError
from planner.solvers.cluster_chains.stages import allocations
from planner.systems import SystemRow, SystemSetting, compare_systems, get


def setting(model: str, hardware: str, batch: int, *, nodes: int | None = None, **options: str) -> SystemSetting:
    graph, cluster = planner.load_graph(model), planner.load_cluster(hardware, nodes=nodes)
    job = planner.Job(global_batch=batch, **options)  # type: ignore[arg-type]
    return SystemSetting(planner.Pricer(graph, cluster, job), cluster, job)


TABLES = "dlrm", "dgx-a100", 65536, "1f1b", "data-parallel", "parallax", "auto"
"""A model whose largest tables no device holds."""


@cache
def rows(
    model: str, hardware: str, batch: int, *systems: str, nodes: int | None = None, **options: str
) -> dict[str, SystemRow]:
    graph, cluster = planner.load_graph(model), planner.load_cluster(hardware, nodes=nodes)
    job = planner.Job(global_batch=batch, **options)  # type: ignore[arg-type]
    found = compare_systems(planner.Pricer(graph, cluster, job), cluster, job, systems=systems)
    return {row.system: row for row in found.rows}


def test_an_option_is_set_behind_the_name_and_wrong_ones_are_refused() -> None:
    assert get("byteps:cpu_machines=4").options["cpu_machines"] == "4"
    assert get("byteps:cpu_machines=4").key == "byteps:cpu_machines=4"
    assert get("gpipe").key == "gpipe"
    with pytest.raises(UsageError, match="cpu_machines"):
        get("byteps:cpu_machine=4")
    with pytest.raises(UsageError, match="no option"):
        get("gpipe:depth=2")
    found = rows("gnmt-8", "ethernet-25g", 64, "byteps:cpu_machines=some", precision="fp16")
    assert "cpu_machines" in found["byteps:cpu_machines=some"].reason


def test_data_parallelism_takes_any_exchange_scheme() -> None:
    names = ("byteps:cpu_machines=2", "data-parallel:exchange=byteps,cpu_machines=2", "data-parallel:exchange=bytep")
    found = rows("bert-large", "ethernet-25g", 512, *names, nodes=4, precision="fp16")
    byteps, same, unknown = (found[name] for name in names)
    assert (same.iteration_s, same.sent_bytes, same.plan) == (byteps.iteration_s, byteps.sent_bytes, byteps.plan)
    assert "did you mean 'byteps'" in unknown.reason


def test_cpu_machines_take_bytes_off_the_machines() -> None:
    """n = 4 machines, k without accelerators, M bytes: 2n(n-1)/(n^2+kn-2k) M each way at a machine.

    k = 0: 2 * 4 * 3 / 16 = 1.5 M; k = 2: 24 / (16 + 8 - 4) = 1.2 M; k = 4: 24 / (16 + 16 - 8) = 1 M.
    """
    names = ("byteps", "byteps:cpu_machines=2", "byteps:cpu_machines=n", "data-parallel")
    found = rows("bert-large", "ethernet-25g", 512, *names, nodes=4, precision="fp16")
    sent = {name: found[name].links[-1].out_bytes for name in names}
    assert sent["byteps"] == pytest.approx(sent["data-parallel"])
    assert sent["byteps:cpu_machines=2"] == pytest.approx(sent["byteps"] * 1.2 / 1.5)
    assert sent["byteps:cpu_machines=n"] == pytest.approx(sent["byteps"] / 1.5)


def test_cpu_machines_need_a_network() -> None:
    row = rows("gnmt-8", "v100-pcie-4", 64, "byteps:cpu_machines=2", precision="fp32")["byteps:cpu_machines=2"]
    assert not row.feasible
    assert "network" in row.reason


def test_allocations_of_a_pool_of_four_types() -> None:
    """Servers of 4 V100, 4 RTX 4090, 4 A10G, 4 T4 (ranks 0-3, 4-7, 8-11, 12-15), fastest 4090, then V100, A10G, T4."""
    found = allocations(planner.load_cluster("mixed-pool"), 16, [2.0, 1.0, 3.0, 4.0])
    assert found["NP"] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert found["ED"] == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert sorted(found["HD"]) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]


def test_a_policy_that_does_not_come_out_says_so() -> None:
    found = rows("gnmt-8", "v100-pcie-4", 64, "hetpipe:policy=HD", precision="fp32")
    assert "possible: NP" in found["hetpipe:policy=HD"].reason


def test_a_straight_pipeline_sends_its_boundaries_alone() -> None:
    """One pipeline of four devices, two a switch: the one boundary between the switches passes the host's ports.

    What the host level carries is the bytes of that boundary forth and back, so less than what leaves the devices.
    """
    row = rows("gnmt-8", "v100-pcie-4", 64, "pipemare", precision="fp32")["pipemare"]
    inner, outer = row.links
    assert (inner.level, outer.level) == ("pcie-switch", "host")
    assert row.sent_bytes == pytest.approx(inner.total_bytes)
    assert outer.total_bytes < inner.total_bytes
    assert outer.out_bytes + outer.in_bytes == pytest.approx(outer.total_bytes)


def test_tables_on_servers_leave_the_devices_and_never_win_silently() -> None:
    """24 billion parameters with 16 bytes of state do not fit a device; their servers hold them in host memory."""
    found = rows(*TABLES)
    assert "361 GiB of 75.2 GiB" in found["data-parallel"].reason
    row = found["parallax"]
    assert row.feasible
    assert row.memory is not None
    assert row.memory.weights < 1e9
    assert "rows that were looked up" in row.alters
    assert not found["auto"].plan.startswith("as parallax")
    plain = rows("dlrm", "dgx-a100", 65536, "parallax", optimizer="sgd")["parallax"]
    assert plain.alters == ""


def test_gpipe_recomputes_whole_cells_where_blocks_do_not_fit() -> None:
    """Mixtral's logits of 128 micro-batches and more do not fit beside the head; a cell's input alone does."""
    row = rows("mixtral-8x7b", "dgx-a100", 512, "gpipe", nodes=8)["gpipe"]
    assert row.feasible
    assert "whole stages" in row.plan


def test_micro_batches_reach_the_largest_that_a_device_holds() -> None:
    sizes = setting("dlrm", "dgx-a100", 65536).sizes
    assert (sizes[0], sizes[-1]) == (1, 65536)
    assert len(sizes) == 13


def test_the_best_of_all_may_share_operators_among_ranks() -> None:
    """The largest tables do not fit one device, so every plan without sharing fails, and eight ranks share them."""
    found = rows(*TABLES)
    assert not found["1f1b"].feasible
    row = found["auto"]
    assert row.plan.startswith("DP 1 x TP 8 x PP 1")
    assert row.memory is not None
    assert row.memory.total < row.capacity_bytes
    assert row.devices == 8
    assert 0 <= row.bubble < 1
    assert row.sent_bytes > 0

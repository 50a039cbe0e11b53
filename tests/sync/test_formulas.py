"""Closed forms against published and reference figures, each case by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.errors import UsageError
from planner.sync import formulas as f
from planner.sync.partitions import best_partitions, fit_partitions, search_partitions
from tests.shared_data import shared_path


def _cases(system: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for case in json.loads(shared_path("reference/known_answers.json").read_text())[system]:
        found.setdefault(case["name"], []).append(case)
    return found


def test_known_byteps_shares() -> None:
    for case in _cases("BytePS")["optimal split"]:
        n = case["input"]["n"]
        for text, want in case["expect"].items():
            k = int(text)
            shares = f.byteps_shares(n, k)
            assert f.byteps_s(1, n, k, 1) == pytest.approx(want["t_over_M_B"], rel=1e-12)
            assert k * shares.cpu == pytest.approx(want["cpu_share_total"], rel=1e-12)
            assert shares.gpu == pytest.approx(want["gpu_share_each"], rel=1e-12)
            speedup = f.ring_all_reduce_s(1, n, 1) / f.byteps_s(1, n, k, 1)
            assert speedup == pytest.approx(want["speedup_vs_allreduce"], rel=1e-12)
            if want["vs_ps"] is not None:
                servers = f.separate_server_s(1, n, k, 1) / f.byteps_s(1, n, k, 1)
                assert servers == pytest.approx(want["vs_ps"], rel=1e-12)


def test_known_byteps_inside_a_machine() -> None:
    (case,) = _cases("BytePS")["intra-machine PCIe (2 switches x l GPUs, n=2l): bytes per switch uplink to CPU"]
    gpus, payload = case["input"]["l"], case["input"]["M"]
    assert f.pcie_uplink_bytes(payload, 2, gpus, cpu_assisted=False) == case["expect"]["ring_allreduce_per_direction"]
    assert f.pcie_uplink_bytes(payload, 2, gpus) == case["expect"]["cpu_assisted_per_direction"]


def test_known_herring_loads() -> None:
    (case,) = _cases("Herring")["largest server load, variables 100,1,1,1,50,1,1,1 MB on 4 nodes"]
    sizes = [100, 1, 1, 1, 50, 1, 1, 1]
    assert max(f.round_robin_loads(sizes, 4)) == case["expect"]["round_robin"]
    assert max(f.balanced_loads(sizes, 4)) == case["expect"]["balanced_fusion"]


def test_known_herring_bytes() -> None:
    (case,) = _cases("Herring")["per-node NIC bytes each way, sharded colocated PS over n nodes"]
    for n, megabytes, ms in zip(
        case["input"]["n"], case["expect"]["bytes_MB"], case["expect"]["time_ms_at_100Gbps_duplex"], strict=True
    ):
        assert f.sharded_server_bytes(case["input"]["M_MB"], n) == pytest.approx(megabytes, rel=1e-12)
        assert f.herring_s(case["input"]["M_MB"] * 1e6, n, 12.5e9) * 1e3 == pytest.approx(ms, rel=1e-12)


@pytest.mark.parametrize("touched", [0.02, 0.65])
def test_known_parallax_transfers(touched: float) -> None:
    """Evenly placed are m = 4 variables in the case with alpha 0.02, m = 1 in the other, by their dense bytes."""
    (case,) = _cases("Parallax")[f"transfer per machine{' (in+out)' * (touched == 0.02)}, w=100 MB alpha={touched} N=8"]
    one, many = case["expect"]["one_var"], case["expect"]["m_vars"]
    found = f.parallax_transfer(100, touched, 8)
    assert found.dense_servers == pytest.approx(one["dense_PS_server"])
    assert found.dense_all_reduce == pytest.approx(one["dense_AR"])
    assert found.sparse_servers == pytest.approx(one["sparse_PS_server"])
    assert found.sparse_gather == pytest.approx(one["sparse_AR_gatherv"])
    variables = round(many["dense_AR"] / one["dense_AR"])
    found = f.parallax_transfer(100, touched, 8, variables)
    assert found.dense_servers == pytest.approx(many["dense_PS"])
    assert found.dense_all_reduce == pytest.approx(many["dense_AR"])
    assert found.sparse_servers == pytest.approx(many["sparse_PS"])
    assert found.sparse_gather == pytest.approx(many["sparse_AR_gatherv"])


def test_known_parallax_partitions() -> None:
    (case,) = _cases("Parallax")["partition count argmin of c+b/P+aP, b=64 a=0.25"]
    assert best_partitions(64, 0.25) == case["expect"]["closed"]
    fit = fit_partitions({p: 1 + 64 / p + 0.25 * p for p in (2, 4, 8, 16, 32, 64)})
    assert fit.best == case["expect"]["P"]
    assert fit.best_s == pytest.approx(case["expect"]["time"])


def test_known_parallax_ratios() -> None:
    (case,) = _cases("Parallax")["throughput ratios LM 48 GPUs (274k vs 45.5k Horovod, 98.9k TF-PS)"]
    assert pytest.approx(case["expect"]["horovod"]) == 274 / 45.5
    assert pytest.approx(case["expect"]["tf"]) == 274 / 98.9


def test_known_zero_memory_and_elements() -> None:
    for case in _cases("ZeRO")["model-state bytes/GPU (mixed precision Adam K=12)"]:
        parameters, ranks = case["input"]["params"], case["input"]["N"]
        for stage, name in enumerate(("DP", "Pos", "Pos+g", "Pos+g+p")):
            assert f.zero_state_bytes(parameters, ranks, stage) == pytest.approx(case["expect"][name], rel=1e-12)
        for stage, name in enumerate(("DP", "s1", "s2", "s3")):
            assert f.zero_elements(parameters, stage) == case["expect"]["comm_elements"][name]


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_known_split_of_an_all_reduce(ranks: int) -> None:
    (case,) = _cases("AutoDDL")["all-reduce split"]
    assert case["expect"] == {"allreduce": "2(P-1)/P", "reduce_scatter": "(P-1)/P", "all_gather": "(P-1)/P"}
    assert f.all_reduce_bytes(1, ranks) == pytest.approx(2 * (ranks - 1) / ranks)
    assert f.reduce_scatter_bytes(1, ranks) == pytest.approx((ranks - 1) / ranks)


def test_known_wsp_staleness() -> None:
    for case in _cases("HetPipe")["staleness"]:
        found = f.wsp_staleness(case["input"]["Nm"], case["input"]["D"])
        want = case["expect"]
        assert (found.local, found.wave, found.overall) == (want["s_local"], want["wave"], want["s_global"])


def test_byteps_shares_follow_the_bandwidth_of_the_cpu_machines() -> None:
    """4 GPU machines, 2 CPU machines of twice the bandwidth: x = 2*3*2/(16+2*2*2) = 1/2, so they sum everything."""
    assert f.byteps_shares(4, 2, 2.0) == f.BytePSShares(0.5, 0.0)
    assert f.byteps_shares(4, 2, 0.5).cpu == pytest.approx(2 * 3 * 0.5 / (16 + 2 * 2 * 0.5))
    assert f.byteps_shares(4, 9) == f.BytePSShares(1 / 9, 0.0)


@pytest.mark.parametrize("k", range(9))
def test_byteps_lies_between_a_ring_and_one_copy(k: int) -> None:
    assert 1.0 <= f.byteps_s(1, 8, k, 1) <= 1.75


def test_partition_search_stops_when_the_time_rises() -> None:
    asked: list[int] = []

    def measure(count: int) -> float:
        asked.append(count)
        return 2 + 30 / count + 0.3 * (count - 1)  # least at sqrt(30/0.3) = 10

    fit = search_partitions(measure, 4)
    assert asked == [4, 8, 16, 2]
    assert fit.best == 10
    assert fit.fixed_s == pytest.approx(2)
    assert fit.seconds(10) == pytest.approx(2 + 3 + 2.7)


def test_two_samples_give_the_better_one() -> None:
    assert fit_partitions({4: 1.5, 8: 1.25}).best == 8


def test_partitions_outside_the_samples_are_not_taken() -> None:
    assert fit_partitions({1: 101.0, 2: 51.0, 4: 26.0}).best == 4


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: f.zero_parts(8, 4),
        lambda: f.byteps_shares(0, 0),
        lambda: f.byteps_shares(4, -1),
        lambda: f.byteps_shares(4, 1, 0),
        lambda: f.wsp_staleness(0, 0),
        lambda: f.separate_server_s(1, 4, 0, 1),
        lambda: fit_partitions({}),
        lambda: fit_partitions({0: 1.0}),
        lambda: search_partitions(float, 0),
        lambda: best_partitions(-1, 1),
    ],
)
def test_refuses(wrong: Any) -> None:
    with pytest.raises(UsageError):
        wrong()

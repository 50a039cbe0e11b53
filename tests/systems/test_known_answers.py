"""The reference answers that no other package's tests cover, and where every other group is covered.

| group | covered in |
|---|---|
| GPipe, 1F1B-flush, Interleaved-1F1B, Chimera, GEMS, BaPipe, PipeDream (staleness), PipeDream-2BW, PipeMare, | |
| PipelinedBackprop, SpecTrain, HetPipe (staleness), DAPPLE, ZeroBubble, Hanayo, BPipe, DualPipe, | |
| Seq1F1B | tests/simulate |
| PipeDream (toy partitions), Piper (cost, released solver) | tests/partition |
| Tofu, GShard, Mesh-TF, ZeRO, AutoDDL | tests/sharding |
| BytePS, Herring, Parallax, ZeRO, AutoDDL (split of an all-reduce) | tests/sync |
| Alpa, Archer-MTPP, HetPipe (partition), Piper (counts of a chain) | here |
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from planner.graph.ideals import enumerate_ideals
from planner.solvers.partition.auto import solve
from planner.solvers.partition.hetpipe_dp import solve_hetpipe
from planner.solvers.partition.iteration_dp import solve_iteration
from planner.space.partition.hetpipe import HetPipeProblem, uniform_links
from planner.space.partition.iteration import IterationProblem
from planner.space.partition.max_load import MaxLoadProblem
from tests.shared_data import shared_path

ELSEWHERE = {
    "tests/simulate": (
        "GPipe", "1F1B-flush", "Interleaved-1F1B", "Chimera", "GEMS", "BaPipe", "PipeDream", "PipeDream-2BW",
        "PipeMare", "PipelinedBackprop", "SpecTrain", "DAPPLE", "ZeroBubble", "Hanayo", "BPipe", "DualPipe", "Seq1F1B",
    ),
    "tests/sharding": ("Tofu", "GShard", "Mesh-TF"),
    "tests/sync": ("BytePS", "Herring", "Parallax", "ZeRO", "AutoDDL"),
}  # fmt: skip
HERE = ("Alpa", "Archer-MTPP", "HetPipe", "Piper")


@cache
def known() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(shared_path("reference/known_answers.json").read_text())
    return found


def case(group: str, name: str) -> dict[str, Any]:
    return next(c for c in known()[group] if c["name"] == name)


def test_every_group_has_its_place() -> None:
    assert set(known()) == set(HERE).union(*ELSEWHERE.values())


def stages_of(times: list[float], micro_batches: int) -> IterationProblem:
    """As many devices as layers, one configuration of one device."""
    n = len(times)
    table = np.full((n, n, 1), np.inf)
    for i in range(n):
        for j in range(i, n):
            table[i, j, 0] = sum(times[i : j + 1])
    return IterationProblem(table, np.array([1]), n, micro_batches)


def test_alpa_pipeline_latency() -> None:
    """Sum of the stages and M - 1 times the slowest; one layer on each of three devices."""
    given = case("Alpa", "pipeline latency sum t + (B-1) max t")
    problem = stages_of(given["input"]["t"], given["input"]["B"])
    assert solve_iteration(problem).objective == given["expect"]["T"]


def test_alpa_choice_of_slowest_stage() -> None:
    expected = case("Alpa", "choice of t_max")["expect"]
    even, uneven = stages_of([3, 3], 4), stages_of([2, 5], 4)
    assert solve_iteration(even).objective == expected["T33"] == expected["best"]
    assert solve_iteration(uneven).objective == expected["T25"]


def blocks_problem(
    work: list[float], edges: list[list[int]], sizes: list[float], devices: int, speed: float
) -> MaxLoadProblem:
    n = len(work)
    return MaxLoadProblem(
        devices,
        0,
        math.inf,
        np.array(work, float),
        np.array(work, float),
        np.zeros(n),
        np.ones(n, bool),
        np.zeros(n, bool),
        np.full(n, -1),
        np.array(edges, np.int64).reshape(-1, 2),
        np.array(sizes, float) / speed,
    )


CHAIN = [[0, 1], [1, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize(("name", "devices"), [("chain 4,3,2,6,5 k=2", 2), ("chain 4,3,2,6,5 k=3", 3)])
def test_archer_chain(name: str, devices: int) -> None:
    expected = case("Archer-MTPP", name)["expect"]
    problem = blocks_problem([4, 3, 2, 6, 5], CHAIN, [0] * 5, devices, 1)
    result = solve(problem, time_limit_s=10)
    assert result.objective == expected["opt"]
    assert result.proven
    assert sum(problem.accelerator_ms) / devices == pytest.approx(expected["lower_bound"])


def test_archer_chain_with_sizes() -> None:
    """The same source's chain with sizes 4, 8, 1, 2, 0 over links of 4: 11.25."""
    problem = blocks_problem([4, 3, 2, 6, 5], CHAIN, [4, 8, 1, 2, 0], 2, 4)
    assert solve(problem, time_limit_s=10).objective == 11.25


def test_archer_diamond() -> None:
    entry = case("Archer-MTPP", "diamond 6 nodes k=2 B=1")
    given, expected = entry["input"], entry["expect"]
    problem = blocks_problem(given["work"], given["edges"], given["size"], 2, 1)
    result = solve(problem, time_limit_s=10)
    assert result.objective == expected["opt"]
    assert sum(problem.accelerator_ms) / 2 == expected["lower_bound"]


def test_hetpipe_partition_over_orders() -> None:
    """Speeds 4, 2, 2, 1: the order of devices and the cuts that the enumeration finds, or equally good ones."""
    entry = case("HetPipe", "min-max partition over GPU orders")
    layers, speeds = np.array(entry["input"]["layers"], float), entry["input"]["speeds"]
    kinds = sorted(set(speeds), reverse=True)
    problem = HetPipeProblem(
        compute_s=np.array([layers / speed for speed in kinds]),
        weight_bytes=np.zeros(len(layers)),
        saved_bytes=np.zeros(len(layers)),
        boundary_bytes=np.zeros(len(layers) + 1),
        counts=tuple(speeds.count(k) for k in kinds),
        memory_bytes=np.full(len(kinds), math.inf),
        bandwidth_byte_per_s=uniform_links(len(kinds), 1.0),
    )
    assert solve_hetpipe(problem).objective == entry["expect"]["bottleneck"]


@pytest.mark.parametrize("position", [0, 1])
def test_piper_contiguous_sets_of_a_chain(position: int) -> None:
    entry = case("Piper", "contiguous sets of a chain of n layers")
    n = entry["input"]["n"][position]
    found = enumerate_ideals(n, [(i, i + 1) for i in range(n - 1)], 1000)
    assert len(found) == entry["expect"]["downsets"][position]
    assert len(found) * (len(found) - 1) // 2 == entry["expect"]["intervals"][position]

"""More devices and larger batches than help: left out where it changes nothing, refused where it is beyond a search."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

import planner
from planner.errors import JobError, UsageError
from planner.published.problems import MaxLoadProblem, piper_problem
from planner.published.readers import piper_from_document
from planner.space.cuts import MOST_SAMPLES, divisors
from tests.oracles.partitions import by_force
from tests.published.partition.instances import PIPEDREAM, operator_graph, piper, written
from tests.published.partition.max_load_instances import problems
from tests.published.partition.piper_instances import documents

HUGE = 4_000  # what a file may name; the reader refuses more


@given(problems(most_nodes=4))
@settings(deadline=None, max_examples=60)
def test_more_devices_than_nodes_never_help(problem: MaxLoadProblem) -> None:
    nodes = len(problem.accelerator_ms)
    kinds = {name: nodes for name in ("accelerators", "cpus") if getattr(problem, name)}
    enough = replace(problem, **kinds)
    more = replace(problem, **{name: count + 1 for name, count in kinds.items()})
    found = [by_force(p) for p in (enough, more)]
    assert found[0].objective == pytest.approx(found[1].objective, rel=1e-12)


@given(documents())
@settings(deadline=None, max_examples=40)
def test_more_devices_than_replicas_of_the_widest_degree_never_help(document: dict[str, Any]) -> None:
    file = piper_from_document(document)
    clamped = piper_problem(file, devices=HUGE)
    assert clamped.devices == clamped.batch * max(clamped.tensor_degrees)
    more = replace(clamped, devices=clamped.devices + 3)
    found = [by_force(p) for p in (clamped, more)]
    assert found[0].objective == pytest.approx(found[1].objective, rel=1e-12)


@pytest.mark.parametrize("arguments", [{}, {"contiguous": False}, {"objective": "latency"}], ids=str)
def test_a_file_with_thousands_of_devices_is_planned_for_as_many_as_can_be_used(
    arguments: dict[str, Any], tmp_path: Path
) -> None:
    plain = planner.partition(written(operator_graph(maxFPGAs=4, maxCPUs=4), tmp_path / "graph.json"), **arguments)
    file = written(operator_graph(maxFPGAs=HUGE, maxCPUs=HUGE), tmp_path / "huge.json")
    begun = time.process_time()
    plan = planner.partition(file, **arguments)
    assert time.process_time() - begun < 5.0
    assert plan.objective.value == plain.objective.value
    assert len(plan.parts) == 8
    assert planner.check_partition(plan, planner.load_instance(file)) == ()


def test_pipers_devices_without_number(tmp_path: Path) -> None:
    file = written(piper() | {"maxDevices": HUGE}, tmp_path / "piper.json")
    assert planner.partition(file).objective.proven_optimal


@pytest.mark.parametrize("machines", ["100000", "1000000000", "5000x5"])
@pytest.mark.parametrize("objective", ["time-per-minibatch", "iteration-time"])
def test_clusters_too_large_to_be_searched_are_refused(machines: str, objective: str, tmp_path: Path) -> None:
    file = written(PIPEDREAM, tmp_path / "profile.graph.txt")
    bandwidth = ",".join(["1GB/s"] * len(machines.split("x")))
    with pytest.raises(UsageError, match="4,096") as raised:
        planner.partition(file, machines=machines, bandwidth=bandwidth, objective=objective)
    assert raised.value.problem.where == "--machines"


def test_the_largest_cluster_ends_in_time_with_a_plan(tmp_path: Path) -> None:
    file = written(PIPEDREAM, tmp_path / "profile.graph.txt")
    begun = time.process_time()
    plan = planner.partition(file, machines=4096, bandwidth="1GB/s", time_limit=0.3)
    assert time.process_time() - begun < 3.0
    assert plan.objective.stopped_after_s == 0.3


@pytest.mark.parametrize("batch", [10**12 + 1])
def test_batches_too_large_to_be_dealt_out_are_refused(batch: int, tmp_path: Path) -> None:
    for file in (
        written(piper(), tmp_path / "piper.json"),
        written(piper() | {"mbsInBatch": batch}, tmp_path / "b.json"),
    ):
        with pytest.raises(JobError, match="can be dealt out"):
            planner.partition(file, batch=batch if file.stem == "piper" else None)
    with pytest.raises(JobError, match="can be dealt out"):
        divisors(batch)


@pytest.mark.parametrize(
    ("batch", "most", "expected"),
    [(1, None, (1,)), (12, None, (1, 2, 3, 4, 6, 12)), (12, 2, (1, 2)), (12, 5, (1, 2, 3, 4)), (13, 100, (1, 13)),
     (10**12, 4, (1, 2, 4)), (999999000001, None, (1, 999999000001))],
)  # fmt: skip
def test_divisors(batch: int, most: int | None, expected: tuple[int, ...]) -> None:
    assert batch <= MOST_SAMPLES
    assert divisors(batch, most) == expected

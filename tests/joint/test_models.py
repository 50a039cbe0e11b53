"""Tiny models on four devices: the pricer's whole space enumerated, limits, plan files of sharded plans."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import models
import planner
from planner.graph import Graph
from planner.hardware import Cluster
from planner.importers import graph_from_proto
from planner.solvers import search
from planner.space import BlockCosts, Job
from planner.space.pricer import Pricer
from tests.joint.enumeration import best_s, judged
from tests.models import graphs
from tests.space.instances import cluster

JOB = Job(global_batch=4, micro_batches=(1, 2), schedules=("1f1b",), precision="bf16")


@functools.cache
def gpt(**options: int) -> Graph:
    """A GPT of a few blocks; options are further keys of its configuration."""
    return graph_from_proto(models.build_custom(graphs.gpt(1, 64, 4, 128, 16, **options), batch=1, seq=16), name="tiny")


def mixture() -> Graph:
    """The same with four experts in place of the feed-forward layer."""
    return gpt(num_experts=4, expert_layer_period=1)


def four(byte_per_s: float, memory_bytes: int) -> Cluster:
    """Four equal devices on one switch: 1 TFLOP/s, 1 TB/s, no start-up times."""
    return cluster((4,), (byte_per_s,), memory_bytes=(memory_bytes,))


def shelves(pricer: Pricer, sizes: tuple[int, ...]) -> dict[int, dict[int, BlockCosts]]:
    """All costs that the pricer offers."""
    found: dict[int, dict[int, BlockCosts]] = {}
    for size in sizes:
        known = [pricer.costs(size)]
        for _, mesh in pricer.floors(size):
            for _, boundary in pricer.refine(size, mesh)[0]:
                known += pricer.refine(size, boundary)[1]
        found[size] = {costs.sharding: costs for costs in known}
    return found


MACHINES = {"ample": (1e11, 10**9), "slow links": (1e8, 10**9), "scarce": (1e11, 1_250_000)}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_search_of_a_gpt_equals_enumeration(machine: str, recompute: str) -> None:
    devices, job = four(*MACHINES[machine]), dataclasses.replace(JOB, recompute=recompute, zero=(1,))
    pricer = Pricer(gpt(), devices, job)
    answer = search(pricer.costs, devices, job, shardings=pricer)
    expected = best_s(judged(shelves(Pricer(gpt(), devices, job), job.micro_batches), devices, job))
    assert answer.best.evaluation.iteration_s == pytest.approx(expected, rel=1e-9)
    assert answer.certificate.bound_s <= expected * (1 + 1e-9)


def test_memory_decides_whether_operators_are_shared() -> None:
    ranks = {}
    for name, machine in MACHINES.items():
        pricer = Pricer(gpt(), four(*machine), JOB)
        best = search(pricer.costs, four(*machine), JOB, shardings=pricer).best.decision
        ranks[name] = best.stages[0].ranks
    assert ranks["slow links"] == 1
    assert max(ranks.values()) > 1


LIMITS: dict[str, dict[str, Any]] = {
    "tp 2": {"tensor_parallel": (2,)},
    "tp 4": {"tensor_parallel": (4,)},
    "pp 2": {"pipeline_stages": (2,)},
    "dp 2": {"data_parallel": (2,)},
    "tp 2, pp 2": {"tensor_parallel": (2,), "pipeline_stages": (2,)},
    "mesh 2 x 2": {"meshes": ((2, 2),), "tensor_parallel": (4,)},
    "no columns or rows": {"tensor_parallel": (2,), "forbid": ("MatMul:n", "MatMul:k")},
}


MODELS: dict[str, Callable[[], Graph]] = {"gpt": gpt, "mixture": mixture}
MACHINE = four(1e10, 10**9)


@functools.cache
def bound_s(model: str) -> float:
    """Nothing is faster, without limits."""
    return planner.plan(MODELS[model](), MACHINE, dataclasses.replace(JOB, backends=("any",))).predictions.bound_s


@pytest.mark.parametrize(
    ("model", "limits"),
    [*(("gpt", name) for name in LIMITS), ("mixture", "tp 2"), ("mixture", "tp 4"), ("mixture", "mesh 2 x 2")],
)
def test_limits_hold_and_their_plans_check(model: str, limits: str, tmp_path: Path) -> None:
    graph, given = MODELS[model](), LIMITS[limits]
    plan = planner.plan(graph, MACHINE, dataclasses.replace(JOB, backends=("any",), **given))
    for stage in plan.stages:
        assert stage.group_ranks in given.get("tensor_parallel", (1, 2, 4))
        assert len(stage.replicas) in given.get("data_parallel", (1, 2, 4))
        assert bool(stage.sharding) == (stage.group_ranks > 1)
    assert len(plan.stages) in given.get("pipeline_stages", range(1, 9))
    assert {sharding.ranks for sharding in plan.shardings} <= {plan.stages[0].group_ranks}
    if "meshes" not in given:  # a mesh of two axes in a node is looked at only where it is asked for
        assert bound_s(model) <= plan.predictions.iteration_s * (1 + 1e-9)

    planner.write_plan(plan, tmp_path / "plan.json")
    again = planner.read_plan(tmp_path / "plan.json")
    assert again == plan
    assert planner.plans.validate(again, planner.rebatch(graph, plan.micro_batches.size), MACHINE) == []

"""A system for every registered schedule decides what the planner decides within the same limits."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

import planner
from planner.graph import Graph
from planner.hardware import Cluster
from planner.schedules import names
from planner.space.subspaces import Limits
from planner.systems import System, SystemSetting, get
from tests.systems.toy import run_system

JOB = planner.Job(global_batch=16, precision="fp32")


@cache
def loaded() -> tuple[Graph, Cluster]:
    return planner.load_graph("gnmt-8"), planner.load_cluster("v100-pcie-4")


@cache
def setting() -> SystemSetting:
    graph, cluster = loaded()
    return SystemSetting(planner.Pricer(graph, cluster, JOB), cluster, JOB)


@pytest.mark.parametrize("name", names())
def test_a_row_is_as_fast_as_the_plan(name: str) -> None:
    solver = get("auto").solver
    system = System(key=f"any {name}", title=name, solver=solver, source="", limits=Limits(schedules=(name,)))
    limits = {"schedules": (name,), "zero": (0,), "tensor_parallel": (1,), "uniform": True, "recompute": "never"}
    limits["backends"] = ("any",)
    row = run_system(system, setting())
    plan = planner.plan(*loaded(), dataclasses.replace(JOB, **limits))
    assert row.feasible, row.reason
    assert row.iteration_s == pytest.approx(plan.predictions.simulated_iteration_s, rel=1e-8)
    assert row.devices == plan.world_size - len(plan.idle_ranks)

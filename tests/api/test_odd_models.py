"""Plans of models that hold something unusual."""

from __future__ import annotations

import pytest

import planner
from planner import Job
from planner.importers import graph_from_proto
from tests.importers.build import absent, model, node, value


@pytest.mark.parametrize("counts", [(4, 8), (8, 4), (8, 8)])
def test_mixtures_of_two_sizes_are_planned(counts: tuple[int, int]) -> None:
    one, two = counts
    nodes = [
        node("Einsum", ["x", "first"], ["h"], equation="behd,edk->behk"),
        node("Einsum", ["z", "second"], ["g"], equation="behd,edk->behk"),
        node("ReduceMean", ["h"], ["hm"], axes=[1, 2], keepdims=0),
        node("ReduceMean", ["g"], ["gm"], axes=[1, 2], keepdims=0),
        node("Add", ["hm", "gm"], ["y"]),
    ]
    inputs = [value("x", [2, one, 16, 32]), value("z", [2, two, 16, 32])]
    stored = [absent("first", [one, 32, 32]), absent("second", [two, 32, 32])]
    graph = graph_from_proto(model(nodes, inputs, [value("y", None)], stored, opset=17))
    plan = planner.plan(graph, planner.load_cluster("dgx-a100"), Job(64, backends=("any",)))
    assert plan.predictions.iteration_s >= plan.predictions.bound_s > 0


@pytest.mark.parametrize("backends", [(), ("any",)])
def test_weights_of_an_operator_that_nobody_described_are_planned(backends: tuple[str, ...]) -> None:
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("FusedMLP", ["h", "up", "down"], ["y"], domain="my.ops")]
    stored = [absent("w", [64, 64]), absent("up", [64, 256]), absent("down", [256, 64])]
    proto = model(nodes, [value("x", [2, 8, 64])], [value("y", [2, 8, 64])], stored, domains={"my.ops": 1})
    graph = graph_from_proto(proto)
    assert graph.parameter_count() == 64 * 64 + 2 * 64 * 256
    job = Job(64, backends=backends) if backends else Job(64)
    plan = planner.plan(graph, planner.load_cluster("dgx-a100"), job)
    assert plan.predictions.iteration_s > 0

"""Time limits: whatever a solver is at, it ends in time with the plan and the bound that it has by then.

Times are CPU times, which a busy machine does not lengthen: they are at most what a clock on the wall shows.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import planner
from benchmarks.instances.iteration import synthetic_iteration_problem
from benchmarks.instances.layerwise import synthetic_layerwise_problem
from planner.published.problems import (
    PartitionProblem,
    PipeDreamProblem,
    PlacedPipelineProblem,
    chain_layers,
    latency_problem,
    max_load_problem,
    piper_problem,
)
from planner.published.readers import operator_graph_from, piper_from_document
from planner.published.solvers import (
    PARTITION_SOLVERS,
    Deadline,
    OutOfTime,
    SearchState,
    search_partition,
    solve_partition,
)
from planner.solvers.cluster_chains.search import NEVER
from tests.published.partition.large_graphs import layered, sparse, tree

LIMIT_S, MOST_S = 0.2, 2.0
GRAPHS: dict[str, Callable[[], dict[str, Any]]] = {
    "sparse": lambda: sparse(250),
    "layered": lambda: layered(300),
    "tree": lambda: tree(250),
}


def test_the_clock() -> None:
    assert NEVER.left_s == math.inf
    NEVER.check()
    over = Deadline(0.0)
    assert over.passed
    assert over.within(5.0).passed
    assert 0 < Deadline(60.0).within(1.0).left_s <= 1.0
    with pytest.raises(OutOfTime):
        over.check()


@pytest.mark.parametrize("arguments", [{}, {"contiguous": False}, {"objective": "latency"}], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_too_large_to_be_proven_end_in_time_with_a_plan(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(GRAPHS[name]()))
    instance = planner.load_instance(file)
    begun = time.process_time()
    plan = planner.partition(instance, time_limit=LIMIT_S, **arguments)
    assert time.process_time() - begun < MOST_S
    assert 0 < plan.objective.bound <= plan.objective.value
    assert plan.objective.proven_optimal or plan.objective.stopped_after_s == LIMIT_S


def problems() -> list[PartitionProblem]:
    """One of each family that has an instance of its own, each larger than a hundredth of a second can solve."""
    graph = operator_graph_from(sparse(60), "sparse")
    layers = chain_layers([1.0 + i % 3 for i in range(60)], [5.0] * 60, [1.0] * 60)
    choice = {"id": "a", "timePerSample": 1.0, "parameterSize": 1.0, "memoryUsageA": 1.0, "memoryUsageB": 1.0,
              "syncTimeFw": {}, "syncTimeBw": {}}  # fmt: skip
    nodes = [{"id": i, "TMPCs": {"1": [choice | {"timePerSample": 1.0 + i / 7}]}} for i in range(40)]
    wide = {"maxDevices": 8, "maxMemoryPerDevice": 1e3, "bandwidth": 1.0, "mbsInBatch": 8, "nodes": nodes, "edges": []}
    return [
        max_load_problem(graph, contiguous=True),
        max_load_problem(graph, contiguous=False),
        latency_problem(graph),
        PipeDreamProblem(layers, (4, 2), (8.0, 2.0), replicate=True),
        PlacedPipelineProblem(layers, (4, 2), (8.0, 2.0)),
        piper_problem(piper_from_document(wide)),
        synthetic_layerwise_problem(64, 24, 0.4, kinds=3, noise=0.05),
        synthetic_iteration_problem(40, 64, 8, memory_bytes=12e9),
    ]


@pytest.mark.parametrize("limit_s", [1e-6, 0.01])
@pytest.mark.parametrize("at", range(8))
def test_every_solver_gives_what_it_has_when_the_time_is_up(at: int, limit_s: float) -> None:
    problem = problems()[at]
    trivial = [v.objective for _, plan in problem.trivial() if (v := problem.judge(plan)).feasible]
    for _, entry in PARTITION_SOLVERS.items():
        if isinstance(problem, entry.takes):
            search = SearchState(problem, limit_s)
            with contextlib.suppress(OutOfTime):
                entry.run(search)
            found = search.result()
            assert found.bound <= found.objective
            assert found.decision is None or problem.judge(found.decision).feasible
    if trivial:
        assert solve_partition(problem, time_limit_s=limit_s).objective <= min(trivial)


def test_a_named_solver_that_finds_nothing_in_time_leaves_the_trivial_plan() -> None:
    problem = problems()[5]
    result = solve_partition(problem, solver="piper-dp", time_limit_s=1e-6)
    assert result.solver.startswith("trivial plan")
    assert not result.proven


@pytest.mark.parametrize("limit_s", [-1e-5, 0.0])
def test_a_search_within_another_that_begins_too_late_has_the_trivial_plan(limit_s: float) -> None:
    problem = problems()[6]
    result = search_partition(problem, time_limit_s=limit_s)
    assert not result.proven
    assert result.objective == min(v.objective for _, plan in problem.trivial() if (v := problem.judge(plan)).feasible)
    with pytest.raises(planner.errors.UsageError, match="leaves no time"):
        solve_partition(problem, time_limit_s=limit_s)


@pytest.mark.parametrize("work", [-1.0, 0.0])
def test_an_engine_without_work_left_gives_back_the_start(work: float) -> None:
    problem = problems()[1]
    plan = next(plan for name, plan in problem.trivial() if name.startswith("even"))
    search = SearchState(problem, 60.0)
    search.offer(plan)
    search.engine_work = search.work_s - work
    PARTITION_SOLVERS.get("max-load-cp-sat").run(search)
    assert search.objective == problem.judge(plan).objective
    assert 0 < search.bound < search.objective

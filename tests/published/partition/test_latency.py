"""Latency of one sample: schedules by hand, CP-SAT and lists against brute force, and real operator graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import JobError
from planner.published.problems import LatencyDecision, LatencyProblem, latency_problem
from planner.published.readers import OperatorGraph, OperatorNode, load_operator_graph
from planner.published.solvers import PARTITION_SOLVERS, Result, SearchState, search_partition
from planner.published.solvers.latency import latency_bound
from tests.oracles.partitions import by_force
from tests.published.partition.checks import by_list
from tests.shared_data import shared_path


def _diamond(transfer: float, accelerators: int = 2) -> LatencyProblem:
    """1 -> (4, 3) -> 2 on accelerators that move results through host memory."""
    return LatencyProblem(
        accelerators=accelerators,
        cpus=0,
        memory_bytes=40.0,
        accelerator_ms=np.array([1.0, 4.0, 3.0, 2.0]),
        cpu_ms=np.zeros(4),
        size_bytes=np.full(4, 10.0),
        supported=np.ones(4, dtype=bool),
        backward=np.zeros(4, dtype=bool),
        colour=np.full(4, -1),
        edges=np.array([(0, 1), (0, 2), (1, 3), (2, 3)]),
        transfer_ms=np.full(4, transfer),
    )


@pytest.mark.parametrize(
    ("transfer", "latency"),
    [(0.0, 7.0), (0.25, 7.0), (0.4, 7.6), (0.7, 8.4), (5.0, 10.0)],
)
def test_branches_run_side_by_side_when_moving_is_cheap(transfer: float, latency: float) -> None:
    """The least of 1 + max(4, 3 + 4 x) + 2 (3 goes away and back), 1 + 4 + 2 x + 2 (3 and 2 away), 10 (all here)."""
    result = search_partition(_diamond(transfer))
    assert result.objective == pytest.approx(latency, rel=1e-12)
    assert result.proven


def test_memory_and_colours_bind() -> None:
    apart = replace(_diamond(5.0), memory_bytes=30.0)
    assert search_partition(apart).objective == pytest.approx(17.0)  # 1 and 3 here, 4 and 2 there: 1 + 10 + 4 + 2
    tied = replace(apart, colour=np.array([0, 0, 0, 0]))
    result = search_partition(tied)
    assert result.decision is None
    assert result.bound == float("inf")
    assert search_partition(replace(tied, memory_bytes=float("inf"))).objective == 10.0


def test_a_node_that_runs_nowhere() -> None:
    result = search_partition(replace(_diamond(0.0), supported=np.array([True, True, False, True])))
    assert (result.decision, result.bound) == (None, float("inf"))


def test_judge_plays_the_schedule() -> None:
    problem = _diamond(0.5)
    verdict = problem.judge(LatencyDecision((0, 0, 1, 0), (0, 1, 2, 3)))
    assert verdict.parts == (8.0, 5.0)  # 3 begins at 1 + 1 elsewhere, ends at 5, is back at 6
    assert problem.judge(LatencyDecision((0, 0, 0, 0), (0, 2, 1, 3))).objective == 10.0


@pytest.mark.parametrize(
    ("devices", "order", "kind"),
    [
        ((0, 0, 0), (0, 1, 2, 3), "coverage"),
        ((0, 0, 0, 0), (0, 1, 1, 3), "coverage"),
        ((0, 0, 0, 2), (0, 1, 2, 3), "devices"),
        ((0, 0, 0, 0), (1, 0, 2, 3), "order"),
        ((0, 0, 1, 0), (0, 1, 2, 3), "colour"),
    ],
)
def test_judge_names_what_is_wrong(devices: tuple[int, ...], order: tuple[int, ...], kind: str) -> None:
    problem = replace(_diamond(0.5), colour=np.array([-1, 3, 3, -1]))
    assert {v.kind for v in problem.judge(LatencyDecision(devices, order)).violations} == {kind}
    crowded = replace(_diamond(0.5), memory_bytes=39.0).judge(LatencyDecision((0,) * 4, (0, 1, 2, 3)))
    assert [v.kind for v in crowded.violations] == ["memory"]


@st.composite
def _instances(draw: st.DrawFn) -> LatencyProblem:
    n = draw(st.integers(1, 5))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    fast, slow = [(1, 0), (2, 0), (1, 1), (2, 1), (3, 0)][int(random.integers(5 if n < 5 else 3))]
    column = random.integers(0, 9, (n, 2)).astype(float) if random.integers(2) else random.uniform(0, 5, (n, 2))
    pairs = [(u, v) for v in range(n) for u in range(v) if random.random() < 0.45]
    return LatencyProblem(
        accelerators=fast,
        cpus=slow,
        memory_bytes=float(random.integers(2, 14)),
        accelerator_ms=column[:, 0],
        cpu_ms=column[:, 1],
        size_bytes=random.integers(0, 5, n).astype(float),
        supported=random.random(n) >= 0.2 if slow else np.ones(n, dtype=bool),
        backward=np.zeros(n, dtype=bool),
        colour=random.integers(-1, 2, n) if random.integers(3) == 0 else np.full(n, -1),
        edges=np.array(pairs, dtype=np.int64).reshape(-1, 2),
        transfer_ms=random.integers(0, 4, n) * float(random.choice([0.25, 1.0])),
    )


@given(_instances())
@settings(deadline=None, max_examples=80)
def test_solvers_against_brute_force(problem: LatencyProblem) -> None:
    best = by_force(problem)
    exact = search_partition(problem)
    listed = by_list(problem)
    assert exact.proven
    assert latency_bound(problem) <= best.objective
    if best.decision is None:
        assert exact.decision is None
        assert listed.decision is None
        return
    assert exact.objective == pytest.approx(best.objective, rel=1e-9)
    assert problem.judge(exact.decision).feasible
    assert listed.objective >= best.objective * (1 - 1e-9)
    assert listed.bound <= best.objective * (1 + 1e-12)
    assert listed.decision is None or problem.judge(listed.decision).feasible


def test_two_runs_decide_alike() -> None:
    problem = _diamond(0.7, accelerators=3)
    assert search_partition(problem) == search_partition(problem)


@pytest.mark.parametrize("name", ["bert24_inference", "resnet50_inference", "gnmt_inference", "inceptionv3_inference"])
def test_real_graphs_are_scheduled_within_their_bound(name: str) -> None:
    graph = load_operator_graph(shared_path(f"instances/operator_graphs/LayerGraphs/{name}.json"))
    problem = latency_problem(graph, memory_bytes=float("inf"))
    found = by_list(problem, time_limit_s=1.0)
    assert found.bound <= found.objective
    alone = [problem.judge(plan) for _, plan in problem.trivial()]
    assert found.objective <= min(verdict.objective for verdict in alone if verdict.feasible)
    assert found.gap < 0.5


def test_graphs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(JobError, match="cycle"):
        replace(_diamond(0.0), edges=np.array([(0, 1), (1, 0)]))
    with pytest.raises(JobError, match="shape"):
        replace(_diamond(0.0), transfer_ms=np.zeros(3))


def test_rounds_are_counted_by_work_and_not_by_the_clock() -> None:
    def listed(limit_s: float) -> Result:
        search = SearchState(_diamond(0.7, accelerators=3), limit_s)
        search.work_s = 0.048
        search.offer_all(search.problem.trivial())
        PARTITION_SOLVERS.get("latency-list").run(search)
        return search.result()

    first, second = listed(5.0), listed(50.0)
    assert first == second
    assert list(first.statistics.values()) == [50]  # 12 places a round, 50,000 a second of a quarter of the work


def test_colours_of_a_file_may_be_any_integers() -> None:
    nodes = tuple(OperatorNode(i, "", 1.0, 1.0, 0.0, True, False, colour) for i, colour in enumerate((-1, None, 7, -1)))
    problem = latency_problem(OperatorGraph("g", "", nodes, (), (0.0,) * 4, 2, 0, 8.0))
    assert problem.colour.tolist() == [0, -1, 1, 0]
    assert [v.kind for v in problem.judge(LatencyDecision((0, 0, 0, 1), (0, 1, 2, 3))).violations] == ["colour"]


def test_the_bound_is_the_longest_path_or_the_work_of_each_device() -> None:
    # The path 1 + 4 + 2; one device does all of 1 + 4 + 3 + 2.
    assert latency_bound(_diamond(0.0)) == pytest.approx(7.0)
    assert latency_bound(_diamond(0.0, accelerators=1)) == pytest.approx(10.0)

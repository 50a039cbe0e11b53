"""Iteration time over device meshes: known sums, the search against brute force, and large instances."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.instances.iteration import synthetic_iteration_problem
from planner.errors import JobError
from planner.published.problems import IterationDecision, IterationProblem, MeshStage, boundary_levels
from planner.published.solvers import search_partition
from tests.oracles.partitions import by_force
from tests.published.partition.checks import assert_equals_brute_force


def _chain(times: list[float], micro_batches: int, devices: int) -> IterationProblem:
    """Layers that cost the same on any mesh of one device."""
    sums = np.concatenate(([0.0], np.cumsum(times)))
    table = np.full((len(times), len(times), 1), np.inf)
    for i in range(len(times)):
        for j in range(i, len(times)):
            table[i, j, 0] = sums[j + 1] - sums[i]
    return IterationProblem(table, np.array([1]), devices, micro_batches)


def test_published_pipeline_latency() -> None:
    problem = _chain([1, 2, 1], 8, 3)
    verdict = problem.judge(IterationDecision(tuple(MeshStage(i, i, 0) for i in range(3))))
    assert verdict.objective == 18  # 1 + 2 + 1 + 7 * 2
    assert search_partition(problem).objective == 18


def test_the_longest_stage_is_weighed_against_the_sum() -> None:
    """Two configurations of a two-layer chain: stages of (3, 3) or of (2, 5), four micro-batches."""
    table = np.full((2, 2, 2), np.inf)
    table[0, 0], table[1, 1] = (3, 2), (3, 5)
    problem = IterationProblem(table, np.array([1, 1]), 2, 4)
    both = [IterationDecision((MeshStage(0, 0, c), MeshStage(1, 1, c))) for c in (0, 1)]
    assert [problem.judge(d).objective for d in both] == [15, 22]
    mixed = IterationDecision((MeshStage(0, 0, 1), MeshStage(1, 1, 0)))
    assert problem.judge(mixed).objective == 14  # 2 + 3 + 3 * 3
    result = search_partition(problem)
    assert (result.objective, result.decision, result.proven) == (14, mixed, True)


def test_memory_counts_the_stages_that_follow() -> None:
    base = _chain([1, 1, 1], 8, 3)
    spread = np.where(np.isfinite(base.time_s), 1.0, np.inf)
    problem = replace(base, fixed_bytes=spread, activation_bytes=2 * spread, memory_bytes=6.9)
    deep = IterationDecision(tuple(MeshStage(i, i, 0) for i in range(3)))
    (violation,) = problem.judge(deep).violations
    assert (violation.kind, violation.stage, violation.needed) == ("memory", 0, 7.0)  # 1 + 3 * 2
    few = replace(problem, micro_batches=2)
    assert few.judge(deep).feasible  # no more in flight than there are micro-batches


def test_boundaries_cost_what_their_level_costs() -> None:
    base = _chain([1, 1, 1], 1, 3)
    problem = replace(
        base, boundary_s=np.array([[9.0, 0.25, 0.5], [9.0, 4.0, 2.0]]), boundary_level=boundary_levels(3, (2,))
    )
    plan = IterationDecision(tuple(MeshStage(i, i, 0) for i in range(3)))
    assert problem.judge(plan).parts == (1, 1.25, 3)  # device 1 beside device 0, device 2 in the next server


def test_levels_of_nested_groups() -> None:
    assert boundary_levels(9, (2, 4)).tolist() == [2, 0, 1, 0, 2, 0, 1, 0, 2]


@pytest.mark.parametrize(
    ("stages", "kind"),
    [
        ([(0, 0, 0), (2, 2, 0)], "coverage"),
        ([(0, 1, 0)], "coverage"),
        ([(0, 0, 0), (1, 2, 0)], "devices"),
        ([(0, 0, 0), (1, 1, 0), (2, 2, 5)], "option"),
        ([], "coverage"),
    ],
)
def test_judge_names_what_is_wrong(stages: list[tuple[int, int, int]], kind: str) -> None:
    verdict = _chain([1, 2, 1], 8, 3).judge(IterationDecision(tuple(MeshStage(*s) for s in stages)))
    assert kind in {v.kind for v in verdict.violations}


@st.composite
def _instances(draw: st.DrawFn) -> IterationProblem:
    layers, configs = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    shape = (layers, layers, configs)
    sizes = random.integers(1, 4, configs)
    whole = bool(random.integers(2))
    times = random.integers(1, 12, shape).astype(float) if whole else random.uniform(0.5, 9.0, shape)
    if random.integers(2):  # longer stages cost more, most of the time
        times = times * (1 + np.abs(np.arange(layers)[None, :, None] - np.arange(layers)[:, None, None]))
    times[random.random(shape) < 0.15] = np.inf
    memory = bool(random.integers(2))
    links = bool(random.integers(2))
    devices = draw(st.integers(1, 8))
    return IterationProblem(
        times,
        sizes,
        devices,
        int(random.integers(1, 9)),
        fixed_bytes=random.integers(0, 5, shape).astype(float) if memory else None,
        activation_bytes=random.integers(0, 4, shape).astype(float) if memory else None,
        memory_bytes=float(random.integers(3, 14)),
        boundary_s=random.integers(0, 4, (2, layers)).astype(float) if links else None,
        boundary_level=boundary_levels(devices, (2,)).clip(0, 1) if links else None,
        use_all=bool(random.integers(2)),
    )


@given(_instances())
@settings(deadline=None, max_examples=250)
def test_search_equals_brute_force(problem: IterationProblem) -> None:
    assert_equals_brute_force(problem, by_force(problem), search_partition(problem))


@pytest.mark.parametrize("memory_bytes", [float("inf"), 12e9])
@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize(("layers", "devices", "configs", "limit_s"), [(48, 64, 16, 3.0), (96, 256, 16, 10.0)])
def test_large_instances_are_proven_in_time(
    layers: int, devices: int, configs: int, limit_s: float, memory_bytes: float, links: bool
) -> None:
    problem = synthetic_iteration_problem(layers, devices, configs, memory_bytes=memory_bytes, links=links)
    begun = time.process_time()
    result = search_partition(problem)
    assert time.process_time() - begun < limit_s
    assert result.proven
    assert result.statistics["passes"] < 100
    for _, plan in problem.trivial():
        judged = problem.judge(plan)
        assert not judged.feasible or judged.objective >= result.objective


def test_two_runs_decide_alike() -> None:
    problem = synthetic_iteration_problem(12, 8, 6, memory_bytes=24e9, links=True)
    assert search_partition(problem) == search_partition(problem)


def test_out_of_time_the_start_stays_with_a_true_bound() -> None:
    problem = synthetic_iteration_problem(12, 8, 4)
    start = dict(problem.trivial())["8 even stages"]
    result = search_partition(problem, solver="iteration-dp", start=start, time_limit_s=1e-9)
    assert result.decision == start
    assert result.bound <= search_partition(problem).objective


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(JobError, match="shape"):
        IterationProblem(np.zeros((2, 2, 1)), np.array([1, 2]), 2, 1)
    with pytest.raises(JobError, match="go together"):
        IterationProblem(np.zeros((2, 2, 1)), np.array([1]), 2, 1, fixed_bytes=np.zeros((2, 2, 1)))
    with pytest.raises(JobError, match="start at 1"):
        IterationProblem(np.zeros((2, 2, 1)), np.array([1]), 2, 0)

"""Layer-wise strategies: sums by hand, the labels against brute force, and time that does not grow with the memory."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.instances.layerwise import synthetic_layerwise_problem
from planner.errors import JobError
from planner.published.problems import LayerChoice
from planner.published.solvers import search_partition
from tests.oracles.partitions import by_force
from tests.published.partition.checks import assert_equals_brute_force


def _three_layers(capacity: float) -> LayerChoice:
    """Fast and big (2 s, 10 bytes) or slow and small (3 s, 4 bytes), and 0.75 s a change."""
    return LayerChoice(
        np.array([[2.0, 3.0]] * 3), np.array([[10.0, 4.0]] * 3), np.array([[0.0, 0.75], [0.75, 0.0]]), capacity
    )


@pytest.mark.parametrize(
    ("capacity", "seconds", "changes"), [(30, 6.0, 0), (29.9, 7.75, 1), (24, 7.75, 1), (18, 8.75, 1), (12, 9.0, 0)]
)
def test_three_layers_by_hand(capacity: float, seconds: float, changes: int) -> None:
    result = search_partition(_three_layers(capacity))
    assert result.objective == seconds
    assert result.proven
    assert sum(a != b for a, b in itertools.pairwise(result.decision)) == changes


def test_nothing_fits() -> None:
    result = search_partition(_three_layers(11.9))
    assert result.decision is None
    assert result.bound == float("inf")


def test_judge_adds_times_switches_and_memory() -> None:
    problem = _three_layers(18)
    verdict = problem.judge((0, 1, 0))
    assert verdict.parts == (2 + 3.75 + 2.75,)
    (violation,) = verdict.violations
    assert (violation.kind, violation.needed, violation.available) == ("memory", 24, 18)
    assert problem.judge((0, 1)).violations[0].kind == "coverage"
    assert problem.judge((0, 1, 2)).violations[0].kind == "option"
    blocked = replace(problem, time_s=np.array([[2.0, np.inf]] * 3))
    assert {v.kind for v in blocked.judge((0, 1, 0)).violations} == {"option", "memory"}


@st.composite
def _instances(draw: st.DrawFn) -> LayerChoice:
    layers, count = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    alike = bool(random.integers(2))
    whole = bool(random.integers(2))
    shape = (1 if alike else layers, count)
    seconds = random.integers(0, 9, shape).astype(float) if whole else random.uniform(0.0, 5.0, shape)
    memory = random.integers(0, 9, shape).astype(float) if whole else random.uniform(0.0, 5.0, shape)
    seconds[random.random(shape) < 0.1] = np.inf
    switch_shape = (count, count) if random.integers(2) else (layers, count, count)
    switch = random.integers(0, 4, switch_shape).astype(float) * random.integers(2)
    switch[random.random(switch_shape) < 0.1] = np.inf if random.integers(2) else 0.0
    capacity = float(random.uniform(0.0, 1.1)) * 5 * layers
    wide = (layers, count)
    return LayerChoice(
        np.broadcast_to(seconds, wide).copy(), np.broadcast_to(memory, wide).copy(), switch, round(capacity, 1)
    )


@given(_instances())
@settings(deadline=None, max_examples=300)
def test_labels_equal_brute_force(problem: LayerChoice) -> None:
    assert_equals_brute_force(problem, by_force(problem), search_partition(problem))


@pytest.mark.parametrize(("layers", "count"), [(32, 10), (32, 44), (96, 44)])
@pytest.mark.parametrize(("kinds", "noise"), [(1, 0.0), (3, 0.05)])
def test_large_instances_are_proven_in_seconds(layers: int, count: int, kinds: int, noise: float) -> None:
    problem = synthetic_layerwise_problem(layers, count, 0.4, kinds=kinds, noise=noise)
    begun = time.process_time()
    result = search_partition(problem)
    assert time.process_time() - begun < 3.0
    assert result.proven
    for _, plan in problem.trivial():
        judged = problem.judge(plan)
        assert not judged.feasible or judged.objective >= result.objective


def test_work_does_not_grow_with_the_memory() -> None:
    problem = synthetic_layerwise_problem(32, 10, 0.4)
    scale = 1024.0
    larger = replace(problem, fixed_bytes=problem.fixed_bytes * scale, memory_bytes=problem.memory_bytes * scale)
    small, large = search_partition(problem), search_partition(larger)
    assert large.statistics == small.statistics
    assert large.decision == small.decision


def test_out_of_time_the_start_stays_with_a_true_bound() -> None:
    problem = synthetic_layerwise_problem(32, 20, 0.3, kinds=3, noise=0.1)
    best = search_partition(problem)
    start = best.decision
    result = search_partition(problem, start=start, solver="layerwise", time_limit_s=1e-3)
    assert result.objective == best.objective
    assert 0 < result.bound <= best.objective


def test_two_runs_decide_alike() -> None:
    problem = synthetic_layerwise_problem(24, 12, 0.3, kinds=2, noise=0.1)
    assert search_partition(problem) == search_partition(problem)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(JobError, match="memory must have shape"):
        LayerChoice(np.zeros((2, 2)), np.zeros((2, 1)), np.zeros((2, 2)), 1.0)
    with pytest.raises(JobError, match="switches must have shape"):
        LayerChoice(np.zeros((2, 2)), np.zeros((2, 2)), np.zeros((2, 3)), 1.0)
    with pytest.raises(JobError, match="must not be negative"):
        LayerChoice(-np.ones((2, 2)), np.zeros((2, 2)), np.zeros((2, 2)), 1.0)

"""Strategies and cuts together: sums by hand, and the search against brute force."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.instances.layerwise import synthetic_layerwise_problem
from planner.errors import JobError
from planner.solvers.partition import search_partition
from planner.space.partition import LayerChoice, LayerDecision
from tests.oracles.partitions import by_force
from tests.partition.checks import assert_equals_brute_force


def _four_layers(capacity: float) -> LayerChoice:
    """Fast (1 s, keeps 3 bytes a micro-batch) or slow (2 s, keeps 1), one byte of weights, two stages."""
    return LayerChoice(
        np.array([[1.0, 2.0]] * 4), np.ones((4, 2)), np.zeros((2, 2)), capacity, np.array([[3.0, 1.0]] * 4),
        np.full(4, 0.5), stages=2, micro_batches=5,
    )  # fmt: skip


def test_judge_by_hand() -> None:
    verdict = _four_layers(10).judge(LayerDecision((0, 1, 0, 0), (0, 2)))
    assert verdict.parts == (3.0, 2.5)
    assert verdict.objective == 5.5 + 4 * 3.0
    assert verdict.feasible
    tight = _four_layers(9).judge(LayerDecision((0, 1, 0, 0), (0, 2)))
    assert [(v.kind, v.stage, v.needed) for v in tight.violations] == [("memory", 0, 10.0)]  # 2 + 2 * (3 + 1)


@pytest.mark.parametrize(
    ("capacity", "seconds"),
    [(14, 2 + 2.5 + 4 * 2.5), (10, 3 + 2.5 + 4 * 3), (6, 4 + 3.5 + 4 * 4)],
)
def test_four_layers_by_hand(capacity: float, seconds: float) -> None:
    """Two and two layers: all fast; one ahead slow; both ahead and one behind slow."""
    result = search_partition(_four_layers(capacity))
    assert result.proven
    assert result.objective == seconds


@pytest.mark.parametrize(
    ("starts", "strategies", "kind"),
    [((0,), (0,) * 4, "coverage"), ((1, 2), (0,) * 4, "coverage"), ((0, 4), (0,) * 4, "coverage"),
     ((0, 2), (0,) * 3, "coverage"), ((0, 2), (0, 0, 0, 2), "option")],
)  # fmt: skip
def test_judge_names_what_is_wrong(starts: tuple[int, ...], strategies: tuple[int, ...], kind: str) -> None:
    verdict = _four_layers(14).judge(LayerDecision(strategies, starts))
    assert [v.kind for v in verdict.violations] == [kind]


@st.composite
def _instances(draw: st.DrawFn) -> LayerChoice:
    layers, count = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (layers, count)
    whole = bool(random.integers(2))
    times = random.integers(0, 9, shape).astype(float) if whole else random.uniform(0, 5, shape)
    times[random.random(shape) < 0.1] = np.inf
    switch_shape = (count, count) if random.integers(2) else (layers, count, count)
    return LayerChoice(
        times,
        fixed_bytes=random.integers(0, 6, shape).astype(float),
        activation_bytes=random.integers(0, 4, shape).astype(float),
        switch_s=random.integers(0, 3, switch_shape).astype(float),
        boundary_s=random.integers(0, 3, layers).astype(float),
        stages=int(random.integers(1, layers + 1)),
        micro_batches=int(random.integers(1, 6)),
        memory_bytes=float(random.integers(2, 30)),
    )


@given(_instances())
@settings(deadline=None, max_examples=150)
def test_search_equals_brute_force(problem: LayerChoice) -> None:
    assert_equals_brute_force(problem, by_force(problem), search_partition(problem))


def _staged(layers: int, count: int, stages: int, fraction: float) -> LayerChoice:
    flat = synthetic_layerwise_problem(layers, count, fraction, kinds=2, noise=0.02)
    return LayerChoice(
        flat.time_s, 0.6 * flat.fixed_bytes, flat.switch_s, flat.memory_bytes / stages,
        0.4 / stages * flat.fixed_bytes, np.full(layers, 0.001), stages, 16,
    )  # fmt: skip


def test_one_stage_is_the_plain_problem() -> None:
    problem = replace(_staged(16, 10, 1, 0.4), micro_batches=1)
    assert search_partition(problem).objective == search_partition(problem.part(0, 15, 1)).objective


def test_a_large_instance_is_proven_in_seconds() -> None:
    problem = _staged(32, 10, 4, 0.5)
    begun = time.process_time()
    result = search_partition(problem)
    assert time.process_time() - begun < 20
    assert result.proven


def test_out_of_time_the_bound_stays_true() -> None:
    problem = _staged(16, 6, 4, 0.5)
    cut_off = search_partition(problem, solver="layerwise", time_limit_s=1e-3)
    assert 0 < cut_off.bound <= search_partition(problem).objective


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(JobError, match="stages"):
        replace(_four_layers(14), stages=5)
    with pytest.raises(JobError, match="boundaries"):
        replace(_four_layers(14), boundary_s=np.zeros(3))

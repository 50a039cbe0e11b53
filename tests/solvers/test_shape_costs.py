"""Estimates and bounds of pipeline shapes: the most even cut of a chain, and the work that memory leaves."""

from __future__ import annotations

import itertools
import math

import pytest

from planner.schedules import Pipeline, get
from planner.solvers.shape_costs import Outline, ShapeCosts, slowest_part
from planner.space import Job
from tests.space.instances import chain, cluster


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7, 9])
@pytest.mark.parametrize("seconds", [[1.0] * 7, [0.1, 1.0, 1.0, 1.0, 1.0, 0.35], [3.0, 0.2, 0.2, 2.0, 0.1, 1.5, 0.7]])
def test_the_slowest_part_is_that_of_the_most_even_cut(seconds: list[float], parts: int) -> None:
    places = itertools.combinations_with_replacement(range(len(seconds) + 1), parts - 1)
    cuts = ([0, *inner, len(seconds)] for inner in places)
    least = min(max(sum(seconds[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
    assert slowest_part(seconds, parts) == pytest.approx(least, abs=1e-3 * max(seconds))


def test_layers_and_a_loss_on_twelve_workers() -> None:
    assert slowest_part([1.0] * 96 + [0.35], 12) == pytest.approx(8.35, abs=1e-3)


def least_work_s(memory_bytes: int, elements: float = 0.0, *, zero: int = 0, cutoff_s: float = math.inf) -> float:
    """Of four blocks of 1 s forward, 2 s backward and 100 bytes on two workers with two chunks each; fp32, SGD.

    The first worker keeps two micro-batches of each chunk at some moment, the second one.
    """
    costs = chain([1.0] * 4, elements=elements, saved=100.0)
    job = Job(global_batch=8, precision="fp32", optimizer="sgd", schedules=("interleaved",), zero=(zero,))
    machine = cluster((4,), (1e4,), memory_bytes=(memory_bytes,))
    outline = Outline.of(get("interleaved"), Pipeline((1,) * 4, 4))
    return ShapeCosts([costs], machine, job).least_work_s(outline, 2, zero, cutoff_s)


def test_what_memory_cannot_keep_is_recomputed() -> None:
    assert least_work_s(10**6) == pytest.approx(12)
    assert least_work_s(150) == pytest.approx(12 + (400 - 150 / 2 - 150) / 100)
    assert least_work_s(1) == pytest.approx(12 + (400 - 1 / 2 - 1) / 100)


def test_the_state_lies_where_activations_are_kept_longest() -> None:
    """Weights and gradients of 4 blocks take 8 bytes an element, 96 in all; ZeRO-2 leaves half of the gradients."""
    assert least_work_s(150, 3.0) == pytest.approx(12 + (400 - (150 - 96) / 2 - 150) / 100)
    assert least_work_s(150, 3.0, zero=2) == pytest.approx(12 + (400 - (150 - 72) / 2 - 150) / 100)
    assert least_work_s(100, 6.0) == pytest.approx(12 + (400 - 8) / 100)
    assert least_work_s(95, 6.0, cutoff_s=1e6) == math.inf
    assert least_work_s(95, 6.0) == 12  # the judge says what is lacking as long as nothing fits


def test_a_worker_with_little_time_keeps_few_blocks() -> None:
    """In 24 s a worker does 6 s of each of four micro-batches: two blocks, 200 bytes."""
    assert least_work_s(300) == pytest.approx(12)
    assert least_work_s(300, cutoff_s=24.0) == pytest.approx(12 + (400 - 300 / 2 - 200) / 100)

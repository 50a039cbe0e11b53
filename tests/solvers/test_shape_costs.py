"""Estimates of pipeline shapes: the slowest part of a chain whose blocks are not divided."""

from __future__ import annotations

import itertools

import pytest

from planner.solvers.shape_costs import slowest_part


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 7, 9])
@pytest.mark.parametrize("seconds", [[1.0] * 7, [0.1, 1.0, 1.0, 1.0, 1.0, 0.35], [3.0, 0.2, 0.2, 2.0, 0.1, 1.5, 0.7]])
def test_the_slowest_part_is_that_of_the_most_even_cut(seconds: list[float], parts: int) -> None:
    places = itertools.combinations_with_replacement(range(len(seconds) + 1), parts - 1)
    cuts = ([0, *inner, len(seconds)] for inner in places)
    least = min(max(sum(seconds[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
    assert slowest_part(seconds, parts) == pytest.approx(least, abs=1e-3 * max(seconds))


def test_layers_and_a_loss_on_twelve_workers() -> None:
    assert slowest_part([1.0] * 96 + [0.35], 12) == pytest.approx(8.35, abs=1e-3)

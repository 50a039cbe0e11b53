"""Cuts of a chain into a given number of stages: the slowest stage as fast as memory allows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def balanced(stage_s: np.ndarray | Sequence[np.ndarray], fits: Sequence[np.ndarray]) -> tuple[int, ...] | None:
    """Boundaries 0, ..., n of the cut whose slowest stage is fastest; None when no cut fits.

    Args:
        stage_s: [n + 1, n + 1] time of blocks i..j-1, infinite where that is no stage; by stage where it differs.
        fits: by stage, bool [n + 1, n + 1], whether the run may be that stage.

    Ties go to the earliest cut. O(stages n^2).
    """
    tables = [stage_s] * len(fits) if isinstance(stage_s, np.ndarray) else stage_s
    n = len(tables[0]) - 1
    if len(fits) > n:
        return None
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    came: list[np.ndarray] = []
    for allowed, seconds in zip(fits, tables, strict=True):
        options = np.maximum(best[:, None], np.where(allowed, seconds, np.inf))
        came.append(options.argmin(axis=0))
        best = options.min(axis=0)
    if not np.isfinite(best[n]):
        return None
    marks = [n]
    for source in reversed(came):
        marks.append(int(source[marks[-1]]))
    return tuple(reversed(marks))


def least_need(needed: Sequence[np.ndarray], real: np.ndarray) -> float:
    """The least that the fullest stage can need over all cuts into as many stages; infinite when there is none."""
    n = len(real) - 1
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    for table in needed:
        best = np.maximum(best[:, None], np.where(real, table, np.inf)).min(axis=0)
    return float(best[n])


def run_sums(values: np.ndarray) -> np.ndarray:
    """[n] to [n + 1, n + 1]: the sum over i..j-1, zero for i >= j."""
    prefix = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return np.asarray(np.maximum(prefix[None, :] - prefix[:, None], 0.0))

"""Replicated stages whose exchange runs beside their work: the cost that the simulator plays, minimised exactly."""

from __future__ import annotations

import math

import numpy as np

from planner.space.types import StageChoice


def beside_the_work(
    stage_s: np.ndarray,
    weight_bytes: np.ndarray,
    cut_bytes: np.ndarray,
    devices: int,
    byte_per_s: float,
    *,
    minibatches: int = 0,
) -> tuple[StageChoice, ...] | None:
    """The stages whose slowest is fastest in steady state, on up to so many devices behind links of one bandwidth.

    A stage of m replicas takes max(F + B, 2 (m-1)/m w / bandwidth) / m a minibatch: while one round of m minibatches
    is exchanged by a ring, the next is worked on. What enters it takes its replicas' links in turn, a / bandwidth / m.

    Args:
        stage_s: [n + 1, n + 1] forward and backward of blocks i..j-1 on one device, infinite where that is no stage.
        weight_bytes: [n + 1, n + 1] gradients of blocks i..j-1.
        cut_bytes: [n + 1] what passes the cut in front of each block, one way; 0 at both ends.
        devices: most devices.
        byte_per_s: of a device's link.
        minibatches: that the replicas of every stage share evenly; 0 for any number of replicas.

    Ties go to the fewest devices. O(n^2 devices^2). None when no cut is a stage.
    """
    n = len(stage_s) - 1
    best = np.full((devices + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}
    by_replicas = [_stage_s(stage_s, weight_bytes, cut_bytes, m, byte_per_s) for m in range(1, devices + 1)]
    for used in range(1, devices + 1):
        for replicas, taken in enumerate(by_replicas[:used], start=1):
            if minibatches % replicas:
                continue
            options = np.maximum(best[used - replicas][:, None], taken)
            source = options.argmin(axis=0)
            reached = options[source, np.arange(n + 1)]
            for j in np.nonzero(reached < best[used])[0].tolist():
                came[used, j] = (replicas, int(source[j]))
            best[used] = np.minimum(best[used], reached)
    used = int(best[:, n].argmin())
    if not math.isfinite(best[used, n]):
        return None
    stages, j = [], n
    while j:
        replicas, start = came[used, j]
        stages.append(StageChoice(start, j, replicas))
        used, j = used - replicas, start
    return tuple(reversed(stages))


def _stage_s(
    stage_s: np.ndarray, weight_bytes: np.ndarray, cut_bytes: np.ndarray, replicas: int, byte_per_s: float
) -> np.ndarray:
    """[n + 1, n + 1] seconds a minibatch of a stage of so many replicas, its input included."""
    ring_s = 2 * (replicas - 1) / replicas * weight_bytes / byte_per_s
    slowest = np.maximum(np.maximum(stage_s, ring_s), cut_bytes[:, None] / byte_per_s) / replicas
    return np.where(np.tri(len(stage_s), k=0, dtype=bool), np.inf, slowest)

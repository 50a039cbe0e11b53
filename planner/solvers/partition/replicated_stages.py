"""Replicated stages whose exchange runs beside their work: the cost that the simulator plays, minimised exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from planner.hardware.collectives import moved_bytes
from planner.hardware.types import Cluster, Collective
from planner.space.types import StageChoice


def levels_of(cluster: Cluster, devices: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Units and bandwidths in bytes a second of the levels that so many devices span, innermost first."""
    sizes, speeds, left = [], [], devices
    for level in cluster.levels:
        size = min(level.size, left)
        if size > 1:
            sizes.append(size)
            speeds.append(level.device_byte_per_s * level.efficiency)
        left = max(1, left // level.size)
    return (tuple(sizes) or (1,)), (tuple(speeds) or (math.inf,))


def carried(cluster: Cluster, devices: int) -> list[float]:
    """Bytes a second that the ports of so many neighbours, 1 up to all, carry together one way, to devices of all other
    groups."""
    found = []
    for count in range(1, devices + 1):
        below, least = 1, math.inf
        for level in cluster.levels:
            if below < devices and level.size > 1:
                groups = -(-count // below)
                rate = min(groups * level.byte_per_s, count * level.device_byte_per_s) * level.efficiency
                least = min(least, rate)
            below *= level.size
        found.append(least)
    return found


def beside_the_work(
    stage_s: np.ndarray,
    weight_bytes: np.ndarray,
    cut_bytes: np.ndarray,
    ring_byte_per_s: float,
    carried_byte_per_s: Sequence[float],
    *,
    fits: Sequence[np.ndarray] = (),
    minibatches: int = 0,
) -> tuple[StageChoice, ...] | None:
    """The stages whose slowest is fastest in steady state.

    A stage of m replicas takes max(F + B, 2 (m-1)/m w / ring) / m a minibatch: while one round of m minibatches is
    exchanged by a ring, the next is worked on. What enters and leaves it passes its ports both ways: (a_in + a_out) /
    carried(m).

    Args:
        stage_s: [n + 1, n + 1] forward and backward of blocks i..j-1 on one device, infinite where that is no stage.
        weight_bytes: [n + 1, n + 1] gradients of blocks i..j-1.
        cut_bytes: [n + 1] what passes the cut in front of each block, one way; 0 at both ends.
        ring_byte_per_s: of the narrowest link of a ring.
        carried_byte_per_s: by number of replicas, from 1 up to all devices: what their ports carry together.
        fits: by minibatches in flight, from 1 up to all devices, bool [n + 1, n + 1], whether blocks i..j-1 fit then.
            A stage of r replicas with b devices behind it has ceil(b/r) + 1 in flight. Empty: memory does not matter.
        minibatches: that the replicas of every stage share evenly; 0 for any number of replicas.

    Ties go to the fewest devices. O(n^2 devices^2). None when there are no such stages.
    """
    devices = len(carried_byte_per_s)
    n = len(stage_s) - 1
    best = np.full((devices + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    came: dict[tuple[int, int], tuple[int, int]] = {}
    by_replicas = [
        np.maximum(
            np.maximum(stage_s, moved_bytes(Collective.ALL_REDUCE, weight_bytes, m) / ring_byte_per_s) / m,
            (cut_bytes[:, None] + cut_bytes[None, :]) / carried,
        )
        for m, carried in enumerate(carried_byte_per_s, start=1)
    ]
    empty = np.tri(n + 1, k=0, dtype=bool)
    for used in range(1, devices + 1):
        for replicas, taken in enumerate(by_replicas[:used], start=1):
            if minibatches % replicas:
                continue
            in_flight = -(-(devices - used) // replicas) + 1
            out = empty | ~fits[in_flight - 1] if fits else empty
            options = np.maximum(best[used - replicas][:, None], np.where(out, np.inf, taken))
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

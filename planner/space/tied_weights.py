"""Price the all-reduce of gradients between the first and the last stage where both hold the same weights.

The first stage has r replicas at device a of the slice, the last one s replicas at its end. With g = gcd(r, s), group q
of a copy has replicas q, q + g, .. of both. Shifting a group by whole children of the outermost level keeps its shape,
so of all copies and groups only the distinct shifts within such a child are looked at, and of places far from the last
stage only those within one child.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from planner.hardware.collectives import Terms, collective_terms
from planner.hardware.tiers import child_sizes
from planner.hardware.types import Cluster, Collective


class TiedEnds:
    """Prices of the all-reduce between the first and the last stage, each distinct set of concurrent groups once.

    All pairs of first and last stages take O(R^2 child^2 replicas), child that of the outermost level.

    Args:
        cluster: the machine.
        copies: copies of the pipeline.
        slice_devices: devices of one copy, groups of `ranks` counting as one.
        replicas: int64 [R] allowed numbers of replicas of a stage.
        ranks: neighbours that count as one device (`planner.space.placement.aligned`).

    Attributes:
        which: int64 [R, R, W], by last stage, first stage and device of the first: index into `terms`; -1 where the two
            overlap.
        terms: by index, prices of the groups that communicate at once; the slowest counts.
    """

    def __init__(self, cluster: Cluster, copies: int, slice_devices: int, replicas: np.ndarray, ranks: int = 1) -> None:
        self._cluster, self._copies, self._width, self._ranks = cluster, copies, slice_devices, ranks
        self._child = max(1, child_sizes(cluster)[-2] // ranks) if cluster.levels else 1
        if cluster.unlike:
            self._child = copies * slice_devices
        self._cache: dict[tuple[object, ...], int] = {}
        self.terms: list[tuple[Terms, ...]] = []
        self.which = np.full((len(replicas), len(replicas), slice_devices), -1, dtype=np.int64)
        for last, last_replicas in enumerate(replicas.tolist()):
            for first, first_replicas in enumerate(replicas.tolist()):
                starts = slice_devices - first_replicas - last_replicas + 1
                if starts > 0:
                    self.which[last, first, :starts] = self._indices(first_replicas, last_replicas)

    def seconds(self, payload_bytes: float) -> tuple[np.ndarray, np.ndarray]:
        """[T, R, W] seconds by class of last stage, and [R] class of each last stage; equal tables are one class."""
        seconds = [max(float(terms.seconds(payload_bytes)) for terms in groups) for groups in self.terms]
        table = np.array([*seconds, math.inf])[self.which]
        classes, class_of = np.unique(table.reshape(len(table), -1), axis=0, return_inverse=True)
        return classes.reshape(-1, *table.shape[1:]), class_of.reshape(-1)

    def _indices(self, first: int, last: int) -> np.ndarray:
        """[starts] number of the set of groups of `first` replicas at each start and `last` at the slice's end."""
        last_start, groups = self._width - first - last, math.gcd(first, last)
        # Starts whose devices all lie a child or more before the last stage repeat from child to child.
        repeating = max(0, last_start - self._child + 1)
        starts_in_slice = np.arange(last_start + 1)
        equivalent = np.where(starts_in_slice < repeating, starts_in_slice % self._child, starts_in_slice)
        distinct_starts, start_of = np.unique(equivalent, return_inverse=True)
        starts = np.arange(0, first, groups)
        ends = np.broadcast_to(
            np.arange(self._width - last, self._width, groups), (len(distinct_starts), last // groups)
        )
        base = np.concatenate([distinct_starts[:, None] + starts, ends], axis=1)
        ranks = (base[:, None, :] + self._shifts(groups)[None, :, None]) * self._ranks
        shapes = _shapes(ranks.reshape(-1, ranks.shape[-1]), self._cluster)
        distinct, shape = np.unique(shapes, axis=0, return_inverse=True)
        numbers = []
        for place, present in enumerate(shape.reshape(ranks.shape[:2])):
            shape_numbers, members = np.unique(present, return_index=True)
            concurrent = self._copies * groups * self._ranks
            key = (concurrent, *(tuple(distinct[k].tolist()) for k in shape_numbers))
            if key not in self._cache:
                self._cache[key] = len(self.terms)
                self.terms.append(self._prices(ranks[place, members], concurrent))
            numbers.append(self._cache[key])
        return np.array(numbers)[start_of.reshape(-1)]

    def _shifts(self, groups: int) -> np.ndarray:
        """Offsets of the groups of all copies, one for each distinct offset within a child."""
        shift = (np.arange(self._copies)[:, None] * self._width + np.arange(min(groups, self._child))).ravel()
        return np.asarray(shift[np.unique(shift % self._child, return_index=True)[1]])

    def _prices(self, groups: np.ndarray, concurrent: int) -> tuple[Terms, ...]:
        return tuple(collective_terms(self._cluster, Collective.ALL_REDUCE, ranks, concurrent) for ranks in groups)


def _shapes(ranks: np.ndarray, cluster: Cluster) -> np.ndarray:
    """[groups, 2 + 3 levels] all that the price of a group (a row of ascending ranks) depends on.

    The number of ranks, their device types as bits where nodes have links of their own, and on each level the most
    children of a parent, and the fewest and most ranks of a child.
    """
    types = cluster.device_types[ranks] if cluster.unlike else np.zeros_like(ranks)
    columns = [np.full(len(ranks), ranks.shape[1]), np.bitwise_or.reduce(1 << types, axis=1)]
    for below, above in pairwise(child_sizes(cluster)):
        child, parent = ranks // below, ranks // above
        new = np.ones(ranks.shape, dtype=bool)
        new[:, 1:] = child[:, 1:] != child[:, :-1]
        fewest, most = _runs(child, np.ones(ranks.shape, dtype=np.int64))
        columns += [_runs(parent, new.astype(np.int64))[1], fewest, most]
    return np.stack(columns, axis=1)


def _runs(keys: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least and greatest sum of weights over the runs of equal keys in each row."""
    ends = np.ones(keys.shape, dtype=bool)
    ends[:, :-1] = keys[:, 1:] != keys[:, :-1]
    total = np.cumsum(weights, axis=1)
    sum_at_end = np.where(ends, total, 0)
    sum_before = np.zeros_like(sum_at_end)
    sum_before[:, 1:] = np.maximum.accumulate(sum_at_end, axis=1)[:, :-1]
    run_sum = total - sum_before
    return np.where(ends, run_sum, np.iinfo(np.int64).max).min(axis=1), np.where(ends, run_sum, 0).max(axis=1)

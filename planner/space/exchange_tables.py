"""What replicas exchange and hold, as tables over stages of blocks i..j and the places where stages can lie.

All of it is read off the recipe of the ZeRO stage (`planner.exchange.recipe_of`), but for the all-reduce of gradients
between the first and the last stage where both hold the same weights.

The first stage has r replicas at device a of the slice, the last one s replicas at its end. With g = gcd(r, s), group q
of a copy has replicas q, q + g, .. of both. Shifting a group by whole children of the outermost level keeps its shape,
so of all copies and groups only the distinct shifts within such a child are looked at, and of places far from the last
stage only those within one child.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from planner.costs.precision import Precision
from planner.exchange import ExchangeStep, Phase, RankGroup, Recipe, kept_bytes, recipe_of
from planner.hardware.collectives import Terms, collective_terms
from planner.hardware.tiers import child_sizes
from planner.hardware.types import Cluster, Collective
from planner.space.blocks import range_sums
from planner.space.placement import Placement, Placements
from planner.space.ranges import Ranges
from planner.space.types import BlockCosts

_CACHED_BYTES = 2**27


class ExchangeTables:
    """Builds the exchange and memory tables of one job, and keeps those of equal weights for the next call.

    Args:
        precision: number formats.
        state_bytes: bytes of optimizer state a parameter.
    """

    def __init__(self, precision: Precision, state_bytes: float) -> None:
        self._precision, self._state_bytes = precision, state_bytes
        self._cache: dict[tuple[int, int, bytes], np.ndarray] = {}

    def at_end(self, placement: Placement, costs: BlockCosts, ranges: Ranges, zero: int) -> np.ndarray:
        """[P, n, n] seconds of a stage's exchanges at the end of an iteration, by place and blocks i..j."""
        among = self._among_replicas(placement, ranges.shard_elements, zero)
        inner = [(inner.terms, elements) for inner, elements in zip(costs.inner_replicas, ranges.inner, strict=True)]
        return among + self._inner_s(inner, recipe_of(zero), Phase.END) if inner else among

    def _inner_s(
        self, inner: Sequence[tuple[Mapping[Collective, Terms], np.ndarray]], recipe: Recipe, phase: Phase
    ) -> np.ndarray:
        """Seconds of a phase's exchanges among ranks of one replica that hold the same elements."""
        total_s = np.zeros(inner[0][1].shape)
        for step in (step for step in recipe.among_inner if step.phase is phase):
            for terms, elements in inner:
                total_s += self._seconds(terms[step.collective], elements, step)
        return total_s

    def _among_replicas(self, placement: Placement, elements: np.ndarray, zero: int) -> np.ndarray:
        steps = recipe_of(zero).during(Phase.END)
        places = range(len(placement.place_kind))
        if not steps:
            return np.zeros((len(places), *elements.shape))
        key = (id(placement), zero, elements.tobytes())
        if key not in self._cache:
            tables = [sum(self._step_s(placement, p, elements, step) for step in steps) for p in places]
            while self._cache and sum(t.nbytes for t in self._cache.values()) > _CACHED_BYTES:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = np.stack(tables)
        return self._cache[key]

    def in_passes(self, placement: Placement, costs: BlockCosts, zero: int) -> tuple[np.ndarray, np.ndarray]:
        """[P, n, n] seconds of exchanges in a forward pass, and the same in a backward pass; P is 0 if there are none.

        Args:
            placement: the places.
            costs: of the blocks.
            zero: ZeRO stage.
        """
        recipe = recipe_of(zero)
        elements = costs.exchanged_elements
        inner = [(inner.terms, inner.elements) for inner in costs.inner_replicas]
        count = len(placement.place_kind) if recipe.during(Phase.FORWARD, Phase.BACKWARD) else 0
        forward, backward = np.zeros((2, count, len(elements), len(elements)))
        for p in range(count):
            for table, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
                for step in recipe.during(phase):
                    table[p] += range_sums(self._step_s(placement, p, elements, step))
                if inner:
                    table[p] += range_sums(self._inner_s(inner, recipe, phase))
        return forward, backward

    def _step_s(self, placement: Placement, place: int, elements: np.ndarray, step: ExchangeStep) -> np.ndarray:
        return self._seconds(placement.exchanges[step.way][place], elements, step)

    def _seconds(self, terms: Terms, elements: np.ndarray, step: ExchangeStep) -> np.ndarray:
        return np.where(elements > 0, _cheapest_s(terms, elements * step.payload(self._precision)), 0.0)

    def resident(
        self, ranges: Ranges, largest: np.ndarray | float, parts: Callable[[RankGroup | None], np.ndarray], zero: int
    ) -> np.ndarray:
        """[.., n, n] bytes of weights, gradients, optimizer state and workspace of a stage's device.

        Args:
            ranges: sums over blocks i..j.
            largest: [n, n] elements of the largest block of a stage, which sets the transient buffers.
            parts: [..] number of shards that a group makes.
            zero: ZeRO stage.
        """
        kept = kept_bytes(
            recipe_of(zero),
            self._precision,
            self._state_bytes,
            lambda group: ranges.parts(parts(group), group),
            spare_bytes=self._precision.spare_bytes,
            copy_bytes=self._precision.copy_bytes,
        )
        element_bytes = kept.weights + kept.gradients + kept.optimizer
        return np.asarray(element_bytes * ranges.elements + kept.transient * largest + ranges.workspace_bytes)

    def least_terms(
        self, placements: Placements, task: tuple[int, int, int], replicas: Sequence[int], phase: Phase
    ) -> np.ndarray:
        """[R, 2] lower bound on the exchanges of a phase: seconds at start-up, and seconds an element.

        In a pass, every block with weights starts an exchange of its own.

        Args:
            placements: where stages may lie.
            task: copies, devices of one copy, ZeRO stage.
            replicas: allowed numbers of replicas of a stage.
            phase: the end of an iteration, or a pass.
        """
        copies, width, zero = task
        terms = np.zeros((len(replicas), 2))
        for step in recipe_of(zero).during(phase):
            terms += placements.least_terms(copies, width, replicas, step) * [1.0, step.payload(self._precision)]
        return terms


def _cheapest_s(terms: Terms, payload_bytes: np.ndarray) -> np.ndarray:
    """Seconds of the fastest algorithm at each payload, of those that the cluster can run."""
    applies = np.flatnonzero(np.isfinite(terms.latency_s))
    first, *others = [terms.latency_s[k] + terms.s_per_byte[k] * payload_bytes for k in applies]
    for seconds in others:
        np.minimum(first, seconds, out=first)
    return np.asarray(first)


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

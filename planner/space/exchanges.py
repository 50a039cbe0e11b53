"""What replicas exchange at each place, and what each of them holds: tables over stages of blocks i..j.

All of it is read off the recipe of the ZeRO stage (`planner.exchange.recipe_of`).

What it costs to sum the gradients of weights that the first and the last stage of a pipeline both hold.

The first stage has r replicas at device a of the slice, the last one s replicas at its end. With g = gcd(r, s), group q
of a copy has replicas q, q + g, .. of both. Shifting a group by whole children of the outermost level keeps its shape,
so of all copies and groups only the distinct shifts within such a child are looked at, and of places far from the last
stage only those within one child.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.costs.precision import Precision
from planner.exchange import ExchangeStep, Group, Phase, Recipe, kept_bytes, recipe_of
from planner.hardware.collectives import Terms, collective_terms
from planner.hardware.tiers import child_sizes
from planner.hardware.types import Cluster, Collective
from planner.space.placement import Placement, Placements
from planner.space.ranges import Ranges, range_maxima, range_sums
from planner.space.types import BlockCosts

_CACHED_BYTES = 2**27


class Exchanges:
    """Tables of one job's exchanges, those of equal weights worked out once.

    Args:
        precision: number formats.
        state_bytes: of the optimizer, a parameter.
    """

    def __init__(self, precision: Precision, state_bytes: float) -> None:
        self._precision, self._state_bytes = precision, state_bytes
        self._known: dict[tuple[int, int, bytes], np.ndarray] = {}

    def at_end(self, placement: Placement, costs: BlockCosts, ranges: Ranges, zero: int) -> np.ndarray:
        """[P, n, n] seconds of what a stage exchanges once, at the end of an iteration."""
        among = self._among_replicas(placement, ranges.shard_elements, zero)
        inner = [(inner.terms, held) for inner, held in zip(costs.inner_replicas, ranges.inner, strict=True)]
        return among + self._inner_s(inner, recipe_of(zero), Phase.END) if inner else among

    def _inner_s(
        self, inner: Sequence[tuple[Mapping[Collective, Terms], np.ndarray]], recipe: Recipe, phase: Phase
    ) -> np.ndarray:
        """Seconds of a phase's steps among ranks of one replica that hold the same elements, of all such sets."""
        found = np.zeros(inner[0][1].shape)
        for step in (each for each in recipe.among_inner if each.phase is phase):
            for terms, elements in inner:
                found += self._seconds(terms[step.collective], elements, step)
        return found

    def _among_replicas(self, placement: Placement, elements: np.ndarray, zero: int) -> np.ndarray:
        steps = recipe_of(zero).during(Phase.END)
        places = range(len(placement.place_kind))
        if not steps:
            return np.zeros((len(places), *elements.shape))
        key = (id(placement), zero, elements.tobytes())
        if key not in self._known:
            tables = [sum(self._step_s(placement, p, elements, step) for step in steps) for p in places]
            while self._known and sum(t.nbytes for t in self._known.values()) > _CACHED_BYTES:
                del self._known[next(iter(self._known))]
            self._known[key] = np.stack(tables)
        return self._known[key]

    def in_passes(self, placement: Placement, costs: BlockCosts, zero: int) -> tuple[np.ndarray, np.ndarray]:
        """([P, n, n] seconds in a forward, the same in a backward pass), block by block; P is 0 where there are none.

        Args:
            placement: the places.
            costs: of the blocks.
            zero: ZeRO stage.
        """
        recipe = recipe_of(zero)
        own = costs.parameter_elements if costs.shard_elements is None else costs.shard_elements
        inner = [(inner.terms, inner.elements) for inner in costs.inner_replicas]
        count = len(placement.place_kind) if recipe.during(Phase.FORWARD, Phase.BACKWARD) else 0
        forward, backward = np.zeros((2, count, len(own), len(own)))
        for p in range(count):
            for table, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
                for step in recipe.during(phase):
                    table[p] += range_sums(self._step_s(placement, p, own, step))
                if inner:
                    table[p] += range_sums(self._inner_s(inner, recipe, phase))
        return forward, backward

    def _step_s(self, placement: Placement, place: int, elements: np.ndarray, step: ExchangeStep) -> np.ndarray:
        return self._seconds(placement.exchanges[step.way][place], elements, step)

    def _seconds(self, terms: Terms, elements: np.ndarray, step: ExchangeStep) -> np.ndarray:
        return np.where(elements > 0, _least(terms, elements * step.payload(self._precision)), 0.0)

    def resident(
        self, ranges: Ranges, own: np.ndarray, parts: Callable[[Group | None], np.ndarray], zero: int
    ) -> np.ndarray:
        """[.., n, n] bytes of weights, gradients, optimizer state and workspace, in so many parts [..] by group."""
        kept = kept_bytes(
            recipe_of(zero),
            self._precision,
            self._state_bytes,
            lambda group: ranges.parts(parts(group), group),
            spare_bytes=self._precision.spare_bytes,
            copy_bytes=self._precision.copy_bytes,
        )
        each = kept.weights + kept.gradients + kept.optimizer + kept.gathered
        return np.asarray(each * ranges.elements + kept.transient * range_maxima(own) + ranges.workspace_bytes)

    def least(self, placements: Placements, task: tuple[int, int, int], replicas: Sequence[int]) -> np.ndarray:
        """[R, 2] seconds at the end of an iteration at the least, without parameters and for each of them.

        Args:
            placements: where stages may lie.
            task: copies, devices of one copy, ZeRO stage.
            replicas: what a stage may have.
        """
        copies, width, zero = task
        found = np.zeros((len(replicas), 2))
        for step in recipe_of(zero).during(Phase.END):
            found += placements.least(copies, width, replicas, step) * [1.0, step.payload(self._precision)]
        return found


def _least(terms: Terms, payload_bytes: np.ndarray) -> np.ndarray:
    """The cheapest algorithm at each payload, looking only at those that apply."""
    applies = np.flatnonzero(np.isfinite(terms.latency_s))
    first, *others = [terms.latency_s[k] + terms.s_per_byte[k] * payload_bytes for k in applies]
    for seconds in others:
        np.minimum(first, seconds, out=first)
    return np.asarray(first)


@dataclass(frozen=True, eq=False)
class TiedEnds:
    """Prices of the all-reduce between first and last stages.

    Attributes:
        which: int64 [R, R, W], by last stage, first stage and device of the first: index into `terms`; -1 where the two
            overlap.
        terms: for each index the groups that are at work at the same time; the slowest counts.
    """

    which: np.ndarray
    terms: tuple[tuple[Terms, ...], ...]

    def seconds(self, payload_bytes: float) -> tuple[np.ndarray, np.ndarray]:
        """([T, R, W] seconds by class of last stage, [R] class of each last stage), last stages alike in one class."""
        priced = [max(float(terms.seconds(payload_bytes)) for terms in groups) for groups in self.terms]
        table = np.array([*priced, math.inf])[self.which]
        classes, of = np.unique(table.reshape(len(table), -1), axis=0, return_inverse=True)
        return classes.reshape(-1, *table.shape[1:]), of.reshape(-1)


def tied_ends(cluster: Cluster, copies: int, slice_devices: int, replicas: np.ndarray, ranks: int = 1) -> TiedEnds:
    """Price all pairs of first and last stages; O(R^2 child^2 replicas), child that of the outermost level.

    Args:
        cluster: the machine.
        copies: copies of the pipeline.
        slice_devices: devices of one copy, groups of `ranks` counting as one.
        replicas: what a stage may have.
        ranks: neighbours that act as one device (`planner.space.placement.aligned`).
    """
    pricer = _Pricer(cluster, copies, slice_devices, ranks)
    which = np.full((len(replicas), len(replicas), slice_devices), -1, dtype=np.int64)
    for last, behind in enumerate(replicas.tolist()):
        for first, ahead in enumerate(replicas.tolist()):
            if ahead + behind <= slice_devices:
                which[last, first, : slice_devices - ahead - behind + 1] = pricer.indices(ahead, behind)
    return TiedEnds(which, tuple(pricer.terms))


class _Pricer:
    """Numbers distinct sets of groups, and prices each once."""

    def __init__(self, cluster: Cluster, copies: int, width: int, ranks: int) -> None:
        self._cluster, self._copies, self._width, self._ranks = cluster, copies, width, ranks
        self._child = max(1, child_sizes(cluster)[-2] // ranks) if cluster.levels else 1
        if cluster.unlike:
            self._child = copies * width
        self._known: dict[tuple[object, ...], int] = {}
        self.terms: list[tuple[Terms, ...]] = []

    def indices(self, first: int, last: int) -> np.ndarray:
        """[places] index of the groups of `first` replicas at each device and `last` ones at the slice's end."""
        room, groups = self._width - first - last, math.gcd(first, last)
        # Places whose devices all lie a child or more before the last stage repeat from child to child.
        repeating = max(0, room - self._child + 1)
        at = np.arange(room + 1)
        alike = np.where(at < repeating, at % self._child, at)
        chosen, of = np.unique(alike, return_inverse=True)
        starts = np.arange(0, first, groups)
        ends = np.broadcast_to(np.arange(self._width - last, self._width, groups), (len(chosen), last // groups))
        base = np.concatenate([chosen[:, None] + starts, ends], axis=1)
        ranks = (base[:, None, :] + self._shifts(groups)[None, :, None]) * self._ranks
        shapes = _shapes(ranks.reshape(-1, ranks.shape[-1]), self._cluster)
        distinct, shape = np.unique(shapes, axis=0, return_inverse=True)
        found = []
        for place, present in enumerate(shape.reshape(ranks.shape[:2])):
            kinds, members = np.unique(present, return_index=True)
            working = self._copies * groups * self._ranks
            key = (working, *(tuple(distinct[k].tolist()) for k in kinds))
            if key not in self._known:
                self._known[key] = len(self.terms)
                self.terms.append(self._priced(ranks[place, members], working))
            found.append(self._known[key])
        return np.array(found)[of.reshape(-1)]

    def _shifts(self, groups: int) -> np.ndarray:
        """By how much groups of all copies are shifted, one of each distance within a child."""
        shift = (np.arange(self._copies)[:, None] * self._width + np.arange(min(groups, self._child))).ravel()
        return np.asarray(shift[np.unique(shift % self._child, return_index=True)[1]])

    def _priced(self, groups: np.ndarray, working: int) -> tuple[Terms, ...]:
        return tuple(collective_terms(self._cluster, Collective.ALL_REDUCE, ranks, working) for ranks in groups)


def _shapes(ranks: np.ndarray, cluster: Cluster) -> np.ndarray:
    """[groups, 2 + 3 levels] what the price of each group (a row of ascending ranks) follows from.

    The number of ranks, their device types where nodes have links of their own (as bits), and on each level the most
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
    upto = np.where(ends, total, 0)
    before = np.zeros_like(upto)
    before[:, 1:] = np.maximum.accumulate(upto, axis=1)[:, :-1]
    run = total - before
    return np.where(ends, run, np.iinfo(np.int64).max).min(axis=1), np.where(ends, run, 0).max(axis=1)

"""Where the stages of a pipeline can lie on a slice of devices, and what communication costs there.

A stage with r replicas at device a of the slice is, over all copies, the ranks `c W + a .. c W + a + r - 1`. Hundreds
of such places differ only in which levels they span and which device types they hold, so prices are kept by distinct
place. Where t ranks share every operator, a "device" here is t neighbouring ones that act as one: equal ranks of them
exchange gradients among themselves and hand over to each other, all t of them at once.

"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.exchange import ExchangeStep, RankGroup, parts_of, recipes, step_terms
from planner.hardware.collectives import Terms, send_terms
from planner.hardware.tiers import Span, span_of
from planner.hardware.types import Cluster, Collective

_StepKind = tuple[Collective, RankGroup]


@dataclass(frozen=True, eq=False)
class Placement:
    """The places of a slice and the boundaries between stages.

    Attributes:
        copies: copies of the pipeline, each on its own slice.
        slice_devices: devices of a slice, W.
        replicas: int64 [R] allowed numbers of replicas.
        place: int64 [R, W] number of the place by replicas and first device; -1 where the stage does not fit.
        place_replicas: int64 [P] replicas of a place in one copy.
        place_kind: int64 [P] index into `kinds`.
        kinds: sets of device types that places have, ascending.
        parts: by group, int64 [P] number of shards that it makes at each place; ones for None.
        exchanges: by `ExchangeStep.way`, the price of the step at each place.
        link: int64 [R, R, W + 1] boundary class by replicas before, replicas after and device; -1 where the stages do
            not fit.
        sends: by boundary class, the prices of its transfers, of which the slowest counts.
    """

    copies: int
    slice_devices: int
    replicas: np.ndarray
    place: np.ndarray
    place_replicas: np.ndarray
    place_kind: np.ndarray
    kinds: tuple[tuple[int, ...], ...]
    parts: Mapping[RankGroup | None, np.ndarray]
    exchanges: Mapping[_StepKind, tuple[Terms, ...]]
    link: np.ndarray
    sends: tuple[Terms, ...]


@dataclass(frozen=True, eq=False)
class _ReplicaPlaces:
    """The distinct places of stages with one number of replicas.

    Attributes:
        at: number of the place by first device in the slice; -1 where the stage does not fit.
        replicas: replicas in one copy.
        types: device types of each place.
        parts: number of shards that each group makes, by place.
        terms: prices of exchange steps, by place.
        least_terms: least start-up time and least seconds a byte over all places.
    """

    at: np.ndarray
    replicas: int
    types: tuple[tuple[int, ...], ...]
    parts: Mapping[RankGroup | None, list[int]]
    terms: Mapping[_StepKind, tuple[Terms, ...]]
    least_terms: Mapping[_StepKind, tuple[float, float]]


class Placements:
    """Lists and prices the places of slices of a cluster; what several slices share is priced once.

    Args:
        cluster: the machine.
        ranks: devices of a replica, which count as one device here; see `aligned`.

    Attributes:
        lay_out: by copies, devices of a slice and numbers of replicas, the places of the slice with their prices.
    """

    def __init__(self, cluster: Cluster, ranks: int = 1) -> None:
        self._cluster, self._ranks = cluster, ranks
        self._sizes = np.asarray((1, *cluster.group_sizes()))
        self._terms: dict[tuple[_StepKind, Span, int], Terms] = {}
        self._recipes = tuple(recipes().values())
        self.lay_out, self._places_of = functools.cache(self._lay_out), functools.cache(self._find_places)
        self._boundary_depths = functools.cache(self._find_depths)
        self._boundary_terms = functools.cache(functools.partial(_send_terms, cluster, self._sizes))

    def least_terms(self, copies: int, slice_devices: int, replicas: Sequence[int], step: ExchangeStep) -> np.ndarray:
        """[R, 2] least start-up seconds and least seconds a byte of a step, over all places of a stage."""
        return np.array(
            [self._places_of(copies, slice_devices, int(count)).least_terms[step.way] for count in replicas]
        )

    def _lay_out(self, copies: int, width: int, replicas: tuple[int, ...]) -> Placement:
        """List the places of a slice and price what happens there; O(R * ranks + R^2 * slice * pairs)."""
        options = np.asarray(replicas, dtype=np.int64)
        rows = [self._places_of(copies, width, count) for count in replicas]
        offsets = np.cumsum([0, *(len(row.types) for row in rows)])
        kinds = sorted({types for row in rows for types in row.types})
        link, sends = self._links(copies, width, options)
        return Placement(
            copies=copies,
            slice_devices=width,
            replicas=options,
            place=np.stack([np.where(r.at < 0, -1, r.at + first) for r, first in zip(rows, offsets, strict=False)]),
            place_replicas=np.array([row.replicas for row in rows for _ in row.types], dtype=np.int64),
            place_kind=np.array([kinds.index(types) for row in rows for types in row.types], dtype=np.int64),
            kinds=tuple(kinds),
            parts={g: np.array([n for row in rows for n in row.parts[g]], dtype=np.int64) for g in rows[0].parts},
            exchanges={way: tuple(t for row in rows for t in row.terms[way]) for way in rows[0].terms},
            link=link,
            sends=sends,
        )

    def nearest_send(self) -> Terms:
        """Price of a transfer to the next device, [1, algorithms]: a lower bound for all transfers between stages."""
        return send_terms(self._cluster, 0, np.asarray([self._ranks % self._cluster.device_count]), self._ranks)

    def _find_places(self, copies: int, width: int, count: int) -> _ReplicaPlaces:
        """Find places that differ in the device types and levels of a stage, all its copies together."""
        at = np.full(width, -1, dtype=np.int64)
        place_numbers: dict[tuple[tuple[int, ...], Span], int] = {}
        ranks_of: list[np.ndarray] = []
        starts = np.arange(copies)[:, None] * width
        period = self._period(copies, width)
        for start in range(width - count + 1):
            if start >= period:
                at[start] = at[start - period]
                continue
            ranks = (starts + start + np.arange(count)).ravel() * self._ranks
            devices = (ranks[:, None] + np.arange(self._ranks)).ravel()
            types = tuple(np.unique(self._cluster.device_types[devices]).tolist())
            place = (types, span_of(self._cluster, ranks))
            if place not in place_numbers:
                place_numbers[place] = len(place_numbers)
                ranks_of.append(ranks)
            at[start] = place_numbers[place]
        concurrent = max(1, width // count) * self._ranks
        terms = {
            step.way: tuple(
                self._step_terms(step, span, concurrent, ranks)
                for (_, span), ranks in zip(place_numbers, ranks_of, strict=True)
            )
            for recipe in self._recipes
            for step in recipe.steps
        }
        least_terms = {way: _lower_bounds(each) for way, each in terms.items()}
        holders = {group for recipe in self._recipes for group in (None, *recipe.held)}
        parts = {group: [parts_of(self._cluster, ranks, group) for ranks in ranks_of] for group in holders}
        return _ReplicaPlaces(at, count, tuple(types for types, _ in place_numbers), parts, terms, least_terms)

    def _step_terms(self, step: ExchangeStep, span: Span, concurrent: int, ranks: np.ndarray) -> Terms:
        key = (step.way, span, concurrent)
        if key not in self._terms:
            self._terms[key] = step_terms(self._cluster, step, ranks, concurrent)
        return self._terms[key]

    def _period(self, copies: int, width: int) -> int:
        """Devices after which places repeat: a child of the outermost level, if copies start at equal offsets in it."""
        child = max(1, int(self._sizes[-2]) // self._ranks) if self._cluster.levels else 1
        repeats = len(self._cluster.devices) == 1 and (copies == 1 or width % child == 0)
        return child if repeats else width

    def _links(self, copies: int, width: int, options: np.ndarray) -> tuple[np.ndarray, tuple[Terms, ...]]:
        """Classes of boundaries, by the levels that the communicating pairs cross and how many send at once."""
        count = len(options)
        link = np.full((count, count, width + 1), -1, dtype=np.int64)
        class_of: dict[tuple[int, int], int] = {}
        for before, senders in enumerate(options.tolist()):
            for after, receivers in enumerate(options.tolist()):
                if senders + receivers > width:
                    continue
                boundaries = np.arange(senders, width - receivers + 1)
                depths = self._boundary_depths(copies, width, senders, receivers)
                concurrent = min(senders, receivers) * self._ranks
                for depth in np.unique(depths).tolist():
                    link[before, after, boundaries[depths == depth]] = class_of.setdefault(
                        (depth, concurrent), len(class_of)
                    )
        return link, tuple(self._boundary_terms(*key) for key in class_of)

    def _find_depths(self, copies: int, width: int, senders: int, receivers: int) -> np.ndarray:
        boundaries = np.arange(senders, width - receivers + 1)
        return _depths(boundaries, copies, width, senders, receivers, self._sizes / self._ranks)


def aligned(cluster: Cluster, ranks: int) -> bool:
    """True if every group of that many neighbours is inside one child of each level, or is whole children of it."""
    sizes = cluster.group_sizes()
    return all(size % ranks == 0 or ranks % size == 0 for size in sizes) and (not sizes or ranks <= sizes[-1])


def _lower_bounds(terms: Sequence[Terms]) -> tuple[float, float]:
    applies = [np.isfinite(t.latency_s) for t in terms]
    latency_s = min(float(t.latency_s[a].min()) for t, a in zip(terms, applies, strict=True))
    return latency_s, min(float(t.s_per_byte[a].min()) for t, a in zip(terms, applies, strict=True))


def _depths(
    boundaries: np.ndarray, copies: int, width: int, senders: int, receivers: int, sizes: np.ndarray
) -> np.ndarray:
    """int64 [boundaries] bit set of the level depths that the communicating pairs of each boundary cross."""
    turns = np.arange(int(np.lcm(senders, receivers)))
    bits = np.zeros(len(boundaries), dtype=np.int64)
    for copy in range(copies):
        boundary = copy * width + boundaries[:, None]
        source, target = boundary - senders + turns % senders, boundary + turns % receivers
        depth = np.zeros(source.shape, dtype=np.int64)
        for size in sizes.tolist():  # a group smaller than a device separates all devices
            depth += source // size != target // size
        bits |= np.bitwise_or.reduce(1 << depth, axis=1)
    return bits


def _send_terms(cluster: Cluster, sizes: np.ndarray, bits: int, concurrent: int) -> Terms:
    """Prices of one transfer at each depth of the bit set; ranks 0 and `sizes[d - 1]` are connected at depth d."""
    targets = [int(sizes[d - 1]) for d in range(1, len(sizes) + 1) if bits >> d & 1]
    return send_terms(cluster, 0, np.asarray(targets), concurrent)

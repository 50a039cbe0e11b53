"""Where stages can lie in a slice, and what communication costs there: everything that does not depend on the blocks.

A stage with r replicas at device a of the slice is, over all copies, the ranks `c W + a .. c W + a + r - 1`. Hundreds
of such places differ only in which levels they span and which device types they hold, so prices are kept by distinct
place. Where t ranks share every operator, a "device" here is t neighbouring ones that act as one: equal ranks of them
exchange gradients among themselves and hand over to each other, all t of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.exchange import ExchangeStep, Group, parts_of, recipes, step_terms
from planner.hardware.collectives import Terms, send_terms
from planner.hardware.tiers import Span, span_of
from planner.hardware.types import Cluster, Collective

_Way = tuple[Collective, Group]


@dataclass(frozen=True, eq=False)
class Placement:
    """The places of a slice and the boundaries between them.

    Attributes:
        copies: copies of the pipeline, each on its own slice.
        slice_devices: devices of a slice, W.
        replicas: int64 [R] allowed replicas.
        place: int64 [R, W]; -1 where the stage does not fit.
        place_replicas: int64 [P] replicas of a place in one copy.
        place_kind: int64 [P].
        kinds: device types of each kind, ascending.
        parts: int64 [P] by group, into how many parts it cuts what it shards at each place; ones for None.
        exchanges: prices of an exchange's steps at each place, by `ExchangeStep.way`.
        link: int64 [R, R, W + 1] boundary classes; -1 where the stages do not fit.
        sends: for each boundary class, the prices of its transfers; the slowest counts.
    """

    copies: int
    slice_devices: int
    replicas: np.ndarray
    place: np.ndarray
    place_replicas: np.ndarray
    place_kind: np.ndarray
    kinds: tuple[tuple[int, ...], ...]
    parts: Mapping[Group | None, np.ndarray]
    exchanges: Mapping[_Way, tuple[Terms, ...]]
    link: np.ndarray
    sends: tuple[Terms, ...]


@dataclass(frozen=True, eq=False)
class _Row:
    """Places of stages with one number of replicas.

    Attributes:
        at: index of the place by device of the slice; -1: no room.
        replicas: of one copy.
        types: device types of each place.
        parts: of each group at each place.
        terms: prices of steps at each place.
        least: least start-up time and least seconds a byte over all places.
    """

    at: np.ndarray
    replicas: int
    types: tuple[tuple[int, ...], ...]
    parts: Mapping[Group | None, list[int]]
    terms: Mapping[_Way, tuple[Terms, ...]]
    least: Mapping[_Way, tuple[float, float]]


class Placements:
    """Lays out the slices of a cluster; what several of them share is worked out once.

    Args:
        cluster: the machine.
        ranks: devices that act as one; see `aligned`.
    """

    def __init__(self, cluster: Cluster, ranks: int = 1) -> None:
        self._cluster, self._ranks = cluster, ranks
        self._sizes = np.asarray((1, *cluster.group_sizes()))
        self._whole: dict[tuple[int, int, tuple[int, ...]], Placement] = {}
        self._rows: dict[tuple[int, int, int], _Row] = {}
        self._joints: dict[tuple[int, int, int, int], np.ndarray] = {}
        self._terms: dict[tuple[_Way, Span, int], Terms] = {}
        self._recipes = tuple(recipes().values())
        self._sends: dict[tuple[int, int], Terms] = {}

    def lay_out(self, copies: int, slice_devices: int, replicas: Sequence[int]) -> Placement:
        """List the places of a slice and price what happens there; O(R * ranks + R^2 * slice * pairs)."""
        key = (copies, slice_devices, tuple(replicas))
        if key not in self._whole:
            self._whole[key] = self._lay_out(copies, slice_devices, np.asarray(replicas, dtype=np.int64))
        return self._whole[key]

    def least(self, copies: int, slice_devices: int, replicas: Sequence[int], step: ExchangeStep) -> np.ndarray:
        """[R, 2] least start-up time, and least seconds a byte, of a step among a stage's replicas anywhere."""
        return np.array([self._row(copies, slice_devices, int(count)).least[step.way] for count in replicas])

    def _lay_out(self, copies: int, width: int, options: np.ndarray) -> Placement:
        rows = [self._row(copies, width, count) for count in options.tolist()]
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

    def nearest(self) -> Terms:
        """What handing over to the next device costs at the least, [1, algorithms]; no stage gets it for less."""
        return send_terms(self._cluster, 0, np.asarray([self._ranks % self._cluster.device_count]), self._ranks)

    def _row(self, copies: int, width: int, count: int) -> _Row:
        key = (copies, width, count)
        if key not in self._rows:
            self._rows[key] = self._placed(copies, width, count)
        return self._rows[key]

    def _placed(self, copies: int, width: int, count: int) -> _Row:
        """Distinct places: which device types and levels a stage has, all copies of it together."""
        at = np.full(width, -1, dtype=np.int64)
        found: dict[tuple[tuple[int, ...], Span], int] = {}
        ranks_of: list[np.ndarray] = []
        starts = np.arange(copies)[:, None] * width
        period = self._period(copies, width)
        for a in range(width - count + 1):
            if a >= period:
                at[a] = at[a - period]
                continue
            ranks = (starts + a + np.arange(count)).ravel() * self._ranks
            members = (ranks[:, None] + np.arange(self._ranks)).ravel()
            types = tuple(np.unique(self._cluster.device_types[members]).tolist())
            place = (types, span_of(self._cluster, ranks))
            if place not in found:
                found[place] = len(found)
                ranks_of.append(ranks)
            at[a] = found[place]
        shared = max(1, width // count) * self._ranks
        terms = {
            step.way: tuple(
                self._priced(step, span, shared, ranks) for (_, span), ranks in zip(found, ranks_of, strict=True)
            )
            for recipe in self._recipes
            for step in recipe.steps
        }
        least = {way: _least_of(each) for way, each in terms.items()}
        holders = {group for recipe in self._recipes for group in (None, *recipe.held)}
        parts = {group: [parts_of(self._cluster, ranks, group) for ranks in ranks_of] for group in holders}
        return _Row(at, count, tuple(types for types, _ in found), parts, terms, least)

    def _priced(self, step: ExchangeStep, span: Span, shared: int, ranks: np.ndarray) -> Terms:
        key = (step.way, span, shared)
        if key not in self._terms:
            self._terms[key] = step_terms(self._cluster, step, ranks, shared)
        return self._terms[key]

    def _period(self, copies: int, width: int) -> int:
        """Devices after which places repeat: one child of the outermost level, if all copies begin alike in theirs."""
        child = max(1, int(self._sizes[-2]) // self._ranks) if self._cluster.levels else 1
        repeats = len(self._cluster.devices) == 1 and (copies == 1 or width % child == 0)
        return child if repeats else width

    def _links(self, copies: int, width: int, options: np.ndarray) -> tuple[np.ndarray, tuple[Terms, ...]]:
        """Classes of boundaries: which levels the pairs that talk are joined by, and how many send at once."""
        count = len(options)
        link = np.full((count, count, width + 1), -1, dtype=np.int64)
        found: dict[tuple[int, int], int] = {}
        for before, senders in enumerate(options.tolist()):
            for after, receivers in enumerate(options.tolist()):
                if senders + receivers > width:
                    continue
                at = np.arange(senders, width - receivers + 1)
                depths = self._joined(copies, width, senders, receivers)
                shared = min(senders, receivers) * self._ranks
                for depth in np.unique(depths).tolist():
                    link[before, after, at[depths == depth]] = found.setdefault((depth, shared), len(found))
        return link, tuple(self._sent(*key) for key in found)

    def _joined(self, copies: int, width: int, senders: int, receivers: int) -> np.ndarray:
        key = (copies, width, senders, receivers)
        if key not in self._joints:
            at = np.arange(senders, width - receivers + 1)
            self._joints[key] = _depths(at, copies, width, senders, receivers, self._sizes / self._ranks)
        return self._joints[key]

    def _sent(self, depths: int, shared: int) -> Terms:
        if (depths, shared) not in self._sends:
            self._sends[depths, shared] = _send_terms(self._cluster, depths, shared, self._sizes)
        return self._sends[depths, shared]


def aligned(cluster: Cluster, ranks: int) -> bool:
    """Whether groups of that many neighbours lie alike: each inside one child of every level, or whole children."""
    sizes = cluster.group_sizes()
    return all(size % ranks == 0 or ranks % size == 0 for size in sizes) and (not sizes or ranks <= sizes[-1])


def _least_of(terms: Sequence[Terms]) -> tuple[float, float]:
    applies = [np.isfinite(t.latency_s) for t in terms]
    latency_s = min(float(t.latency_s[a].min()) for t, a in zip(terms, applies, strict=True))
    return latency_s, min(float(t.s_per_byte[a].min()) for t, a in zip(terms, applies, strict=True))


def _depths(at: np.ndarray, copies: int, width: int, senders: int, receivers: int, sizes: np.ndarray) -> np.ndarray:
    """For each boundary, the set of depths at which its pairs are joined, as bits; [len(at)] int64."""
    turns = np.arange(int(np.lcm(senders, receivers)))
    bits = np.zeros(len(at), dtype=np.int64)
    for copy in range(copies):
        here = copy * width + at[:, None]
        source, target = here - senders + turns % senders, here + turns % receivers
        depth = np.zeros(source.shape, dtype=np.int64)
        for size in sizes.tolist():  # a size below one device: every two of them are told apart
            depth += source // size != target // size
        bits |= np.bitwise_or.reduce(1 << depth, axis=1)
    return bits


def _send_terms(cluster: Cluster, bits: int, shared: int, sizes: np.ndarray) -> Terms:
    """Prices of one transfer at each depth of the set; ranks 0 and `sizes[d - 1]` are joined at depth d."""
    targets = [int(sizes[d - 1]) for d in range(1, len(sizes) + 1) if bits >> d & 1]
    return send_terms(cluster, 0, np.asarray(targets), shared)

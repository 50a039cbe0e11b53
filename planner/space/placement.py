"""Where stages can lie in a slice, what communication costs there, and what replicas exchange and hold at each place.

A stage with r replicas at device a of the slice is, over all copies, the ranks `c W + a .. c W + a + r - 1`. Hundreds
of such places differ only in which levels they span and which device types they hold, so prices are kept by distinct
place. Where t ranks share every operator, a "device" here is t neighbouring ones that act as one: equal ranks of them
exchange gradients among themselves and hand over to each other, all t of them at once.

What replicas exchange, and what each of them holds, are tables over stages of blocks i..j (`Exchanges`), read off the
recipe of the ZeRO stage (`planner.exchange.recipe_of`).

Where the first and the last stage of a pipeline hold the same weights, their gradients are summed (`tied_ends`). The
first stage has r replicas at device a of the slice, the last one s replicas at its end. With g = gcd(r, s), group q
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
from planner.exchange import ExchangeStep, Group, Phase, Recipe, kept_bytes, parts_of, recipe_of, recipes, step_terms
from planner.hardware.collectives import Terms, collective_terms, send_terms
from planner.hardware.tiers import Span, child_sizes, span_of
from planner.hardware.types import Cluster, Collective
from planner.space.blocks import range_sums
from planner.space.ranges import Ranges, range_maxima
from planner.space.types import BlockCosts

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

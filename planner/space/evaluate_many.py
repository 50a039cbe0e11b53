"""Many configurations of one model judged at once: the figures of `evaluate` as arrays.

Configurations of one micro-batch size and one way to share operators, whose schedule is a paced line of stages, are
worked out together: figures of stages are those of ranges of blocks, and what depends on the ranks of a stage alone is
priced once for each layout (copies, replicas, width). All others go through the judge one by one.

A layout is what says where stages stand: copies, replicas of each stage, devices of a slice, and whether copies are
neighbours. A place is a stage of a layout. Costs of a place do not depend on what the stage holds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.costs.precision import optimizer_state_bytes
from planner.errors import ShardplanError, UsageError
from planner.exchange import ExchangeStep, Group, Phase, Recipe, kept_bytes, parts_of, recipe_of, recipes, step_terms
from planner.hardware.collectives import ALGORITHMS, Terms, collective_s, send_terms
from planner.hardware.tiers import Span, span_of
from planner.hardware.types import Cluster, Collective, neighbours
from planner.memory import fits
from planner.play import Transfers
from planner.schedules import Schedule, get
from planner.space.asked import allowing
from planner.space.blocks import range_sums
from planner.space.configuration import Configuration
from planner.space.evaluate import Timed, evaluate
from planner.space.jobs import overlap_of, precision_of
from planner.space.limits import missing_devices, unpriced
from planner.space.ranges import Ranges, range_maxima
from planner.space.types import BlockCosts, Evaluation, Job
from planner.space.workers import lay_workers, pipeline_of, sending_at_once

_FREE = Terms(np.zeros(len(ALGORITHMS)), np.zeros(len(ALGORITHMS)))

Layout = tuple[int, tuple[int, ...], int, bool]
"""Copies, replicas by stage, devices of a slice, whether copies are neighbours."""


class Layouts:
    """Layouts and places of configurations, numbered as they come.

    Args:
        cluster: the machine.
        job: the global batch, and devices that may be used.
        ranks: of a replica.
    """

    def __init__(self, cluster: Cluster, job: Job, ranks: int) -> None:
        self.cluster, self.job, self.ranks = cluster, job, ranks
        self._zero = frozenset(recipes())
        self._sizes = np.array((1, *cluster.group_sizes()))
        self._numbers: dict[Layout, int] = {}
        self._first: list[int] = []
        self._groups: list[np.ndarray] = []
        self._kinds: list[tuple[int, int]] = []
        self._kind_numbers: dict[tuple[Span, int], int] = {}
        self._known: list[tuple[np.ndarray, int] | None] = []
        self._sends: list[list[int]] = []
        self._rows: dict[Hashable, int] = {None: 0}
        self._terms: list[Terms] = [_FREE]
        self._in_flight: dict[tuple[str, tuple[int, ...], int], tuple[int, ...]] = {}
        self._schedule = functools.cache(_paced)

    def serves(self, configuration: Configuration, costs: BlockCosts) -> bool:
        """Whether a configuration is a paced line of stages that makes sense; it is laid out if so. O(stages)."""
        schedule = self._schedule(configuration.schedule)
        if schedule is None or not self._whole(configuration, costs):
            return False
        key = (configuration.schedule, _replicas(configuration), configuration.micro_batches)
        if key not in self._in_flight:
            pipeline = pipeline_of(configuration)
            self._in_flight[key] = () if schedule.supports(pipeline) else schedule.in_flight(pipeline)
        return bool(self._in_flight[key]) and self._laid(configuration, schedule)

    def number(self, configuration: Configuration) -> int:
        """The number of a configuration's layout."""
        return self._numbers[_layout(configuration)]

    def places(self, layouts: np.ndarray, stages: int) -> np.ndarray:
        """int64 [len(layouts), stages], the places of the stages of layouts."""
        return np.asarray(np.array(self._first)[layouts][:, None] + np.arange(stages))

    def in_flight(self, configuration: Configuration) -> tuple[int, ...]:
        """Micro-batches that a replica of each stage keeps at the most."""
        return self._in_flight[configuration.schedule, _replicas(configuration), configuration.micro_batches]

    def types(self) -> np.ndarray:
        """bool [types, places], whether a device type is in a place."""
        if len(self.cluster.devices) == 1:
            return np.ones((1, len(self._groups)), dtype=bool)
        found = np.zeros((len(self.cluster.devices), len(self._groups)), dtype=bool)
        for place, groups in enumerate(self._groups):
            found[self.cluster.device_types[groups.ravel()], place] = True
        return found

    def parts(self, group: Group | None) -> np.ndarray:
        """int64 [places], into how many parts a group of the ranks of a place cuts what it shards."""
        return np.array([parts_of(self.cluster, groups[..., 0].ravel(), group) for groups in self._groups])

    def exchange_rows(self, step: ExchangeStep) -> np.ndarray:
        """int64 [2, places], rows of the terms of a step among the first and among the last ranks of replicas."""
        rows = [
            self._row((step.way, kind), functools.partial(step_terms, self.cluster, step, *known)) if known else 0
            for kind, known in enumerate(self._known)
        ]
        return np.asarray(np.array(rows, dtype=np.int64)[np.array(self._kinds).T])

    def send_rows(self) -> np.ndarray:
        """int64 [most kinds of pairs, places], rows of the transfers from the stage before to a place."""
        rows = list(itertools.zip_longest(*self._sends, fillvalue=0))
        return np.array(rows, dtype=np.int64).reshape(-1, len(self._groups))

    def slowest_s(self, rows: np.ndarray, payload_bytes: np.ndarray) -> np.ndarray:
        """Seconds for payloads, the slowest row along the first axis; nothing for no bytes."""
        latency_s = np.stack([terms.latency_s for terms in self._terms])
        s_per_byte = np.stack([terms.s_per_byte for terms in self._terms])
        found = np.zeros(np.broadcast_shapes(rows.shape[1:], payload_bytes.shape))
        for row in rows:
            terms = Terms(latency_s[row], s_per_byte[row])
            np.maximum(found, terms.seconds(payload_bytes), out=found)
        return np.where(payload_bytes > 0, found, 0.0)

    def tied_s(self, layout: int, own: Sequence[int], payload_bytes: float) -> float:
        """Seconds to sum the gradients of weights that several stages of a layout hold (`planner.space.terms`)."""
        groups = [self._groups[self._first[layout] + stage] for stage in own]
        copies, shared = groups[0].shape[0], math.gcd(*(each.shape[1] for each in groups))
        sets = (
            np.unique(np.concatenate([each[copy, q::shared, 0] for each in groups]))
            for copy in range(copies)
            for q in range(shared)
        )
        spans = {span_of(self.cluster, ranks): ranks for ranks in sets}
        working = copies * shared * self.ranks
        kind = Collective.ALL_REDUCE
        return max(collective_s(self.cluster, kind, ranks, payload_bytes, working) for ranks in spans.values())

    def _whole(self, configuration: Configuration, costs: BlockCosts) -> bool:
        """Whether blocks and samples come out, and nothing is decided that is not worked out here."""
        stop = 0
        if configuration.exchange or configuration.devices or configuration.zero not in self._zero:
            return False
        if any(unpriced(self.job, configuration)):
            return False
        for stage in configuration.stages:
            if (
                stage.repeats
                or stage.start != stop
                or stage.stop <= stop
                or (stage.ranks, stage.sharding) != (costs.ranks, costs.sharding)
            ):
                return False
            if stage.replicas < 1 or configuration.micro_batches % stage.replicas:
                return False
            stop = stage.stop
        samples = configuration.copies * configuration.micro_batches * configuration.micro_batch
        batch = (costs.micro_batch, self.job.global_batch)
        return stop == len(costs.parameter_elements) and (configuration.micro_batch, samples) == batch

    def _laid(self, configuration: Configuration, schedule: Schedule) -> bool:
        """Lay out the stages; whether there are devices for them."""
        layout = _layout(configuration)
        if layout not in self._numbers:
            workers = lay_workers(configuration, schedule)
            short = missing_devices(self.cluster, self.job, configuration, workers)
            self._numbers[layout] = -1 if short else len(self._first)
            if not short:
                self._first.append(len(self._groups))
                for stage in range(len(configuration.stages)):
                    self._place(workers.groups(stage), configuration, len(workers.hosted), before=stage > 0)
        return self._numbers[layout] >= 0

    def _place(self, groups: np.ndarray, configuration: Configuration, workers: int, *, before: bool) -> None:
        _, replicas, ranks = groups.shape
        width = configuration.slice_devices // ranks or workers
        self._sends.append(self._sent(self._groups[-1], groups) if before else [])
        self._groups.append(groups)
        concurrent = max(1, width // replicas) * ranks
        first = self._kind(groups[..., 0].ravel(), concurrent)
        self._kinds.append((first, first if ranks == 1 else self._kind(groups[..., -1].ravel(), concurrent)))

    def _kind(self, ranks: np.ndarray, concurrent: int) -> int:
        """Number of the shape of ranks that exchange, and of how many such groups do at the same time."""
        key = span_of(self.cluster, ranks), concurrent
        if key not in self._kind_numbers:
            self._kind_numbers[key] = len(self._known)
            self._known.append((ranks, concurrent) if len(ranks) > 1 else None)
        return self._kind_numbers[key]

    def _sent(self, before: np.ndarray, here: np.ndarray) -> list[int]:
        """Rows of the transfers of all pairs of workers that some micro-batch connects."""
        senders, receivers, ranks = before.shape[1], here.shape[1], here.shape[2]
        ends, turns = sorted({0, ranks - 1}), np.arange(math.lcm(senders, receivers))
        sources, targets = before[:, turns % senders][..., ends], here[:, turns % receivers][..., ends]
        concurrent = sending_at_once(before, here)
        sizes = self._sizes
        depth = (sources[..., None] // sizes != targets[..., None] // sizes).sum(axis=-1).ravel()
        found = []
        for level, at in zip(*np.unique(depth, return_index=True), strict=True):
            pair = sources.ravel()[at], targets.ravel()[at]
            found.append(
                self._row((int(level), concurrent), functools.partial(send_terms, self.cluster, *pair, concurrent))
            )
        return found

    def _row(self, key: Hashable, price: Callable[[], Terms]) -> int:
        if key not in self._rows:
            self._rows[key] = len(self._terms)
            self._terms.append(price())
        return self._rows[key]


def _layout(configuration: Configuration) -> Layout:
    return configuration.copies, _replicas(configuration), configuration.slice_devices, configuration.adjacent


def _replicas(configuration: Configuration) -> tuple[int, ...]:
    return tuple(stage.replicas for stage in configuration.stages)


def _paced(name: str) -> Schedule | None:
    """The schedule of a name if it is a paced line of stages that hold one version of their weights."""
    try:
        schedule = get(name)
    except UsageError:
        return None
    plain = schedule.weight_policy.synchronous and not schedule.weight_buffers
    return schedule if schedule.closed_form and plain else None


@dataclass(slots=True, eq=False)
class Evaluations:
    """Figures of configurations, in their order.

    Attributes:
        iteration_s: float64 [n] as `evaluate` has them; infinite where a configuration makes no sense.
        peak_bytes: float64 [n] memory of the fullest worker: nearest to its capacity, or furthest above it.
        capacity_bytes: float64 [n] of that worker's smallest device.
        fits: bool [n], whether the configuration can run.
        reasons: why a configuration makes no sense; "" where it does.
    """

    iteration_s: np.ndarray
    peak_bytes: np.ndarray
    capacity_bytes: np.ndarray
    fits: np.ndarray
    reasons: tuple[str, ...]

    @classmethod
    def empty(cls, count: int) -> Evaluations:
        """Those of so many configurations of which nothing is known yet."""
        unknown = np.full(count, math.nan)
        return cls(np.full(count, math.inf), unknown, unknown.copy(), np.zeros(count, dtype=bool), ())

    def put(self, at: int, one: Evaluation) -> None:
        """The figures of one configuration, from the judge's verdict on it."""
        fullest = max(one.workers, key=lambda worker: worker.memory.total / worker.capacity_bytes)
        self.iteration_s[at], self.fits[at] = one.iteration_s, one.feasible
        self.peak_bytes[at], self.capacity_bytes[at] = fullest.memory.total, fullest.capacity_bytes


def evaluate_many(
    costs: BlockCosts,
    cluster: Cluster,
    job: Job,
    configurations: Sequence[Configuration],
    *,
    known: dict[tuple[int, int], Layouts] | None = None,
) -> Evaluations:
    """Judge configurations of one micro-batch size that all share operators in the way of `costs`.

    Args:
        costs: the chain's costs at their micro-batch size.
        cluster: the machine.
        job: what is to be trained; what a configuration decides is allowed.
        configurations: their stages name the sharding of `costs`.
        known: layouts by ranks of a replica and stages, of earlier calls for the same cluster and job; filled.

    O(configurations * stages + layouts * ranks) for paced lines.
    """
    found, reasons = Evaluations.empty(len(configurations)), [""] * len(configurations)
    regular: dict[int, list[int]] = {}
    layouts = {} if known is None else known
    for at, configuration in enumerate(configurations):
        stages = len(configuration.stages)
        key = costs.ranks, stages
        if key not in layouts:
            layouts[key] = Layouts(cluster, job, costs.ranks)
        if layouts[key].serves(configuration, costs):
            regular.setdefault(stages, []).append(at)
        else:
            reasons[at] = _judge(found, at, costs, cluster, job, configuration)
    for stages, members in regular.items():
        batch = _Batch(costs, cluster, job, [configurations[at] for at in members], layouts[costs.ranks, stages])
        where = np.array(members)
        found.iteration_s[where] = batch.iteration_s()
        found.peak_bytes[where], found.capacity_bytes[where], found.fits[where] = batch.memory()
    found.reasons = tuple(reasons)
    return found


def _judge(
    found: Evaluations, at: int, costs: BlockCosts, cluster: Cluster, job: Job, configuration: Configuration
) -> str:
    """One configuration by the judge; its time by the schedule's longest chain where that is what playing it takes.
    Why it makes no sense, empty where it does."""
    try:
        schedule = get(configuration.schedule)
        blocking = configuration.transfers is Transfers.BLOCKING
        exact = not schedule.closed_form and blocking and schedule.exact(pipeline_of(configuration))
        timed = Timed.BOUND if exact else Timed.CLOSED_FORM
        evaluation = evaluate(costs, cluster, allowing(job, configuration), configuration, timed=timed)
    except ShardplanError as error:
        return error.problem.message
    if not evaluation.stages:
        return "; ".join(violation.message for violation in evaluation.violations)
    found.put(at, evaluation)
    return ""


def _prefix(values: np.ndarray) -> np.ndarray:
    """Sums of the first k values along the last axis, k from 0 on."""
    return np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)


class _Batch:
    """Configurations of as many stages: arrays [configurations, stages].

    Args:
        costs: the chain's costs.
        cluster: the machine.
        job: what is to be trained.
        members: the configurations.
        layouts: where stages may stand, and what ranks exchange there.
    """

    def __init__(
        self, costs: BlockCosts, cluster: Cluster, job: Job, members: Sequence[Configuration], layouts: Layouts
    ) -> None:
        self.costs, self.cluster, self.job, self.members, self.layouts = costs, cluster, job, members, layouts
        self.precision = precision_of(job, cluster)
        table = np.array([[(s.start, s.stop, s.replicas, s.recompute) for s in c.stages] for c in members], np.int64)
        self.start, self.stop, self.replicas, again = np.moveaxis(table, 2, 0)
        self.again, self.at = again.astype(bool), (self.start, self.stop - 1)
        self.layout = np.array([layouts.number(c) for c in members])
        self.place = layouts.places(self.layout, self.start.shape[1])
        self.types = layouts.types()[:, self.place]
        self.zero = np.array([c.zero for c in members])
        self.whole = np.array([c.whole_stages for c in members])[:, None] & self.again
        self.ranges = Ranges(costs)
        self.by_layers, self.by_stages = (self.ranges.ways("always", whole_stages=w)[0] for w in (False, True))
        self.held, self.left = self.ranges.elements[self.at], self.ranges.shard_elements[self.at]
        self.alike = np.broadcast_to(self.ranges.alike, self.ranges.elements.shape)[self.at]
        self._times()

    def _slowest_s(self, seconds: np.ndarray) -> np.ndarray:
        """By stage its entry of a table [types, n, n] over ranges of blocks, the most over the types of its devices."""
        by_type = seconds[(slice(None), *self.at)]
        return np.asarray(np.where(self.types[: len(seconds)], by_type, -math.inf).max(axis=0))

    def _parts(self, group: Group | None, place: np.ndarray, own: np.ndarray) -> np.ndarray:
        """Parts into which a group cuts what it shards of some configurations' stages."""
        parts = self.layouts.parts(group)[place]
        return np.asarray(parts if group is None else parts * self.alike[own])

    def _times(self) -> None:
        costs, ranges, overlap = self.costs, self.ranges, overlap_of(self.job, self.cluster)
        forward_s = self._slowest_s(ranges.forward_s)
        by_layers_s, by_stages_s = (self._slowest_s(way.repeat_s) for way in (self.by_layers, self.by_stages))
        backward_s = self._slowest_s(ranges.backward_s) + np.where(self.whole, by_stages_s, by_layers_s) * self.again
        pass_f, pass_b, sync_s, shards = self._exchanges()
        hidden = np.maximum(0.0, overlap * backward_s - pass_b)
        self.exposed_s = np.maximum(0.0, sync_s - hidden) + self._tied_s()
        self.update_s = self._slowest_s(ranges.update_s) / shards + ranges.step_s[self.at]
        self.forward_s = forward_s + np.maximum(0.0, pass_f - overlap * forward_s)
        self.backward_s = backward_s + np.maximum(0.0, pass_b - overlap * backward_s)
        self.receive_s = self._transfer_s(costs.boundary_bytes, costs.gather_s)
        self.return_s = self._transfer_s(costs.gradient_boundary_bytes, costs.gradient_gather_s)

    def _exchanges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Seconds in a forward and a backward pass and at the end, and the parts of the optimizer's state."""
        found, costs = np.zeros((4, *self.start.shape)), self.costs
        for zero in np.unique(self.zero).tolist():
            own = self.zero == zero
            recipe, place = recipe_of(zero), self.place[own]
            for at, phase in enumerate((Phase.FORWARD, Phase.BACKWARD, Phase.END)):
                for step in recipe.during(phase):
                    rows, size = self.layouts.exchange_rows(step), step.payload(self.precision)
                    if phase is Phase.END:
                        found[at, own] += self.layouts.slowest_s(rows[:, place], self.left[own] * size)
                    else:
                        left = costs.parameter_elements if costs.shard_elements is None else costs.shard_elements
                        prefix = _prefix(self.layouts.slowest_s(rows[:, :, None], left * size))
                        found[at, own] += prefix[place, self.stop[own]] - prefix[place, self.start[own]]
                found[at, own] += self._inner_s(recipe, phase)[own]
            found[3, own] = self._parts(recipe.optimizer, place, own)
        return found[0], found[1], found[2], found[3]

    def _inner_s(self, recipe: Recipe, phase: Phase) -> np.ndarray:
        """Seconds of a phase's steps among the ranks of a replica that hold the same."""
        found = np.zeros(self.start.shape)
        for inner, held in zip(self.costs.inner_replicas, self.ranges.inner, strict=True):
            for step in recipe.among_inner:
                if step.phase is phase:
                    elements = held[self.at] if phase is Phase.END else inner.elements
                    payload_bytes = elements * step.payload(self.precision)
                    seconds = np.where(elements > 0, inner.terms[step.collective].seconds(payload_bytes), 0.0)
                    found += seconds if phase is Phase.END else range_sums(seconds)[self.at]
        return found

    def _transfer_s(self, sizes: np.ndarray, gather_s: np.ndarray | None) -> np.ndarray:
        """Seconds to hand over what crosses the boundary before each stage; nothing before the first."""
        seconds = self.layouts.slowest_s(self.layouts.send_rows()[:, self.place], sizes[self.start])
        seconds = seconds + (0.0 if gather_s is None else gather_s[self.start])
        seconds[:, 0] = 0.0
        return np.asarray(seconds)

    def _tied_s(self) -> np.ndarray:
        """At the first stage that holds shared weights, the time to sum their gradients."""
        found = np.zeros(self.start.shape)
        for tie in self.costs.ties:
            payload_bytes = tie.shard_elements * self.precision.gradient_bytes
            covered = [(self.start <= b) & (b < self.stop) for b in tie.blocks]
            holding = np.asarray(np.stack(covered).any(axis=0))
            several = np.flatnonzero((holding.sum(axis=1) > 1) & (tie.elements > 0))
            cases = np.column_stack([self.layout[several], holding[several]])
            distinct, which = np.unique(cases, axis=0, return_inverse=True)
            for case, (layout, *marks) in enumerate(distinct.tolist()):
                own = [stage for stage, mark in enumerate(marks) if mark]
                found[several[which.ravel() == case], own[0]] += self.layouts.tied_s(layout, own, payload_bytes)
        return found

    def iteration_s(self) -> np.ndarray:
        """The closed form of `planner.space.evaluate`."""
        total_s = self.forward_s + self.backward_s + self.receive_s + self.return_s
        before = np.minimum.accumulate(self.replicas, axis=1)[:, :-1]
        late = np.zeros(total_s.shape)
        late[:, 1:] = 1 - np.minimum(1.0, before / self.replicas[:, 1:])
        micro_batches = np.array([c.micro_batches for c in self.members])[:, None]
        steady_s = np.maximum(0.0, ((micro_batches // self.replicas - 1 + late) * total_s).max(axis=1))
        lead_s = _prefix(self.backward_s + self.return_s)[:, :-1]
        tail_s = np.maximum(0.0, (self.exposed_s + self.update_s - lead_s).max(axis=1))
        return np.asarray(total_s.sum(axis=1) + steady_s + tail_s)

    def memory(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes and capacity of the fullest worker, and whether all fit."""
        state_bytes = optimizer_state_bytes(self.job.optimizer, self.precision)
        largest = range_maxima(self.costs.parameter_elements)[self.at]
        total = self._activations() + self.ranges.workspace_bytes[self.at]
        for zero in np.unique(self.zero).tolist():
            own = self.zero == zero
            place = self.place[own]
            recipe = recipe_of(zero)
            parts = {group: self._parts(group, place, own) for group in recipe.held}
            kept = kept_bytes(
                recipe, self.precision, state_bytes, parts.__getitem__, self.held[own], largest[own],
                self.precision.spare_bytes, self.precision.copy_bytes,
            )  # fmt: skip
            total[own] += kept.weights + kept.gradients + kept.optimizer + kept.gathered + kept.transient
        reserve, capacity = self._devices()
        able = fits(total, capacity - reserve).all(axis=1)
        fullest = ((total + reserve) / capacity).argmax(axis=1)
        line = np.arange(len(total))
        return (total + reserve)[line, fullest], capacity[line, fullest], able

    def _devices(self) -> tuple[np.ndarray, np.ndarray]:
        """Reserve and capacity of the device with the least usable memory that each stage uses."""
        devices = self.cluster.devices
        usable = np.where(self.types.T, [device.usable_bytes for device in devices], math.inf).T
        least = usable.argmin(axis=0)
        reserve, neighbour, capacity = (
            np.array([float(getattr(d, name)) for d in devices])[least]
            for name in ("reserve_bytes", "neighbour_bytes", "capacity_bytes")
        )
        copies = np.array([c.copies for c in self.members])[:, None]
        count = neighbours(self.costs.ranks, copies * self.replicas, self.replicas.shape[1] > 1)
        return reserve + neighbour * count, capacity

    def _activations(self) -> np.ndarray:
        """What a worker keeps of all micro-batches in flight, and of the one whose forward it repeats."""
        in_flight = np.array([self.layouts.in_flight(c) for c in self.members])
        nothing = self.ranges.saved_bytes[self.at], 0.0
        unit, working = (
            np.where(self.whole, by_stages[self.at], np.where(self.again, by_layers[self.at], plain))
            for plain, by_layers, by_stages in zip(
                nothing,
                (self.by_layers.saved_bytes, self.by_layers.working_bytes),
                (self.by_stages.saved_bytes, self.by_stages.working_bytes),
                strict=True,
            )
        )
        return np.asarray(in_flight * unit + working)

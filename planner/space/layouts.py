"""Where the stages of paced lines stand, and what their ranks exchange there: priced once for each layout.

A layout is what says where stages stand: copies, replicas of each stage, devices of a slice, and whether copies are
neighbours. A place is a stage of a layout. Costs of a place do not depend on what the stage holds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from planner.errors import UsageError
from planner.exchange import ExchangeStep, Group, parts_of, recipes, step_terms
from planner.hardware.collectives import ALGORITHMS, Terms, collective_s, send_terms
from planner.hardware.tiers import Span, span_of
from planner.hardware.types import Cluster, Collective
from planner.schedules import Schedule, get
from planner.space.configuration import Configuration
from planner.space.limits import missing_devices, unpriced
from planner.space.types import BlockCosts, Job
from planner.space.workers import lay_workers, pipeline_of

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
        concurrent = min(senders, receivers) * ranks
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

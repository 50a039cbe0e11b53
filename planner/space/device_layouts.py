"""Where the stages of configurations stand on a cluster, and what their ranks exchange and send there.

A layout is all that decides on which devices each stage runs: copies, replicas of each stage, devices of a slice, and
whether copies are neighbours. A place is one stage of a layout. Prices of a place do not depend on which blocks the
stage holds, so they are worked out once for each layout and serve all configurations that have it
(`planner.space.evaluate_many`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from planner.errors import UsageError
from planner.exchange import ExchangeStep, RankGroup, parts_of, recipes, step_terms
from planner.hardware.collectives import COLUMNS, Terms, collective_s, send_terms
from planner.hardware.tiers import Span, span_of
from planner.hardware.types import Cluster, Collective
from planner.schedules import Schedule, get
from planner.space.configuration import Configuration
from planner.space.limits import missing_devices, unpriced
from planner.space.types import BlockCosts, Job
from planner.space.workers import (
    exchanging_at_once,
    in_turn,
    lay_workers,
    pipeline_of,
    sending_at_once,
    sums_together,
)

_NO_TRANSFER = Terms(np.zeros(len(COLUMNS)), np.zeros(len(COLUMNS)))

Layout = tuple[int, tuple[int, ...], int, bool]
"""Copies, replicas by stage, devices of a slice, whether copies are neighbours."""


class DeviceLayouts:
    """Layouts and places of configurations, numbered in the order in which they are first seen.

    Args:
        cluster: the machine.
        job: the global batch, and devices that may be used.
        ranks: devices of one replica of a stage.
    """

    def __init__(self, cluster: Cluster, job: Job, ranks: int) -> None:
        self.cluster, self.job, self.ranks = cluster, job, ranks
        self._zero_stages = frozenset(recipes())
        self._group_sizes = np.array((1, *cluster.group_sizes()))
        self._numbers: dict[Layout, int] = {}
        self._first_places: list[int] = []
        self._groups: list[np.ndarray] = []
        self._place_shapes: list[tuple[int, int]] = []
        self._shape_numbers: dict[tuple[Span, int], int] = {}
        self._shapes: list[tuple[np.ndarray, int] | None] = []
        self._sends: list[list[int]] = []
        self._rows: dict[Hashable, int] = {None: 0}
        self._terms: list[Terms] = [_NO_TRANSFER]
        self._in_flight: dict[tuple[str, tuple[int, ...], int], tuple[int, ...]] = {}
        self._schedule_of = functools.cache(_in_line_schedule)

    def entry(self, configuration: Configuration, costs: BlockCosts) -> tuple[int, tuple[int, ...]] | None:
        """Number of a configuration's layout, and the micro-batches in flight; None if arrays cannot price it.

        They price one stage a worker, where the choice is valid and the devices are there. In flight are the most
        micro-batches whose activations a replica of each stage keeps at a time. O(stages).
        """
        schedule = self._schedule_of(configuration.schedule)
        if schedule is None or not self._is_well_formed(configuration, costs):
            return None
        replicas = tuple(stage.replicas for stage in configuration.stages)
        key = (configuration.schedule, replicas, configuration.micro_batches)
        if key not in self._in_flight:
            pipeline = pipeline_of(configuration)
            self._in_flight[key] = () if schedule.supports(pipeline) else schedule.in_flight(pipeline)
        in_flight = self._in_flight[key]
        layout = self._number(configuration, replicas, schedule) if in_flight else -1
        return None if layout < 0 else (layout, in_flight)

    def places(self, layouts: np.ndarray, stages: int) -> np.ndarray:
        """int64 [len(layouts), stages], the place of each stage of some layouts, all of so many stages."""
        return np.asarray(np.array(self._first_places)[layouts][:, None] + np.arange(stages))

    def types(self) -> np.ndarray:
        """bool [types, places], whether a place has devices of a type."""
        if len(self.cluster.devices) == 1:
            return np.ones((1, len(self._groups)), dtype=bool)
        in_place = np.zeros((len(self.cluster.devices), len(self._groups)), dtype=bool)
        for place, groups in enumerate(self._groups):
            in_place[self.cluster.device_types[groups.ravel()], place] = True
        return in_place

    def parts(self, group: RankGroup | None) -> np.ndarray:
        """int64 [places], the number of shards into which a group of a place's ranks cuts its state; 1 for None."""
        return np.array([parts_of(self.cluster, groups[..., 0].ravel(), group) for groups in self._groups])

    def exchange_rows(self, step: ExchangeStep) -> np.ndarray:
        """int64 [2, places], numbers of the prices of a step: among the first, and among the last ranks of replicas."""
        rows = [
            self._terms_row((step.way, number), functools.partial(step_terms, self.cluster, step, *shape))
            if shape
            else 0
            for number, shape in enumerate(self._shapes)
        ]
        return np.asarray(np.array(rows, dtype=np.int64)[np.array(self._place_shapes).T])

    def send_rows(self) -> np.ndarray:
        """int64 [pairs, places], numbers of the prices of transfers from the stage before; 0 where there are fewer."""
        rows = list(itertools.zip_longest(*self._sends, fillvalue=0))
        return np.array(rows, dtype=np.int64).reshape(-1, len(self._groups))

    def slowest_s(self, rows: np.ndarray, payload_bytes: np.ndarray) -> np.ndarray:
        """Seconds for payloads, the slowest of the prices along the first axis of `rows`; zero for zero bytes."""
        latency_s = np.stack([terms.latency_s for terms in self._terms], axis=1)
        s_per_byte = np.stack([terms.s_per_byte for terms in self._terms], axis=1)
        usable = np.isfinite(latency_s).any(axis=1)
        slowest_s = np.zeros(np.broadcast_shapes(rows.shape[1:], payload_bytes.shape))
        for row in _distinct(rows):
            seconds = np.full(slowest_s.shape, math.inf)
            for latency, slope in zip(latency_s[usable], s_per_byte[usable], strict=True):
                np.minimum(seconds, latency[row] + slope[row] * payload_bytes, out=seconds)
            np.maximum(slowest_s, seconds, out=slowest_s)
        return np.where(payload_bytes > 0, slowest_s, 0.0)

    def tied_s(self, layout: int, stages: Sequence[int], payload_bytes: float) -> float:
        """Seconds of the all-reduce of gradients of weights that several stages hold (`planner.space.terms`)."""
        groups = [self._groups[self._first_places[layout] + stage] for stage in stages]
        rank_sets = sums_together(groups)
        ranks_by_span = {span_of(self.cluster, ranks): ranks for ranks in rank_sets}
        concurrent = len(rank_sets) * self.ranks
        kind = Collective.ALL_REDUCE
        return max(
            collective_s(self.cluster, kind, ranks, payload_bytes, concurrent) for ranks in ranks_by_span.values()
        )

    def _is_well_formed(self, configuration: Configuration, costs: BlockCosts) -> bool:
        """True if stages cover all blocks, samples divide evenly, and no choice needs the judge (`evaluate`)."""
        stop = 0
        elsewhere = configuration.exchange or configuration.devices or configuration.shard_over
        if elsewhere or configuration.zero not in self._zero_stages:
            return False
        if any(unpriced(self.job, configuration)):
            return False
        for stage in configuration.stages:
            keeps_all = not stage.repeats and not stage.offload
            if not keeps_all or stage.start != stop or stage.stop <= stop or stage.ranks != costs.ranks:
                return False
            if stage.replicas < 1 or configuration.micro_batches % stage.replicas:
                return False
            stop = stage.stop
        samples = configuration.copies * configuration.micro_batches * configuration.micro_batch
        batch = (costs.micro_batch, self.job.global_batch)
        return stop == len(costs.parameter_elements) and (configuration.micro_batch, samples) == batch

    def _number(self, configuration: Configuration, replicas: tuple[int, ...], schedule: Schedule) -> int:
        """Number of the configuration's layout, whose places get theirs; -1 if it takes devices that there are not."""
        layout = configuration.copies, replicas, configuration.slice_devices, configuration.adjacent
        if layout not in self._numbers:
            workers = lay_workers(configuration, schedule)
            missing = missing_devices(self.cluster, self.job, configuration, workers)
            self._numbers[layout] = -1 if missing else len(self._first_places)
            if not missing:
                self._first_places.append(len(self._groups))
                for stage in range(len(configuration.stages)):
                    self._add_place(workers.groups(stage), configuration, len(workers.hosted), before=stage > 0)
        return self._numbers[layout]

    def _add_place(self, groups: np.ndarray, configuration: Configuration, workers: int, *, before: bool) -> None:
        _, replicas, ranks = groups.shape
        self._sends.append(self._send_rows(self._groups[-1], groups) if before else [])
        self._groups.append(groups)
        concurrent = exchanging_at_once(configuration, ranks, workers, replicas)
        first = self._shape_number(groups[..., 0].ravel(), concurrent)
        self._place_shapes.append(
            (first, first if ranks == 1 else self._shape_number(groups[..., -1].ravel(), concurrent))
        )

    def _shape_number(self, ranks: np.ndarray, concurrent: int) -> int:
        """Number of the shape of a group: the levels that its ranks span, and how many groups exchange at once."""
        key = span_of(self.cluster, ranks), concurrent
        if key not in self._shape_numbers:
            self._shape_numbers[key] = len(self._shapes)
            self._shapes.append((ranks, concurrent) if len(ranks) > 1 else None)
        return self._shape_numbers[key]

    def _send_rows(self, senders_at: np.ndarray, receivers_at: np.ndarray) -> list[int]:
        """Numbers of the prices of transfers between all pairs of workers that some micro-batch connects."""
        ends = sorted({0, receivers_at.shape[2] - 1})
        sources, targets = (side[..., ends] for side in in_turn(senders_at, receivers_at))
        concurrent = sending_at_once(senders_at, receivers_at)
        sizes = self._group_sizes
        depths = (sources[..., None] // sizes != targets[..., None] // sizes).sum(axis=-1).ravel()
        rows = []
        for level, first_pair in zip(*np.unique(depths, return_index=True), strict=True):
            pair = sources.ravel()[first_pair], targets.ravel()[first_pair]
            rows.append(
                self._terms_row(
                    (int(level), concurrent), functools.partial(send_terms, self.cluster, *pair, concurrent)
                )
            )
        return rows

    def _terms_row(self, key: Hashable, price: Callable[[], Terms]) -> int:
        if key not in self._rows:
            self._rows[key] = len(self._terms)
            self._terms.append(price())
        return self._rows[key]


def _distinct(rows: np.ndarray) -> list[np.ndarray]:
    """The rows along the first axis that differ."""
    return [row for at, row in enumerate(rows) if not any(np.array_equal(row, rows[before]) for before in range(at))]


def _in_line_schedule(name: str) -> Schedule | None:
    """The schedule of a name if it is a paced line of stages that hold one version of their weights."""
    try:
        schedule = get(name)
    except UsageError:
        return None
    plain = schedule.weight_policy.synchronous and not schedule.weight_buffers
    return schedule if schedule.closed_form and plain else None

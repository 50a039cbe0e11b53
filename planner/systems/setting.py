"""What the solvers of systems read: prices by micro-batch size, sizes worth trying, the judge's verdict."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from planner.costs.precision import optimizer_state_bytes, precision
from planner.costs.types import Profile
from planner.errors import ModelError
from planner.graph import Chain, Graph
from planner.hardware.types import Cluster
from planner.solvers import micro_batch_sizes
from planner.space import Configuration, Evaluation, Timed, evaluate
from planner.space.asked import LIMITS, without
from planner.space.pricer import Pricer, Sharded
from planner.space.schemes import SchemeExchange, exchange_of
from planner.space.settled import settled
from planner.space.types import BlockCosts, Job

if TYPE_CHECKING:
    from planner.systems.runner import Decided

MOST_SIZES = 9
"""Micro-batch sizes that are priced at the most."""

SMALL_GRAPH, MOST_SIZES_SMALL = 200, 13
"""The same for graphs of few operators."""


class Prices(Protocol):
    """A model's prices by micro-batch size (`planner.Pricer`)."""

    chain: Chain

    def costs(self, micro_batch: int, /) -> BlockCosts:
        """Costs of the chain's blocks."""
        ...

    def graph_at(self, micro_batch: int, /) -> Graph:
        """The model at that size."""
        ...

    def profiles(self, micro_batch: int, /) -> tuple[Profile, ...]:
        """Prices of its operators, one profile a device type."""
        ...


class Setting:
    """A model, a cluster and a job, of which many systems are asked.

    Args:
        prices: the model's prices.
        cluster: the machine.
        job: what is to be trained.
        changes_semantics: asynchronous systems may be taken for the best.
    """

    def __init__(self, prices: Prices, cluster: Cluster, job: Job, *, changes_semantics: bool = False) -> None:
        job = settled(job, cluster)
        self.prices, self.cluster, self.job = prices, cluster, job
        self.precision = precision(job.precision)
        self.state_bytes = optimizer_state_bytes(job.optimizer, self.precision)
        self.devices = min(job.devices or cluster.device_count, cluster.device_count)
        self.costs = functools.cache(prices.costs)
        self.exchange = functools.cache(self._exchange)
        self.notes: tuple[str, ...] = ()
        self.fixed = False
        self.sizes = self._sizes()
        self.changes_semantics = changes_semantics
        self.results: dict[str, Decided] = {}
        self._open = replace(without(job, LIMITS), devices=job.devices, micro_batches=())

    @property
    def name(self) -> str:
        """Of the model."""
        return self.prices.chain.graph.name

    @property
    def pricer(self) -> Pricer | None:
        """The prices where they know how ranks share operators."""
        return self.prices if isinstance(self.prices, Pricer) else None

    @property
    def blocks(self) -> int:
        """Blocks of the chain."""
        return len(self.prices.chain.blocks)

    @property
    def room_bytes(self) -> float:
        """Usable memory of the smallest device."""
        return float(min(device.usable_bytes for device in self.cluster.devices))

    @property
    def element_bytes(self) -> float:
        """Weight, gradient and optimizer state of a parameter."""
        return self.precision.weight_bytes + self.precision.gradient_bytes + self.state_bytes

    def evaluate(self, configuration: Configuration, timed: Timed = Timed.PLAYED) -> Evaluation:
        """The judge's verdict on a configuration of any global batch, without limits but devices and memory."""
        samples = configuration.copies * configuration.micro_batches * configuration.micro_batch
        job = replace(self._open, global_batch=samples, schedules=(configuration.schedule,), zero=(configuration.zero,))
        return evaluate(self.shelf(configuration), self.cluster, job, configuration, timed=timed)

    def fits(self, configuration: Configuration) -> bool:
        """Whether a configuration can run."""
        return self.evaluate(configuration, Timed.BOUND).feasible

    def shardings(self, configuration: Configuration) -> dict[int, Sharded]:
        """How groups of ranks share operators, by the numbers that the stages give."""
        numbers = sorted({stage.sharding for stage in configuration.stages} - {0})
        return {n: self.pricer.entry(configuration.micro_batch, n) for n in numbers} if self.pricer else {}

    def shelf(self, configuration: Configuration) -> Mapping[int, BlockCosts]:
        """Costs of the blocks by number of the sharding."""
        shared = {number: entry.costs for number, entry in self.shardings(configuration).items()}
        return shared if len(shared) and 0 not in {s.sharding for s in configuration.stages} else {
            0: self.costs(configuration.micro_batch), **shared,
        }  # fmt: skip

    def _exchange(self, configuration: Configuration) -> SchemeExchange:
        """What a configuration with an exchange scheme exchanges."""
        return exchange_of(self.costs(configuration.micro_batch), self.cluster, self.job, configuration)

    def _sizes(self) -> tuple[int, ...]:
        """Powers of two that divide the global batch, as far as the model can be set to them, smallest first.

        Where there are too many, the smallest and the largest stay.
        """
        job = self.job
        chosen = [b for b in micro_batch_sizes(job) if job.micro_batches or b & (b - 1) == 0]
        most = MOST_SIZES_SMALL if len(self.prices.chain.graph.nodes) <= SMALL_GRAPH else MOST_SIZES
        largest = max(device.usable_bytes for device in self.cluster.devices)
        found: list[int] = []
        for size in chosen:
            try:
                costs = self.costs(size)
            except ModelError as error:
                own = self.prices.chain.graph.batch or 1
                if found:
                    self.notes += (f"micro-batches stop at {found[-1]}: {error}",)
                    break
                return self._fixed(own, error)
            if found and float(np.diagonal(costs.saved_bytes).max()) > largest:
                break
            found.append(size)
        return tuple(found if len(found) <= most else [found[0], *found[1 - most :]])

    def _fixed(self, size: int, reason: ModelError) -> tuple[int, ...]:
        job, message, where = self.job, reason.problem.message, reason.problem.where
        if job.global_batch % size:
            raise ModelError(message, where=where, hint=f"use a global batch that {size} divides, as exported")
        if job.micro_batches and size not in job.micro_batches:
            raise ModelError(message, where=where, hint=f"allow micro-batches of {size}, as exported")
        self.notes += (f"micro-batches of {size} sample(s) only: {reason}",)
        self.fixed = True
        return (size,)

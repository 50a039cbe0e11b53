"""What the solvers of systems read: prices by micro-batch size, sizes worth trying, the judge's verdict."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from planner.costs.precision import optimizer_state_bytes, precision
from planner.exchange import Traffic
from planner.hardware.types import Cluster, with_headroom
from planner.solvers.sizes import worth_pricing
from planner.space import Configuration, Evaluation, Timed, evaluate
from planner.space.asked import LIMITS, without
from planner.space.cuts import StageTables
from planner.space.jobs import settled
from planner.space.pricer import Pricer, Sharded
from planner.space.schemes import SchemeExchange, exchange_of
from planner.space.terms import elements_of
from planner.space.traffic import Sent, traffic_of
from planner.space.types import BlockCosts, Job

if TYPE_CHECKING:
    from planner.systems.runner import Decided


class Setting:
    """A model, a cluster and a job, of which many systems are asked.

    Args:
        prices: the model's prices.
        cluster: the machine.
        job: what is to be trained.
        changes_semantics: asynchronous systems may be taken for the best.
    """

    def __init__(self, prices: Pricer, cluster: Cluster, job: Job, *, changes_semantics: bool = False) -> None:
        self.asked = replace(job, overlap=None) if job.overlap == cluster.stack.overlap else job
        job = settled(job, cluster)
        cluster = with_headroom(cluster, job.headroom)
        self.prices, self.cluster, self.job = prices, cluster, job
        self.precision = precision(job.precision)
        self.state_bytes = optimizer_state_bytes(job.optimizer, self.precision)
        self.devices = min(job.devices or cluster.device_count, cluster.device_count)
        self.costs = functools.cache(prices.costs)
        self.exchange = functools.cache(self._exchange)
        self.tables = functools.cache(self._tables)
        sizes = worth_pricing(self.job, cluster, prices.chain.graph, self.costs)
        self.sizes, self.fixed, self.notes = sizes.sizes, sizes.fixed, sizes.notes
        self.changes_semantics = changes_semantics
        self.results: dict[str, Decided] = {}
        self._open = replace(without(job, LIMITS), devices=job.devices, micro_batches=())

    @property
    def name(self) -> str:
        """Of the model."""
        return self.prices.chain.graph.name

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
        return self.precision.held_weight_bytes + self.precision.held_gradient_bytes + self.state_bytes

    @functools.cached_property
    def states_bytes(self) -> float:
        """Weights, gradients and optimizer state of the whole model, shared weights once."""
        return elements_of(self.costs(self.sizes[0]), range(self.blocks))[0] * self.element_bytes

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
        return {n: self.prices.entry(configuration.micro_batch, n) for n in numbers}

    def shelf(self, configuration: Configuration) -> Mapping[int, BlockCosts]:
        """Costs of the blocks by number of the sharding."""
        shared = {number: entry.costs for number, entry in self.shardings(configuration).items()}
        return {0: self.costs(configuration.micro_batch), **shared}

    def traffic(self, configuration: Configuration, *, exchanged: bool = True) -> Traffic:
        """Bytes of a configuration through every port, with the exchange of gradients or without."""
        if configuration.exchange:
            return self.exchange(configuration).exchange.traffic
        inside = {number: entry.sharded.sent_bytes for number, entry in self.shardings(configuration).items()}
        sent = Sent(self.shelf(configuration), inside, self.cluster, self.precision)
        return traffic_of(sent, configuration, exchanged=exchanged)

    def _tables(self, micro_batch: int) -> StageTables:
        return StageTables(self.costs(micro_batch), self.precision, self.state_bytes)

    def _exchange(self, configuration: Configuration) -> SchemeExchange:
        """What a configuration with an exchange scheme exchanges."""
        return exchange_of(self.costs(configuration.micro_batch), self.cluster, self.job, configuration)

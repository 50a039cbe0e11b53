"""Data types of the named systems: `System`, what it proposes, the `SystemSetting` it plans in, its row in a table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from planner import schedules
from planner.costs.errors import MeasuredError
from planner.costs.precision import optimizer_state_bytes, precision
from planner.exchange import LinkBytes, PortTraffic
from planner.hardware.types import Cluster, with_headroom
from planner.solvers.layouts import Layouts
from planner.solvers.sizes import worth_pricing
from planner.space import Configuration, Evaluation, Timed, evaluate
from planner.space.cuts import StageTables
from planner.space.job_options import LIMITS, PRICED, without
from planner.space.jobs import settled
from planner.space.pricer import Pricer
from planner.space.schemes import SchemeExchange, exchange_of
from planner.space.subspaces import Limits
from planner.space.terms import elements_of
from planner.space.traffic import traffic_of
from planner.space.types import BlockCosts, Job, MemoryBytes
from planner.systems.backends import Backend

if TYPE_CHECKING:
    from planner.systems.runner import SystemDecision


class Semantics(StrEnum):
    """Whether every update uses current weights, as on one device (`SYNC`), or may use stale ones (`ASYNC`)."""

    SYNC = "sync"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A way to train that a system's planner would consider.

    Attributes:
        parts: the configurations to evaluate. Usually one; several if unlike pipelines work side by side, one for each
            kind, all at the pace of the slowest.
        words: description for people; empty if the description of the configuration will do.
        notes: assumptions.
        tells: what a training backend must know to run it, by topic.
        beats: iterations of the parts in one global batch; a fraction if the batch is no multiple of their round.
        staleness: updates between the weights of a forward and its gradient, if more than the parts' schedules say.
        exchange: bytes that the parts exchange with each other in an iteration.
        unwritten: why no plan file can hold the proposal; empty if one can.
    """

    parts: tuple[Configuration, ...]
    words: str = ""
    notes: tuple[str, ...] = ()
    tells: Mapping[str, str] = field(default_factory=dict)
    beats: float = 1.0
    staleness: int = 0
    exchange: PortTraffic | None = None
    unwritten: str = ""


Solver = Callable[["SystemSetting", "System"], Iterator[Proposal]]
"""Generates the proposals of a system in a setting; the runner evaluates them and keeps the fastest that fits.

Raises InfeasibleError with the reason if there is nothing (more) to propose, JobError or UsageError if the system
cannot serve the job.
"""


@dataclass(frozen=True, slots=True)
class System:
    """A published system or a training framework: its part of the search space, its solver, what a backend must know.

    What it would choose and what its publication leaves open stands in docs/systems.md.

    Attributes:
        key: name in the registry.
        title: name in the publication.
        solver: proposes configurations, in place of the system's own planner.
        source: the publication.
        limits: the points of the search space it may choose; None for all that the job allows.
        exchange: scheme of gradient exchange, a name in `planner.exchange`; "" for the usual all-reduce of each stage.
        layouts: search for layouts that shard every operator; None if it shards none.
        backend: what a training backend must know to run it faithfully, by topic.
        takes: fields of a job that it follows; a job that sets another is refused.
        best_of_all: takes the fastest decision of the other systems if that beats its own.
        tunable: options that may follow the name (`byteps:cpu_machines=4`), with their defaults.
        options: the options that the user set.
        framework: the training framework whose limits hold in place of `limits`; None for a published system.
    """

    key: str
    title: str
    solver: Solver
    source: str
    limits: Limits | None = field(default_factory=Limits)
    exchange: str = ""
    layouts: Layouts | None = None
    backend: Mapping[str, str] = field(default_factory=dict)
    takes: frozenset[str] = PRICED
    best_of_all: bool = False
    tunable: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    framework: Backend | None = None

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names of its schedules, without options; empty if it has no pipeline."""
        return self.limits.schedules if self.limits else ()

    @property
    def semantics(self) -> Semantics:
        """Synchronous if all its schedules are."""
        synchronous = all(schedules.get(name).weight_policy.synchronous for name in self.schedules)
        return Semantics.SYNC if synchronous else Semantics.ASYNC

    @property
    def scheme(self) -> str:
        """Name of its exchange scheme with the options that the user set; an option `exchange` names another scheme."""
        options = dict(self.options)
        scheme = options.pop("exchange", self.exchange)
        option_text = ",".join(f"{name}={value}" for name, value in options.items())
        return f"{scheme}:{option_text}" if scheme and option_text else scheme


@dataclass(frozen=True, slots=True)
class SystemRow:
    """The row of one system in a comparison.

    Attributes:
        system: key of the system.
        title: name in the publication.
        semantics: synchronous or asynchronous.
        feasible: True if it can train the model on the cluster.
        reason: why not; empty if feasible.
        plan: its decision in words.
        iteration_s: time of a global batch: the makespan if the schedule drains, else the period of its steady state.
        samples_per_s: samples a second.
        memory: of the fullest device, by kind; None if infeasible.
        capacity_bytes: memory of that device.
        bubble: fraction of the used devices' time in which they wait for other stages; 0 without a pipeline.
        exposed: fraction in which they communicate and compute nothing.
        sent_bytes: bytes that all devices together send in an iteration.
        weight_versions: weight versions that a stage keeps, maximum over the stages.
        staleness: updates between the weights of a forward and the update that applies its gradient, maximum over the
            stages.
        devices: devices in use.
        available: devices of the cluster that the job allows.
        micro_batch: samples of a micro-batch; 0 if infeasible.
        tells: what a training backend must know, by topic.
        notes: assumptions that hold for this row alone.
        links: traffic of the busiest port of each level, innermost level first; empty if it is not counted by level.
        alters: how its updates differ from those of the other synchronous systems; empty if they do not.
        error: how predictions of this class of jobs compared with measured runs; None if the cluster names no stack.
    """

    system: str
    title: str
    semantics: Semantics
    feasible: bool
    reason: str = ""
    plan: str = ""
    iteration_s: float = 0.0
    samples_per_s: float = 0.0
    memory: MemoryBytes | None = None
    capacity_bytes: float = 0.0
    bubble: float = 0.0
    exposed: float = 0.0
    sent_bytes: float = 0.0
    weight_versions: int = 0
    staleness: int = 0
    devices: int = 0
    available: int = 0
    micro_batch: int = 0
    tells: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    links: tuple[LinkBytes, ...] = ()
    alters: str = ""
    error: MeasuredError | None = None


class SystemSetting:
    """A model, a cluster and a job, with the caches that all systems planning them share.

    Args:
        prices: costs of the model's blocks on the cluster.
        cluster: the hardware.
        job: the job as the user wrote it.
        changes_semantics: True if `auto` may take the decision of an asynchronous system.

    `optimizer_bytes` and `parameter_bytes` are per parameter: the optimizer state alone, and weight, gradient and
    optimizer state.
    """

    def __init__(self, prices: Pricer, cluster: Cluster, job: Job, *, changes_semantics: bool = False) -> None:
        self.user_job = replace(job, overlap=None) if job.overlap == cluster.stack.overlap else job
        self.prices, self.job = prices, settled(job, cluster)
        self.cluster = with_headroom(cluster, self.job.headroom)
        self.name = prices.chain.graph.name
        self.blocks = len(prices.chain.blocks)
        self.devices = self.job.devices_of(cluster)
        self.smallest_device_bytes = float(self.cluster.smallest_bytes)
        self.precision = precision(self.job.precision)
        self.optimizer_bytes = optimizer_state_bytes(self.job.optimizer, self.precision)
        self.parameter_bytes = (
            self.precision.held_weight_bytes + self.precision.held_gradient_bytes + self.optimizer_bytes
        )
        self.costs = prices.costs
        self.exchange = functools.cache(self._exchange)
        self.tables = functools.cache(self._tables)
        self.sizes, self.fixed, self.notes = worth_pricing(self.job, self.cluster, prices.chain.graph, self.costs)
        self.changes_semantics = changes_semantics
        self.results: dict[str, SystemDecision] = {}
        self._unlimited_job = replace(without(self.job, LIMITS), devices=self.job.devices, micro_batches=())

    def seen_by(self, system: System) -> SystemSetting:
        """The setting in which a system decides: this one, or a framework's own precision where that is open."""
        best, framework = self.job.precision, system.framework
        own = framework.own_precision(best) if framework and not self.user_job.precision else best
        if own in ("", best):
            return self
        job, graph, cluster = replace(self.user_job, precision=own), self.prices.graph, self.prices.cluster
        return SystemSetting(Pricer(graph, cluster, job), cluster, job, changes_semantics=self.changes_semantics)

    @functools.cached_property
    def model_states_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer state of the model; tied weights count once."""
        return elements_of(self.costs(self.sizes[0]), range(self.blocks))[0] * self.parameter_bytes

    def evaluate(self, configuration: Configuration, timed: Timed = Timed.PLAYED) -> Evaluation:
        """Evaluate a configuration of any global batch; only the devices and their memory limit it."""
        samples = configuration.copies * configuration.micro_batches * configuration.micro_batch
        job = replace(
            self._unlimited_job, global_batch=samples, schedules=(configuration.schedule,), zero=(configuration.zero,)
        )
        return evaluate(self.block_costs(configuration), self.cluster, job, configuration, timed=timed)

    def fits(self, configuration: Configuration) -> bool:
        """True if a configuration breaks no limit of the devices or their memory."""
        return self.evaluate(configuration, Timed.BOUND).feasible

    def block_costs(self, configuration: Configuration) -> Mapping[int, BlockCosts]:
        """Costs of the blocks by number of the sharding; 0 is no sharding."""
        numbers = {stage.sharding for stage in configuration.stages} - {0}
        sharded = {number: self.prices.entry(configuration.micro_batch, number)[1] for number in sorted(numbers)}
        return {0: self.costs(configuration.micro_batch), **sharded}

    def traffic(self, configuration: Configuration, *, exchanged: bool = True) -> PortTraffic:
        """Bytes through every port in an iteration, with the exchange of gradients or without it."""
        if configuration.exchange:
            return self.exchange(configuration).exchange.traffic
        shardings = self.prices.stage_shardings(configuration)
        inside = {number: sharding.costs.sent_bytes for number, sharding in shardings.items()}
        exchanged_in = self.precision if exchanged else None
        return traffic_of(configuration, self.cluster, self.block_costs(configuration), inside, exchanged_in)

    def _tables(self, micro_batch: int) -> StageTables:
        return StageTables(self.costs(micro_batch), self.precision, self.optimizer_bytes)

    def _exchange(self, configuration: Configuration) -> SchemeExchange:
        """Gradient exchange of a configuration that names an exchange scheme."""
        return exchange_of(self.costs(configuration.micro_batch), self.cluster, self.job, configuration)

"""What a named system is, the setting in which it is asked, and the row that it gives in a comparison."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from planner.costs.errors import MeasuredError
from planner.costs.precision import optimizer_state_bytes, precision
from planner.exchange import LevelTraffic, Traffic
from planner.hardware.types import Cluster, with_headroom
from planner.solvers.layouts import Layouts
from planner.solvers.sizes import worth_pricing
from planner.space import Configuration, Evaluation, Timed, evaluate
from planner.space.asked import LIMITS, PRICED, without
from planner.space.cuts import StageTables
from planner.space.jobs import settled
from planner.space.pricer import Pricer, Sharded
from planner.space.schemes import SchemeExchange, exchange_of
from planner.space.subspaces import Limits
from planner.space.terms import elements_of
from planner.space.traffic import Sent, traffic_of
from planner.space.types import BlockCosts, Job, MemoryBytes
from planner.systems.backends import Backend

if TYPE_CHECKING:
    from planner.systems.runner import Decided


class Semantics(StrEnum):
    """Whether training means the same as on one device."""

    SYNC = "sync"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class Proposal:
    """One way to train, as a system's own planner would choose it.

    Attributes:
        parts: what is to be judged: one configuration, or one for each kind of unlike pipelines that work side by side,
            all at the pace of the slowest.
        words: the decision in words; empty for those of the configuration.
        notes: assumptions.
        tells: what a training backend must know of it, by topic.
        beats: iterations of the parts that make up a global batch, where it is no whole number of their rounds.
        staleness: updates between weights and gradients, where the parts do not know of all.
        exchange: what the parts exchange with each other in an iteration.
        unwritten: why no plan file can hold it; empty where one can.
    """

    parts: tuple[Configuration, ...]
    words: str = ""
    notes: tuple[str, ...] = ()
    tells: Mapping[str, str] = field(default_factory=dict)
    beats: float = 1.0
    staleness: int = 0
    exchange: Traffic | None = None
    unwritten: str = ""


class Solver(Protocol):
    """What proposes configurations within the limits of a system."""

    def __call__(self, setting: Setting, system: System) -> Iterator[Proposal]:
        """Propose configurations; the runner judges them and takes the fastest that fits.

        Raises:
            InfeasibleError: nothing can be proposed (any more); says why.
            JobError, UsageError: the system cannot serve the job.
        """
        ...


@dataclass(frozen=True, slots=True)
class System:
    """A published system: what it may choose, what looks for it, and what is told of it.

    Attributes:
        key: the name users choose it by.
        title: as published.
        cut: how the graph is split into stages and replicated, in words.
        sharding: which layouts tensors may take, in words.
        solver: what proposes configurations, the stand-in for the system's own planner.
        semantics: synchronous or not.
        staleness: the rule, in words.
        chooses: what its planner would choose, and why.
        source: where it was published.
        limits: what it may choose; None for all that the job allows.
        exchange: how gradients travel: a name in `planner.exchange`, or "" where the schedule says it all.
        layouts: how it cuts operators; None where it does not.
        backend: what a training backend must know to run it faithfully, by topic.
        open: what the publication leaves open, and what was decided here.
        takes: fields of a job that it follows; the others it decides itself.
        best_of_all: it takes the fastest row of the other systems where that is faster.
        tunable: what a user may set behind the name (`byteps:cpu_machines=4`), with the usual value.
        options: what the user set.
        framework: the training framework that it is, whose limits hold in place of `limits`; None for others.
    """

    key: str
    title: str
    cut: str
    solver: Solver
    staleness: str
    chooses: str
    source: str
    sharding: str = "none: every tensor is whole on its stage"
    semantics: Semantics = Semantics.SYNC
    limits: Limits | None = field(default_factory=Limits)
    exchange: str = ""
    layouts: Layouts | None = None
    backend: Mapping[str, str] = field(default_factory=dict)
    open: tuple[str, ...] = ()
    takes: frozenset[str] = PRICED
    best_of_all: bool = False
    tunable: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    framework: Backend | None = None

    @property
    def schedules(self) -> tuple[str, ...]:
        """Its schedules, without options; empty where it has no pipeline."""
        return self.limits.schedules if self.limits else ()

    @property
    def scheme(self) -> str:
        """Its exchange scheme with the options that the user set; a system with the option `exchange` takes any."""
        options = dict(self.options)
        scheme = options.pop("exchange", self.exchange)
        chosen = ",".join(f"{name}={value}" for name, value in options.items())
        return f"{scheme}:{chosen}" if scheme and chosen else scheme


@dataclass(frozen=True, slots=True)
class SystemRow:
    """One line of the comparison.

    Attributes:
        system: key of the system.
        title: as published.
        semantics: synchronous or not.
        feasible: whether it can train the model on the cluster.
        reason: why not, empty when feasible.
        plan: what it decided, in words.
        iteration_s: time of the global batch, by the schedule's convention (makespan where it drains, period of the
            periodic part where it does not).
        throughput: samples a second.
        memory: of the fullest device, by kind; None where nothing fits or nothing was priced.
        capacity_bytes: of that device.
        bubble: share of the used devices' time in which they compute nothing (over total time).
        sent_bytes: what all devices together send in an iteration.
        weight_versions: most versions of its weights that a stage keeps.
        staleness: most updates between the weights of a forward and the update that applies its gradient.
        devices: how many are used.
        available: how many there are.
        micro_batch: samples a replica works on at a time; 0 where nothing was found.
        tells: what a training backend must know, by topic.
        notes: assumptions that hold for this row alone.
        links: bytes over the links by level, innermost first; empty where they are not counted by level.
        alters: in what its updates differ from those of the other synchronous systems; empty when in nothing.
        error: how predictions of such jobs compared with measured runs; None where no stack is named.
    """

    system: str
    title: str
    semantics: Semantics
    feasible: bool
    reason: str = ""
    plan: str = ""
    iteration_s: float = 0.0
    throughput: float = 0.0
    memory: MemoryBytes | None = None
    capacity_bytes: float = 0.0
    bubble: float = 0.0
    sent_bytes: float = 0.0
    weight_versions: int = 0
    staleness: int = 0
    devices: int = 0
    available: int = 0
    micro_batch: int = 0
    tells: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    links: tuple[LevelTraffic, ...] = ()
    alters: str = ""
    error: MeasuredError | None = None


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

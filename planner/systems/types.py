"""What a named system is, and what running it on a model and a cluster finds: data only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from planner.exchange import LevelTraffic, Traffic
from planner.solvers.layouts import Layouts
from planner.space import Configuration
from planner.space.asked import PRICED
from planner.space.subspaces import Limits
from planner.space.types import MemoryBytes
from planner.systems.backends import Backend

if TYPE_CHECKING:
    from planner.systems.setting import Setting


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
        """Its exchange scheme with the options that the user set."""
        chosen = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.exchange}:{chosen}" if self.exchange and chosen else self.exchange


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

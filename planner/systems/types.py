"""What a named system is, and what running it on a model and a cluster finds: data only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from planner.errors import InfeasibleError
from planner.play import Transfers
from planner.solvers.layouts import Layouts
from planner.space.asked import PRICED
from planner.space.types import Job, MemoryBytes
from planner.sync import LevelTraffic


class Semantics(StrEnum):
    """Whether training means the same as on one device."""

    SYNC = "sync"
    ASYNC = "async"


class Recompute(StrEnum):
    """Which activation recomputation a system knows."""

    NEVER = "never"
    BLOCKS = "blocks"
    """Of the stages where it pays or is needed, block by block."""

    STAGES = "stages"
    """The same, a stage at once from what enters it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The part of the search space that a system chooses from: changes of a job.

    Attributes:
        schedules: its schedules; empty for the job's.
        recompute: in order of preference; the next is tried only where nothing fits with the one before.
        transfers: what a transfer between stages occupies.
        zero: ZeRO stages.
        tensor_parallel: numbers of ranks that share operators.
        uniform: as many replicas for every stage.
        copies: whole pipelines may be replicated.
        fewest_stages: of a pipeline.
        stage_a_device: as many stages as there are devices, or blocks if these are fewer.
        micro_batches: sizes; empty for any.
    """

    schedules: tuple[str, ...] = ()
    recompute: tuple[Recompute, ...] = (Recompute.NEVER,)
    transfers: Transfers = Transfers.BLOCKING
    zero: tuple[int, ...] = (0,)
    tensor_parallel: tuple[int, ...] = (1,)
    uniform: bool = True
    copies: bool = True
    fewest_stages: int = 1
    stage_a_device: bool = False
    micro_batches: tuple[int, ...] = ()

    def jobs(self, job: Job, devices: int, blocks: int) -> Iterator[Job]:
        """The job within these limits, once for each kind of recomputation, in order of preference.

        Args:
            job: what is to be trained.
            devices: that may be used.
            blocks: of the model's chain.

        Raises:
            InfeasibleError: the devices or the blocks are too few for a pipeline.
        """
        deepest = min(devices, blocks)
        if deepest < self.fewest_stages:
            raise InfeasibleError(
                f"a pipeline needs {self.fewest_stages} devices and a model of as many blocks",
                hint="use more devices",
            )
        stages = tuple(range(self.fewest_stages, blocks + 1)) if self.fewest_stages > 1 else ()
        changed = replace(
            job,
            schedules=self.schedules or job.schedules,
            transfers=self.transfers,
            zero=self.zero,
            tensor_parallel=self.tensor_parallel,
            uniform=self.uniform,
            pipeline_stages=(deepest,) if self.stage_a_device else stages,
            data_parallel=() if self.copies else (1,),
            micro_batches=self.micro_batches or job.micro_batches,
        )
        for kind in self.recompute:
            choice = "never" if kind is Recompute.NEVER else "auto"
            yield replace(changed, recompute=choice, whole_stages=kind is Recompute.STAGES)


@dataclass(frozen=True, slots=True)
class System:
    """A published system: what it may choose, what looks for it, and what is told of it.

    Attributes:
        key: the name users choose it by.
        title: as published.
        cut: how the graph is split into stages and replicated, in words.
        sharding: which layouts tensors may take, in words.
        solver: what proposes configurations, the stand-in for the system's own planner (`planner.systems.proposal`).
        semantics: synchronous or not.
        staleness: the rule, in words.
        chooses: what its planner would choose, and why.
        source: where it was published.
        limits: what it may choose; None for all that the job allows.
        exchange: how gradients travel: a name in `planner.sync`, or "" where the schedule says it all.
        layouts: how it cuts operators; None where it does not.
        backend: what a training backend must know to run it faithfully, by topic.
        open: what the publication leaves open, and what was decided here.
        takes: fields of a job that it follows; the others it decides itself.
        best_of_all: it takes the fastest row of the other systems where that is faster.
        tunable: what a user may set behind the name (`byteps:cpu_machines=4`), with the usual value.
        options: what the user set.
    """

    key: str
    title: str
    cut: str
    solver: str
    staleness: str
    chooses: str
    source: str
    sharding: str = "none: every tensor is whole on its stage"
    semantics: Semantics = Semantics.SYNC
    limits: Limits | None = Limits()
    exchange: str = ""
    layouts: Layouts | None = None
    backend: Mapping[str, str] = field(default_factory=dict)
    open: tuple[str, ...] = ()
    takes: frozenset[str] = PRICED
    best_of_all: bool = False
    tunable: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)

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

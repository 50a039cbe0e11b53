"""What a named system is, and what running it on a model and a cluster finds: data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from planner.play import Transfers
from planner.space.types import MemoryBytes, StageChoice


class Semantics(StrEnum):
    """Whether training means the same as on one device."""

    SYNC = "sync"
    ASYNC = "async"


@dataclass(frozen=True, slots=True)
class System:
    """A published system as presets on the five axes, and what its own planner would do with them.

    Attributes:
        key: the name users choose it by.
        title: as published.
        cut: how the graph is split into stages and replicated.
        sharding: which layouts tensors may take.
        schedule: who does what when: a name in `planner.schedules`, with options, or "" without a pipeline.
        sync: how gradients travel: a name in `planner.sync`, or "" where the schedule says it all.
        search: which of this package's searches chooses, the stand-in for the system's own planner.
        semantics: synchronous or not.
        staleness: the rule, in words.
        chooses: what its planner would choose, and why.
        source: where it was published.
        backend: what a training backend must know to run it faithfully, by topic.
        open: what the publication leaves open, and what was decided here.
        transfers: whether its cost model lets both transfers over the boundary before a stage stop the stage's worker.
        recompute: choices of activation recomputation that it knows.
        copies: whether whole pipelines may be replicated beside each other.
        options: further numbers for the search.
        tunable: what a user may set behind the name (`byteps:cpu_machines=4`), with the usual value.
    """

    key: str
    title: str
    cut: str
    sharding: str
    schedule: str
    sync: str
    search: str
    semantics: Semantics
    staleness: str
    chooses: str
    source: str
    backend: Mapping[str, str] = field(default_factory=dict)
    open: tuple[str, ...] = ()
    transfers: Transfers = Transfers.BLOCKING
    recompute: tuple[bool, ...] = (False,)
    copies: bool = True
    options: Mapping[str, str] = field(default_factory=dict)
    tunable: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LinkBytes:
    """What an iteration sends over one level of the cluster.

    Attributes:
        level: its name.
        out_bytes, in_bytes: through the busiest port of it, each way.
        total_bytes: through all its ports, one way.
    """

    level: str
    out_bytes: float
    in_bytes: float
    total_bytes: float


@dataclass(frozen=True, slots=True)
class Point:
    """What a system decided: a point of the space, and how it is played.

    Attributes:
        stages: blocks and replicas of each stage; with recomputation or not.
        copies: copies of the whole pipeline.
        micro_batch: samples a replica works on at a time.
        micro_batches: in one copy, of one iteration.
        schedule: with its options.
        ranks: the device of each stage, where stages do not take the devices in line; empty otherwise.
        zero: 0, or 1 when the optimizer state is sharded over a stage's replicas.
        played: micro-batches that are simulated, where an iteration of a pipeline that never drains has more.
        slice_devices: devices of one copy's slice; 0 means as many as its stages take.
        whole: stages that recompute keep what enters them alone and repeat all their work at once, as GPipe's cells do,
            instead of block by block.
    """

    stages: tuple[StageChoice, ...]
    copies: int
    micro_batch: int
    micro_batches: int
    schedule: str
    ranks: tuple[int, ...] = ()
    zero: int = 0
    played: int = 0
    slice_devices: int = 0
    whole: bool = False

    @property
    def adjacent(self) -> bool:
        """Whether the copies of each worker are neighbouring devices: rank w * copies + c is worker w of copy c."""
        workers = len(self.ranks) // self.copies
        dealt = tuple(worker * self.copies + copy for copy in range(self.copies) for worker in range(workers))
        return self.copies > 1 and workers > 0 and self.ranks == dealt


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
    links: tuple[LinkBytes, ...] = ()
    alters: str = ""

"""What a search of a system found, and what playing one of its points did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from planner.space.types import Candidate, MemoryBytes
from planner.systems.types import LinkBytes, Point


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """What playing a point found.

    Attributes:
        point: what was played.
        iteration_s: of the global batch.
        bubble: over total time of the used devices.
        memory: of the fullest device.
        capacity_bytes: of that device.
        sent_bytes: by all devices in an iteration.
        weight_versions: most of any stage.
        staleness: most of any stage, in updates.
        devices: used.
        reason: why it cannot run, empty when it can.
        exchanges: by stage, how often its gradients are exchanged in an iteration.
    """

    point: Point
    iteration_s: float = math.inf
    bubble: float = 0.0
    memory: MemoryBytes | None = None
    capacity_bytes: float = 0.0
    sent_bytes: float = 0.0
    weight_versions: int = 1
    staleness: int = 0
    devices: int = 0
    reason: str = ""
    exchanges: tuple[float, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether it can run."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class Found:
    """What the search of a system came to.

    Attributes:
        plan: the decision in words; empty when nothing was found.
        iteration_s: time of the global batch, infinite when nothing was found.
        memory, capacity_bytes: of the fullest device.
        bubble: over total time of the used devices.
        sent_bytes: by all devices in an iteration.
        weight_versions, staleness: the most of any stage.
        devices: used.
        micro_batch: samples a replica works on at a time.
        reason: why nothing was found.
        tells: what a backend must know of this very plan.
        notes: assumptions.
        changes_semantics: the plan is asynchronous (of a search that may choose either).
        links: bytes over the links by level.
        played: the point and what playing it found, where the system is a pipeline on one kind of slice.
        alike: what a plan file can hold instead, where virtual workers are cut differently (one cut for all), or where
            replicas do not share an iteration's minibatches evenly (replicas that do).
        alike_words: its allocation; empty where virtual workers are cut alike anyway.
        candidate: the judged decision, where groups of ranks share operators.
        alters: in what its updates differ from those of the other synchronous systems.
    """

    plan: str = ""
    iteration_s: float = math.inf
    memory: MemoryBytes | None = None
    capacity_bytes: float = 0.0
    bubble: float = 0.0
    sent_bytes: float = 0.0
    weight_versions: int = 1
    staleness: int = 0
    devices: int = 0
    micro_batch: int = 0
    reason: str = ""
    tells: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    changes_semantics: bool = False
    links: tuple[LinkBytes, ...] = ()
    played: Played | None = None
    alters: str = ""
    candidate: Candidate | None = None
    alike: Played | None = None
    alike_words: str = ""

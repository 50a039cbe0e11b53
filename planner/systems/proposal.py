"""What the solvers of systems propose: configurations to be judged, by the name of the solver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from planner.exchange import Traffic
from planner.registry import Registry
from planner.space import Configuration
from planner.systems.setting import Setting
from planner.systems.types import System


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


SOLVERS: Registry[Solver] = Registry("planner.systems", "solver of a system")
"""All solvers by name; a module of this package registers its own."""

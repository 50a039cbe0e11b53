"""The verdict of the judges of partition problems, and checks that several of them share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from planner.memory import fits
from planner.space.types import Violation

Bytes = TypeVar("Bytes", float, np.ndarray)
"""Bytes of one stage, or of many at once."""


@dataclass(frozen=True, slots=True)
class PartitionVerdict:
    """A judge's answer on a decision.

    Attributes:
        objective: in the problem's unit (`PartitionProblem.unit`); infinite for a malformed decision.
        violations: limits that the decision breaks; empty if it is feasible.
        parts: by device or stage, the values whose maximum or sum is the objective, for reports.
        kept_bytes: by stage, what one of its devices keeps; empty where that is not counted by stage.
    """

    objective: float
    violations: tuple[Violation, ...] = ()
    parts: tuple[float, ...] = ()
    kept_bytes: tuple[float, ...] = ()

    @property
    def feasible(self) -> bool:
        """True if no limit is broken."""
        return not self.violations


def malformed(kind: str, message: str, part: int = -1) -> PartitionVerdict:
    """The verdict on a malformed decision: one violation, infinite objective."""
    return PartitionVerdict(math.inf, (Violation(kind, part, message),))


def over_memory(part: int, needed_bytes: float, available_bytes: float, message: str) -> tuple[Violation, ...]:
    """The violation of a part that needs more memory than it has; empty if it fits.

    Args:
        part: device or stage.
        needed_bytes: memory that it needs.
        available_bytes: memory that it has.
        message: for reports.
    """
    if fits(needed_bytes, available_bytes):
        return ()
    return (Violation("memory", part, message, needed_bytes, available_bytes),)


def covers_chain(boundaries: Sequence[int], layers: int) -> bool:
    """True if the boundaries ascend from 0 to `layers`, so that every layer of a chain is in one stage."""
    return (
        len(boundaries) > 1
        and boundaries[0] == 0
        and boundaries[-1] == layers
        and list(boundaries) == sorted(set(boundaries))
    )


def even_boundaries(layers: int, stages: int) -> tuple[int, ...]:
    """Boundaries of stages with the same number of layers, up to rounding."""
    return tuple(round(layers * i / stages) for i in range(stages + 1))


class PartitionProblem(Protocol):
    """A partition problem: a frozen dataclass of numbers, with a judge that shares no code with the solvers."""

    unit: ClassVar[str]
    """Unit of the objective, such as "ms" or "s"."""

    def judge(self, decision: Any) -> PartitionVerdict:  # noqa: ANN401
        """Recompute objective and violations of a decision from the problem's numbers alone."""
        ...

    def trivial(self) -> tuple[tuple[str, Any], ...]:
        """Named baseline plans (one device, even split, data parallel), feasible or not."""
        ...

"""What judges of published partition problems say and check alike."""

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
class Verdict:
    """What a judge says of a decision.

    Attributes:
        objective: what the problem minimises, in its own unit (`PartitionProblem.unit`); infinite when malformed.
        violations: limits that the decision breaks, empty when it is feasible.
        parts: what the objective is the largest or the sum of, by part (device, stage), for people.
    """

    objective: float
    violations: tuple[Violation, ...] = ()
    parts: tuple[float, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether no limit is broken."""
        return not self.violations


def malformed(kind: str, message: str, part: int = -1) -> Verdict:
    """The verdict on a decision that has no objective."""
    return Verdict(math.inf, (Violation(kind, part, message),))


def over_memory(part: int, needed_bytes: float, available_bytes: float, message: str) -> tuple[Violation, ...]:
    """The violation of a part that needs more memory than there is; empty when it fits.

    Args:
        part: device or stage.
        needed_bytes: what it keeps.
        available_bytes: what there is.
        message: for people.
    """
    if fits(needed_bytes, available_bytes):
        return ()
    return (Violation("memory", part, message, needed_bytes, available_bytes),)


def held_bytes(size_bytes: np.ndarray, devices: Sequence[int], count: int) -> list[float]:
    """By device, of so many, the sizes of the nodes that are on it, summed and rounded once."""
    held: list[list[float]] = [[] for _ in range(count)]
    for size, device in zip(size_bytes.tolist(), devices, strict=True):
        held[device].append(size)
    return [math.fsum(sizes) for sizes in held]


def torn_colours(colour: np.ndarray, devices: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Colours whose nodes are on several devices, ascending, and these devices; a negative colour is none."""
    places: dict[int, set[int]] = {}
    for own, device in zip(colour.tolist(), devices, strict=True):
        if own >= 0:
            places.setdefault(own, set()).add(device)
    return [(own, sorted(where)) for own, where in sorted(places.items()) if len(where) > 1]


def covers_chain(boundaries: Sequence[int], layers: int) -> bool:
    """Whether boundaries 0, ..., `layers` ascend, so that every layer of a chain is in one stage."""
    return (
        len(boundaries) > 1
        and boundaries[0] == 0
        and boundaries[-1] == layers
        and list(boundaries) == sorted(set(boundaries))
    )


def even_boundaries(layers: int, stages: int) -> tuple[int, ...]:
    """Boundaries of stages with about the same number of layers."""
    return tuple(round(layers * i / stages) for i in range(stages + 1))


class PartitionProblem(Protocol):
    """A problem of some family: a frozen dataclass of numbers, with a judge that shares no code with any solver."""

    unit: ClassVar[str]
    """Unit of the objective, such as "ms" or "s"."""

    def judge(self, decision: Any) -> Verdict:  # noqa: ANN401
        """Recompute objective and violations of a decision from the problem's numbers alone."""
        ...

    def trivial(self) -> tuple[tuple[str, Any], ...]:
        """Plans that anybody would try first (one device, even split, data parallel), by name, feasible or not."""
        ...

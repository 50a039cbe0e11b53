"""What differs between two partition plans."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from planner.partitions.types import PartitionPlan


@dataclass(frozen=True, slots=True)
class PartitionChange:
    """One difference: where, and what it was and is (None where it is absent)."""

    path: str
    old: Any
    new: Any


def partition_changes(old: PartitionPlan, new: PartitionPlan, *, tolerance: float = 0.0) -> tuple[PartitionChange, ...]:
    """What differs between two plans, digest left aside.

    Args:
        old: the one.
        new: the other.
        tolerance: relative difference of two numbers that counts as none.
    """
    found: list[PartitionChange] = []
    for field in dataclasses.fields(PartitionPlan):
        if field.name != "digest":
            _compare(field.name, getattr(old, field.name), getattr(new, field.name), tolerance, found)
    return tuple(found)


def _compare(path: str, old: Any, new: Any, tolerance: float, found: list[PartitionChange]) -> None:  # noqa: ANN401
    if dataclasses.is_dataclass(old) and type(old) is type(new):
        for field in dataclasses.fields(old):
            _compare(f"{path}.{field.name}", getattr(old, field.name), getattr(new, field.name), tolerance, found)
    elif isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            _compare(f"{path}.{key}", old.get(key), new.get(key), tolerance, found)
    elif isinstance(old, tuple) and isinstance(new, tuple) and any(map(dataclasses.is_dataclass, (*old, *new))):
        for i in range(max(len(old), len(new))):
            pair = (old[i] if i < len(old) else None, new[i] if i < len(new) else None)
            _compare(f"{path}[{i}]", *pair, tolerance, found)
    elif isinstance(old, float) and isinstance(new, float):
        if abs(old - new) > tolerance * max(abs(old), abs(new)):
            found.append(PartitionChange(path, old, new))
    elif old != new:
        found.append(PartitionChange(path, old, new))

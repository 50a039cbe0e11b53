"""Scales of the picture of a comparison: logarithmic time, linear memory, round numbers on both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planner.systems.types import SystemRow

ROUND = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
"""Numbers of a decade that stand on a logarithmic scale, fewest first."""

CLOCK = (60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000)
"""Round times beyond half a minute, seconds."""


@dataclass(frozen=True, slots=True)
class Axes:
    """Where times and memory stand in the picture.

    Attributes:
        low_s, high_s: ends of the time scale.
        most_bytes: end of the memory scale, which begins at 0.
        second_ticks, byte_ticks: round numbers on them.
        width, left, right, top, bottom: of the picture, and of what lies between the scales.
    """

    low_s: float
    high_s: float
    most_bytes: float
    second_ticks: tuple[float, ...]
    byte_ticks: tuple[float, ...]
    width: float = 960.0
    left: float = 80.0
    right: float = 850.0
    top: float = 90.0
    bottom: float = 520.0

    def x(self, seconds: float) -> float:
        """Place of a time."""
        share = math.log(seconds / self.low_s) / math.log(self.high_s / self.low_s)
        return self.left + share * (self.right - self.left)

    def y(self, size_bytes: float) -> float:
        """Place of a size."""
        return self.bottom - size_bytes / self.most_bytes * (self.bottom - self.top)


def axes_of(rows: Sequence[SystemRow]) -> Axes:
    """Scales that hold all rows and the limits of their devices."""
    times = [row.iteration_s for row in rows] or [1.0]
    span = max(max(times) / min(times), 1.2)
    low, high = min(times) / span**0.05, min(times) * span**1.05
    most = max((max(row.memory.total if row.memory else 0.0, row.capacity_bytes) for row in rows), default=1.0) * 1.04
    step = _round_step(most / 5)
    sizes = tuple(step * i for i in range(int(most / step) + 1))
    return Axes(low, high, most, time_ticks(low, high), sizes)


def time_ticks(low: float, high: float) -> tuple[float, ...]:
    """Four to about ten round times between two; equal steps where the two are close.

    >>> time_ticks(0.5, 20)
    (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for numbers in ROUND:
        every = (float(f"{n * 10.0**k:.3g}") for k in range(first, last + 1) for n in numbers)
        found = tuple(t for t in (*(e for e in every if e <= 30), *CLOCK) if low <= t <= high)
        if len(found) >= 4:
            return found
    step = _round_step((high - low) / 5)
    return tuple(float(f"{step * i:.6g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1))


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is not smaller."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= least * (1 - 1e-9))

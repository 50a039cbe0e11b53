"""Scales of SVG charts: positions of values, round ticks, and grid lines with labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from planner.report import svg

_DECADES = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
"""Ticks within a decade of a logarithmic scale, fewest first."""

_CLOCK = (60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000)
"""Ticks of times beyond half a minute, in seconds."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A scale along one axis of a chart.

    Attributes:
        low: value at the start; above 0 on a logarithmic scale.
        high: value at the end.
        start: coordinate of `low` in the picture.
        end: coordinate of `high`.
        ticks: values with a grid line and a label.
        logarithmic: true for equal distances between equal ratios.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]
    logarithmic: bool = True

    def at(self, value: float) -> float:
        """Coordinate of a value."""
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)


def vertical_lines(x: Scale, y: Scale, label: Callable[[float], str], below: float) -> list[str]:
    """Grid lines at the ticks of the horizontal scale, with labels so far below the chart."""
    parts = []
    for tick in x.ticks:
        parts.append(svg.line("grid", x.at(tick), y.end, x.at(tick), y.start))
        parts.append(svg.text(x.at(tick), y.start + below, label(tick), anchor="middle"))
    return parts


def horizontal_lines(x: Scale, y: Scale, label: Callable[[float], str]) -> list[str]:
    """Grid lines at the ticks of the vertical scale, with labels to the left of the chart."""
    parts = []
    for tick in y.ticks:
        parts.append(svg.line("grid", x.start, y.at(tick), x.end, y.at(tick)))
        parts.append(svg.text(x.start - 8, y.at(tick) + 4, label(tick), anchor="end"))
    return parts


def time_ticks(low: float, high: float) -> tuple[float, ...]:
    """Four to about ten round times in seconds between two; at equal steps if the two are close.

    >>> time_ticks(0.5, 20)
    (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for numbers in _DECADES:
        decimal = (float(f"{n * 10.0**k:.3g}") for k in range(first, last + 1) for n in numbers)
        ticks = tuple(t for t in (*(value for value in decimal if value <= 30), *_CLOCK) if low <= t <= high)
        if len(ticks) >= 4:
            return ticks
    step = svg.round_step((high - low) / 5)
    return tuple(float(f"{step * i:.6g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1))


def round_ticks(low: float, high: float) -> tuple[float, ...]:
    """Four to about ten round numbers between two."""
    unit = 10.0 ** -math.floor(math.log10(high))
    return tuple(float(f"{tick / unit:.6g}") for tick in time_ticks(low * unit, high * unit))

"""SVG elements as text: escaped, styled by class, with colours for light and dark schemes; scales of charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

BASE_STYLE = """
text { font: 12px sans-serif; fill: #222 } .title { font-size: 15px } .quiet { fill: #666 } .page { fill: #fff }
.grid { stroke: #ddd } .limit { stroke: #b91c1c; stroke-dasharray: 5 4 } .over { fill: #b91c1c }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .quiet { fill: #999 } .page { fill: #16181d } .grid { stroke: #333 }
  .limit { stroke: #f87171 } .over { fill: #f87171 }
}
"""
"""Style sheet of all pictures: text, titles, quiet text, background, grid lines, limits and excesses."""


def svg(width: float, height: float, style: str, body: Iterable[str]) -> str:
    """A self-contained picture with a background (class `page`).

    Args:
        width, height: size in pixels.
        style: style sheet of further classes, added to `BASE_STYLE`.
        body: the elements; later ones cover earlier ones.
    """
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
    head += f'height="{height:.0f}">'
    page = '<rect class="page" width="100%" height="100%"/>'
    return "\n".join([head, f"<style>{BASE_STYLE}{style}</style>", page, *body, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    """A text whose start, middle or end is at a position."""
    optional = {"class": style, "text-anchor": "" if anchor == "start" else anchor}
    return _element("text", {"x": x, "y": y, **optional}, escape(words))


def line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line."""
    return _element("line", {"class": style, "x1": x1, "y1": y1, "x2": x2, "y2": y2})


def rect(style: str, x: float, y: float, width: float, height: float) -> str:
    """A rectangle by its upper left corner."""
    return _element("rect", {"class": style, "x": x, "y": y, "width": width, "height": height})


def circle(style: str, x: float, y: float, radius: float, tip: str = "") -> str:
    """A disc with a tooltip."""
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return _element("circle", {"class": style, "cx": x, "cy": y, "r": radius}, inside)


def polygon(style: str, corners: Sequence[Point]) -> str:
    """An area by its corners."""
    return _element("polygon", {"class": style, "points": " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)})


def _element(name: str, attributes: dict[str, str | float], inside: str = "") -> str:
    """An element; attributes with an empty value are left out."""
    written = "".join(
        f' {key}="{escape(value) if isinstance(value, str) else _number(value)}"'
        for key, value in attributes.items()
        if value != ""
    )
    return f"<{name}{written}>{inside}</{name}>" if inside else f"<{name}{written}/>"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is at least `least`; 1 if that is not above 0."""
    if least <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= least * (1 - 1e-9))


_DECADES = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
"""Ticks within a decade of a logarithmic scale, fewest first."""

_CLOCK = (60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000)
"""Ticks of times beyond half a minute, in seconds."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A logarithmic scale along one axis of a chart.

    Attributes:
        low: value at the start; above 0.
        high: value at the end.
        start: coordinate of `low` in the picture.
        end: coordinate of `high`.
        ticks: values with a grid line and a label.
    """

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    def at(self, value: float) -> float:
        """Coordinate of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def vertical_lines(x: Scale, y: Scale, label: Callable[[float], str], below: float) -> list[str]:
    """Grid lines at the ticks of the horizontal scale, with labels so far below the chart."""
    parts = []
    for tick in x.ticks:
        parts.append(line("grid", x.at(tick), y.end, x.at(tick), y.start))
        parts.append(text(x.at(tick), y.start + below, label(tick), anchor="middle"))
    return parts


def horizontal_lines(x: Scale, y: Scale, label: Callable[[float], str]) -> list[str]:
    """Grid lines at the ticks of the vertical scale, with labels to the left of the chart."""
    parts = []
    for tick in y.ticks:
        parts.append(line("grid", x.start, y.at(tick), x.end, y.at(tick)))
        parts.append(text(x.start - 8, y.at(tick) + 4, label(tick), anchor="end"))
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
    step = round_step((high - low) / 5)
    return tuple(float(f"{step * i:.6g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1))


def round_ticks(low: float, high: float) -> tuple[float, ...]:
    """Four to about ten round numbers between two."""
    unit = 10.0 ** -math.floor(math.log10(high))
    return tuple(float(f"{tick / unit:.6g}") for tick in time_ticks(low * unit, high * unit))

"""SVG elements as text: escaped, styled by class, with colours for light and dark schemes; scales; scatter charts."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.escaping import html, visible
from planner.sums import float_sum
from planner.units import format_number

Point = tuple[float, float]

TITLE = 15
"""Size of the font of titles, in pixels."""

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
    return _element("text", {"x": x, "y": y, **optional}, html(words))


_NARROW = frozenset(" .,:;'|!()[]-/fijlrtI")


def text_width(words: str, size: float = 12) -> float:
    """Upper estimate of the width of a text in pixels, in the usual fonts without serifs.

    Args:
        words: the text.
        size: size of the font in pixels.
    """
    ems = (0.42 if c in _NARROW else 1.0 if ord(c) > 0x2E7F or c in "@MW%" else 0.66 for c in visible(words))
    return size * float_sum(ems)


def fitted(words: str, room: float, size: float = 12) -> str:
    """A text, with dots in place of its middle if it is wider than some room in pixels."""
    shown, kept = words, len(words)
    while kept > 1 and text_width(shown, size) > room:
        kept = min(kept - 1, int(len(words) * room / text_width(words, size)) + 1)
        shown = f"{words[: kept - kept // 3]}…{words[len(words) - kept // 3 :]}"
    return shown


def line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """A straight line."""
    return _element("line", {"class": style, "x1": x1, "y1": y1, "x2": x2, "y2": y2})


def rect(style: str, x: float, y: float, width: float, height: float) -> str:
    """A rectangle by its upper left corner."""
    return _element("rect", {"class": style, "x": x, "y": y, "width": width, "height": height})


def circle(style: str, x: float, y: float, radius: float, tip: str = "") -> str:
    """A disc with a tooltip."""
    inside = f"<title>{html(tip)}</title>" if tip else ""
    return _element("circle", {"class": style, "cx": x, "cy": y, "r": radius}, inside)


def polygon(style: str, corners: Sequence[Point]) -> str:
    """An area by its corners."""
    return _element("polygon", {"class": style, "points": " ".join(f"{_number(x)},{_number(y)}" for x, y in corners)})


def _element(name: str, attributes: dict[str, str | float], inside: str = "") -> str:
    """An element; attributes with an empty value are left out."""
    written = "".join(
        f' {key}="{html(value) if isinstance(value, str) else _number(value)}"'
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


SCATTER_STYLE = """
.leader { stroke: #999 } .mark { stroke-width: 2 }
.first { fill: #2563eb; stroke: #2563eb } .second { fill: #fff; stroke: #c2620a } .other { fill: #999; stroke: #999 }
text.first { stroke: none; fill: #2563eb } text.second { stroke: none; fill: #a8540a }
text.other { stroke: none; fill: #666 }
@media (prefers-color-scheme: dark) {
  .leader { stroke: #777 } .first { fill: #7aa7ff; stroke: #7aa7ff } .second { fill: #16181d; stroke: #f5a04a }
  .other { fill: #777; stroke: #777 } text.first { fill: #7aa7ff } text.second { fill: #f5a04a }
  text.other { fill: #aaa }
}
"""

LETTER, LINE, FOOT_LETTERS = 6.8, 14.0, 125
"""Width of a letter and height of a line in picture units; letters per line of the notes below."""

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960.0, 80.0, 700.0, 90.0, 520.0
"""Width of the picture, and the edges of the chart in it; names stand to the right of the chart."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of a picture.

    Attributes:
        x, y: its values, above 0.
        kind: "first", "second" or "other", by which it is coloured.
        tip: its tooltip.
        name: what stands beside the chart, joined to the point by a line; "" for nothing.
    """

    x: float
    y: float
    kind: str
    tip: str
    name: str = ""


def _six_digits(value: float) -> str:
    return format_number(value, 6)


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """A logarithmic axis.

    Attributes:
        words: what it shows.
        label: how a tick is written.
        ticks: values with a grid line and a label between two values.
        low: value at the start; above 0.
        high: value at the end.
        start: coordinate of `low` in the picture.
        end: coordinate of `high`.
    """

    words: str
    label: Callable[[float], str] = _six_digits
    ticks: Callable[[float, float], tuple[float, ...]] = round_ticks
    low: float = 1.0
    high: float = 10.0
    start: float = 0.0
    end: float = 1.0

    def covering(self, values: Sequence[float], start: float, end: float) -> PlotAxis:
        """The axis between two coordinates, from the least of some values to the largest with a margin."""
        margin = max(max(values) / min(values), 1.2) ** 0.08
        return replace(self, low=min(values) / margin, high=max(values) * margin, start=start, end=end)

    def at(self, value: float) -> float:
        """Coordinate of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)


def scatter(
    title: str,
    points: Sequence[Dot],
    x: PlotAxis,
    y: PlotAxis,
    *,
    nothing: str,
    legend: Mapping[str, str] | None = None,
    limits: Sequence[float] = (),
    notes: Sequence[str] = (),
) -> str:
    """A picture of points, later ones above earlier ones; colours follow the viewer's light or dark scheme.

    Args:
        title: above the chart.
        points: the points.
        x: the axis to the right.
        y: the axis upwards.
        nothing: what stands in place of the chart if there are no points.
        legend: meaning by kind of point.
        limits: values of `y` with a dashed line.
        notes: lines below the chart.
    """
    foot = [words for note in notes for words in textwrap.wrap(note, FOOT_LETTERS, break_on_hyphens=False)]
    parts = [text(LEFT, 24, fitted(title, WIDTH - LEFT - 8, TITLE), "title")]
    if points:
        right = x.covering([point.x for point in points], LEFT, RIGHT)
        up = y.covering([*(point.y for point in points), *limits], BOTTOM, TOP)
        parts += [*_legend(legend or {}), *_axes(right, up, limits), *_names(points, right, up)]
        parts += [circle(f"mark {p.kind}", right.at(p.x), up.at(p.y), 5, p.tip) for p in points]
    else:
        parts.append(text(LEFT, TOP + 40, nothing))
    parts += [text(LEFT, BOTTOM + 52 + LINE * i, words, "quiet") for i, words in enumerate(foot)]
    return svg(WIDTH, BOTTOM + 58 + LINE * len(foot), SCATTER_STYLE, parts)


def _legend(legend: Mapping[str, str]) -> list[str]:
    parts, x = [], LEFT + 6
    for kind, meaning in legend.items():
        parts += [circle(f"mark {kind}", x, 42, 5), text(x + 11, 46, meaning, "quiet")]
        x += 36 + LETTER * len(meaning)
    return parts


def _axes(right: PlotAxis, up: PlotAxis, limits: Sequence[float]) -> list[str]:
    """Grid lines with labels, what the axes show, and a line at each limit."""
    parts = []
    for tick in up.ticks(up.low, up.high):
        parts.append(line("grid", LEFT, up.at(tick), RIGHT, up.at(tick)))
        parts.append(text(LEFT - 8, up.at(tick) + 4, up.label(tick), anchor="end"))
    for tick in right.ticks(right.low, right.high):
        parts.append(line("grid", right.at(tick), TOP, right.at(tick), BOTTOM))
        parts.append(text(right.at(tick), BOTTOM + 16, right.label(tick), anchor="middle"))
    parts.append(text(LEFT - 60, TOP - 14, f"{up.words}, logarithmic", "quiet"))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 34, f"{right.words}, logarithmic", "quiet", "middle"))
    for limit in limits:
        parts.append(line("limit", LEFT, up.at(limit), RIGHT, up.at(limit)))
        parts.append(text(LEFT + 6, up.at(limit) - 4, f"limit {up.label(limit)}", "over"))
    return parts


def _names(points: Sequence[Dot], right: PlotAxis, up: PlotAxis) -> list[str]:
    """The names in a column beside the chart, in the order of their points' heights, each with a line to its point."""
    named = sorted((point for point in points if point.name), key=lambda point: -point.y)
    parts, at, step = [], TOP, min(LINE, (BOTTOM - TOP) / max(1, len(named)))
    for number, point in enumerate(named):
        lowest = BOTTOM - step * (len(named) - number - 1)
        at = max(at, min(up.at(point.y), lowest))
        parts.append(line("leader", right.at(point.x), up.at(point.y), RIGHT + 12, at - 4))
        parts.append(text(RIGHT + 16, at, fitted(point.name, WIDTH - RIGHT - 20), point.kind))
        at += step
    return parts

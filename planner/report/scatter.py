"""Scatter pictures as SVG: systems by time and memory, the points of a sweep by throughput and price."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planner.ask.sweeps import SweepRow
from planner.report import svg
from planner.report.answers import sweep_report, swept_names
from planner.report.svg import Scale, round_ticks, time_ticks
from planner.systems import Comparison, Semantics
from planner.units import format_bytes, format_number, format_seconds

STYLE = """
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

NAME_LETTERS, MOST_NAMED = 35, 24
"""Letters of a name that fit beside the chart; points of a sweep up to which all are named."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Point:
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
class Axis:
    """A logarithmic axis: what it shows, how a tick is written, and which ticks lie between two values."""

    words: str
    label: Callable[[float], str] = _six_digits
    ticks: Callable[[float, float], tuple[float, ...]] = round_ticks

    def scale(self, values: Sequence[float], start: float, end: float) -> Scale:
        """A scale that covers some values with a margin."""
        margin = max(max(values) / min(values), 1.2) ** 0.08
        low, high = min(values) / margin, max(values) * margin
        return Scale(low, high, start, end, self.ticks(low, high))


def scatter(
    title: str,
    points: Sequence[Point],
    x: Axis,
    y: Axis,
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
    foot = [line for note in notes for line in textwrap.wrap(note, FOOT_LETTERS, break_on_hyphens=False)]
    parts = [svg.text(LEFT, 24, title, "title")]
    if points:
        right = x.scale([point.x for point in points], LEFT, RIGHT)
        up = y.scale([*(point.y for point in points), *limits], BOTTOM, TOP)
        parts += [*_legend(legend or {}), *_axes(right, up, x, y, limits), *_names(points, right, up)]
        parts += [svg.circle(f"mark {p.kind}", right.at(p.x), up.at(p.y), 5, p.tip) for p in points]
    else:
        parts.append(svg.text(LEFT, TOP + 40, nothing))
    parts += [svg.text(LEFT, BOTTOM + 52 + LINE * i, line, "quiet") for i, line in enumerate(foot)]
    return svg.svg(WIDTH, BOTTOM + 58 + LINE * len(foot), STYLE, parts)


def _legend(legend: Mapping[str, str]) -> list[str]:
    parts, x = [], LEFT + 6
    for kind, meaning in legend.items():
        parts += [svg.circle(f"mark {kind}", x, 42, 5), svg.text(x + 11, 46, meaning, "quiet")]
        x += 36 + LETTER * len(meaning)
    return parts


def _axes(right: Scale, up: Scale, x: Axis, y: Axis, limits: Sequence[float]) -> list[str]:
    """Grid lines with labels, what the axes show, and a line at each limit."""
    parts = [
        *svg.horizontal_lines(right, up, y.label),
        *svg.vertical_lines(right, up, x.label, 16),
        svg.text(LEFT - 60, TOP - 14, f"{y.words}, logarithmic", "quiet"),
        svg.text((LEFT + RIGHT) / 2, BOTTOM + 34, f"{x.words}, logarithmic", "quiet", "middle"),
    ]
    for limit in limits:
        parts.append(svg.line("limit", LEFT, up.at(limit), RIGHT, up.at(limit)))
        parts.append(svg.text(LEFT + 6, up.at(limit) - 4, f"limit {y.label(limit)}", "over"))
    return parts


def _names(points: Sequence[Point], right: Scale, up: Scale) -> list[str]:
    """The names in a column beside the chart, in the order of their points' heights, each with a line to its point."""
    named = sorted((point for point in points if point.name), key=lambda point: -point.y)
    parts, at, step = [], TOP, min(LINE, (BOTTOM - TOP) / max(1, len(named)))
    for number, point in enumerate(named):
        lowest = BOTTOM - step * (len(named) - number - 1)
        at = max(at, min(up.at(point.y), lowest))
        parts.append(svg.line("leader", right.at(point.x), up.at(point.y), RIGHT + 12, at - 4))
        parts.append(svg.text(RIGHT + 16, at, point.name, point.kind))
        at += step
    return parts


def comparison_svg(comparison: Comparison) -> str:
    """Iteration time to the right, memory upwards; capacities of devices as dashed lines.

    Filled points are synchronous, hollow ones change the training semantics. Systems that do not fit are named below.
    """
    points, capacities, notes = [], set(), []
    for row in comparison.rows:
        if row.feasible and row.memory is not None:
            held, alters = max(row.memory.total, 1.0), "+" * bool(row.alters)
            tip = f"{row.system}: {format_seconds(row.iteration_s)}, {format_bytes(held)}, {row.plan}"
            kind = "second" if row.semantics is Semantics.ASYNC else "first"
            points.append(Point(row.iteration_s, held / GIB, kind, tip, row.system + alters))
            capacities.add(row.capacity_bytes / GIB)
            notes += [f"+ {row.system}: {row.alters}"] * bool(row.alters)
    failed = ", ".join(row.system for row in comparison.rows if not row.feasible)
    return scatter(
        f"{comparison.model} on {comparison.hardware}, global batch {comparison.global_batch}",
        points,
        Axis("time of an iteration", lambda seconds: format_seconds(seconds).removesuffix(" 0 s"), time_ticks),
        Axis("memory of the fullest device", lambda gib: f"{format_number(gib)} GiB"),
        nothing="no system can train this model on this cluster",
        legend={"first": "synchronous", "second": "changes the training semantics"},
        limits=sorted(capacities),
        notes=[*([f"not possible: {failed}"] if failed else []), *notes],
    )


def sweep_svg(rows: Sequence[SweepRow]) -> str:
    """Throughput of all devices to the right, price (or memory if no price is known) upwards.

    Pareto-optimal points are coloured and named, the others where there are few; each has a tooltip with its values.
    """
    made = [(row, row.headline) for row in sorted(rows, key=lambda row: row.pareto) if row.headline is not None]
    priced = all(line.dollars_per_hour for _, line in made)
    unit, power = ("tokens", 12) if any(line.sequence for _, line in made) else ("samples", 6)
    swept, points = swept_names(rows), []
    for row, line in made:
        values = ", ".join(f"{name} {value}" for name, value in row.point if name in swept)
        named = row.pareto or len(made) <= MOST_NAMED
        shown = textwrap.shorten(values, NAME_LETTERS, placeholder=" ..") if named else ""
        dollars = line.dollars_per_tera_tokens or line.dollars_per_mega_samples
        rate = line.samples_per_s * (line.sequence or 1)
        height, kind = dollars if priced else line.memory_bytes / GIB, ("other", "first")[row.pareto]
        points.append(Point(rate, height, kind, f"{values}: {line}", shown))
    return scatter(
        sweep_report(rows).title,
        points,
        Axis(f"{unit} a second, all devices"),
        Axis(f"dollars for 10^{power} {unit}" if priced else "memory of the fullest device, GiB"),
        nothing="no point has a plan",
        legend={"first": "no other is as good in throughput, price and memory", "other": "another one is"},
    )

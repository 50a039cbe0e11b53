"""Draw a comparison of systems as an SVG: iteration time against the memory of the fullest device."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.report import svg
from planner.report.svg import Scale, horizontal_lines, time_ticks, vertical_lines
from planner.systems import Comparison, Semantics, SystemRow
from planner.units import format_bytes, format_seconds

STYLE = """
.leader { stroke: #999 } .sync { fill: #2563eb; stroke: #2563eb } .async { fill: #fff; stroke: #c2620a }
.mark { stroke-width: 2 } text.sync { stroke: none; fill: #2563eb } text.async { stroke: none; fill: #a8540a }
@media (prefers-color-scheme: dark) {
  .leader { stroke: #777 }
  .sync { fill: #7aa7ff; stroke: #7aa7ff } text.sync { fill: #7aa7ff }
  .async { fill: #16181d; stroke: #f5a04a } text.async { fill: #f5a04a }
}
"""

LETTER, LINE, LABEL_LETTERS, FOOT_LETTERS = 6.8, 14.0, 34, 125
"""Width of a letter and height of a line in picture units; letters per line of a label and of the notes below."""

NEAR, CLOSE = 5.0, 14.0
"""Points nearer than `NEAR` become one; a label farther than `CLOSE` from its point gets a connecting line."""

DIRECTIONS = (0, 8, 4, 12, 2, 14, 6, 10, 1, 15, 7, 9, 3, 13, 5, 11)
"""Angles tried for a label, in sixteenths of a turn, starting at 3 o'clock."""

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960.0, 80.0, 850.0, 90.0, 520.0
"""Width of the picture, and the edges of the chart in it."""


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


@dataclass(frozen=True, slots=True)
class _Chart:
    """Scales of the chart: seconds to the right, bytes upwards."""

    x: Scale
    y: Scale


def _chart(rows: Sequence[SystemRow]) -> _Chart:
    """Scales that cover all rows and the capacities of their devices."""
    times = [row.iteration_s for row in rows] or [1.0]
    span = max(max(times) / min(times), 1.2)
    low, high = min(times) / span**0.05, min(times) * span**1.05
    top = max((max(row.memory.total if row.memory else 0.0, row.capacity_bytes) for row in rows), default=1.0) * 1.04
    step = svg.round_step(top / 5 / 2**30) * 2**30
    sizes = tuple(step * i for i in range(int(top / step) + 1))
    return _Chart(
        Scale(low, high, LEFT, RIGHT, time_ticks(low, high)), Scale(0.0, top, BOTTOM, TOP, sizes, logarithmic=False)
    )


@dataclass(frozen=True, slots=True)
class _Point:
    """A point of the chart, with the rows that share it."""

    x: float
    y: float
    asynchronous: bool
    rows: tuple[SystemRow, ...]

    @property
    def kind(self) -> str:
        return "async" if self.asynchronous else "sync"

    @property
    def lines(self) -> list[str]:
        return textwrap.wrap(", ".join(_named(row) for row in self.rows), LABEL_LETTERS, break_on_hyphens=False)


def _named(row: SystemRow) -> str:
    return row.system + ("+" if row.alters else "")


def comparison_svg(comparison: Comparison) -> str:
    """Iteration time to the right on a logarithmic scale, memory upwards; capacities of devices as dashed lines.

    Filled points are synchronous, hollow ones change the training semantics. Rows at the same place share a point.
    Systems that do not fit are named below the chart. Colours follow the viewer's light or dark scheme.
    """
    rows = [row for row in comparison.rows if row.feasible and row.memory is not None]
    failed = ", ".join(row.system for row in comparison.rows if not row.feasible)
    notes = [f"not possible: {failed}"] * bool(failed) + [f"+ {row.system}: {row.alters}" for row in rows if row.alters]
    foot = [line for note in notes for line in textwrap.wrap(note, FOOT_LETTERS, break_on_hyphens=False)]
    height = BOTTOM + 58 + LINE * len(foot)
    title = f"{comparison.model} on {comparison.hardware}, global batch {comparison.global_batch}"
    parts = [svg.text(LEFT, 24, title, "title")]
    if rows:
        chart = _chart(rows)
        parts += [*_legend(), *_scales(chart, rows), *_points(chart, rows)]
    else:
        parts.append(svg.text(LEFT, TOP + 40, "no system can train this model on this cluster"))
    parts += [svg.text(LEFT, BOTTOM + 52 + LINE * i, line, "quiet") for i, line in enumerate(foot)]
    return svg.svg(WIDTH, height, STYLE, parts)


def _circle(x: float, y: float, kind: str, tip: str = "") -> str:
    return svg.circle(f"mark {kind}", x, y, 5, tip)


def _legend() -> list[str]:
    return [
        _circle(LEFT + 6, 42, "sync"),
        svg.text(LEFT + 17, 46, "synchronous", "quiet"),
        _circle(LEFT + 118, 42, "async"),
        svg.text(LEFT + 129, 46, "changes the training semantics", "quiet"),
        svg.text(LEFT - 60, TOP - 14, "memory of the fullest device", "quiet"),
        svg.text((LEFT + RIGHT) / 2, BOTTOM + 34, "time of an iteration, logarithmic", "quiet", "middle"),
    ]


def _scales(chart: _Chart, rows: Sequence[SystemRow]) -> list[str]:
    """Grid lines with labels, and a line at each capacity."""
    parts = [
        *horizontal_lines(chart.x, chart.y, format_bytes),
        *vertical_lines(chart.x, chart.y, lambda seconds: format_seconds(seconds).removesuffix(" 0 s"), 16),
    ]
    for capacity in sorted({row.capacity_bytes for row in rows}):
        parts.append(svg.line("limit", LEFT, chart.y.at(capacity), RIGHT, chart.y.at(capacity)))
        parts.append(svg.text(RIGHT + 6, chart.y.at(capacity) + 4, f"limit {format_bytes(capacity)}", "over"))
    return parts


def _points(chart: _Chart, rows: Sequence[SystemRow]) -> list[str]:
    """The points, and their labels placed where they cover the least."""
    points = _merged(chart, rows)
    taken: list[Box] = [(p.x - 6, p.y - 6, p.x + 6, p.y + 6) for p in points]
    capacities = {row.capacity_bytes for row in rows}
    limits = [(LEFT, chart.y.at(size) - 1, RIGHT, chart.y.at(size) + 1) for size in capacities]
    labels: list[str] = []
    circles: list[str] = []
    for point in sorted(points, key=lambda p: -sum(len(line) for line in p.lines)):
        box = _label_box(point, taken, limits)
        leader = _leader(point, box)
        taken += [box, *_boxes_along(leader)]
        if leader:
            labels.append(svg.line("leader", *leader))
        for i, line in enumerate(point.lines):
            labels.append(svg.text(box[0] + 2, box[1] + 11 + LINE * i, line, point.kind))
        circles.append(_circle(point.x, point.y, point.kind, "\n".join(_tip(row) for row in point.rows)))
    return [*labels, *circles]


def _leader(point: _Point, box: Box) -> Box | None:
    """Line from the rim of a point to the nearest point of its label; None if they are next to each other."""
    x, y = min(max(point.x, box[0]), box[2]), min(max(point.y, box[1]), box[3])
    away = math.dist((point.x, point.y), (x, y))
    if away <= CLOSE:
        return None
    share = 7 / away
    return point.x + share * (x - point.x), point.y + share * (y - point.y), x, y


def _boxes_along(leader: Box | None) -> list[Box]:
    """Small boxes along a line, without its last eighth, where the label begins."""
    if leader is None:
        return []
    x1, y1, x2, y2 = leader
    points = [(x1 + (x2 - x1) * k / 16, y1 + (y2 - y1) * k / 16) for k in range(15)]
    return [(x - 2, y - 2, x + 2, y + 2) for x, y in points]


def _tip(row: SystemRow) -> str:
    memory = format_bytes(row.memory.total) if row.memory else "-"
    return f"{row.system}: {format_seconds(row.iteration_s)}, {memory}, {row.plan}"


def _merged(chart: _Chart, rows: Sequence[SystemRow]) -> list[_Point]:
    """Points of all rows, fastest first; rows of one kind at nearly the same place share a point."""
    points: list[_Point] = []
    for row in sorted(rows, key=lambda r: (r.iteration_s, r.system)):
        x, y = chart.x.at(row.iteration_s), chart.y.at(row.memory.total if row.memory else 0.0)
        asynchronous = row.semantics is Semantics.ASYNC
        same = (
            i for i, p in enumerate(points) if math.dist((p.x, p.y), (x, y)) < NEAR and p.asynchronous is asynchronous
        )
        at = next(same, -1)
        if at < 0:
            points.append(_Point(x, y, asynchronous, (row,)))
        else:
            points[at] = replace(points[at], rows=(*points[at].rows, row))
    return points


def _label_box(point: _Point, taken: Sequence[Box], limits: Sequence[Box]) -> Box:
    """The box for a label that covers the least area of other things, and is near its point.

    The connecting line may cross limits; covering by the label itself counts ten times.
    """
    width, height = 4 + LETTER * max(len(line) for line in point.lines), LINE * len(point.lines)
    best_box, lowest_cost = None, math.inf
    for box in _candidate_boxes(point, width, height):
        if box[0] < LEFT or box[1] < TOP - 12 or box[2] > WIDTH or box[3] > BOTTOM:
            continue
        leader = _leader(point, box)
        cost = 10 * sum(_overlap(box, other) for other in (*taken, *limits))
        cost += sum(_overlap(piece, other) for piece in _boxes_along(leader) for other in taken)
        cost += math.dist(leader[:2], leader[2:]) if leader else 0.0
        if cost < lowest_cost:
            best_box, lowest_cost = box, cost
        if not cost:
            break
    return best_box or (point.x + 9, point.y - height / 2, point.x + 9 + width, point.y + height / 2)


def _candidate_boxes(point: _Point, width: float, height: float) -> Iterator[Box]:
    """Boxes around a point in all directions, at growing distances."""
    for away in (9, 14, 20, 28, 38, 50, 64, 80, 100, 125, 160, 200, 250):
        for turn in DIRECTIONS:
            dx, dy = math.cos(math.tau * turn / 16), -math.sin(math.tau * turn / 16)
            x = point.x + away * dx - width * (0.0 if dx > 0.3 else 1.0 if dx < -0.3 else 0.5)
            y = point.y + away * dy - height * (0.0 if dy > 0.3 else 1.0 if dy < -0.3 else 0.5)
            yield x, y, x + width, y + height


def _overlap(first: Box, second: Box) -> float:
    """Area that two boxes share."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return width * height if width > 0 and height > 0 else 0.0

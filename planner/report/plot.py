"""A comparison as one self-contained picture: time of an iteration against memory of the fullest device."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.report import svg
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
"""Width of a letter and height of a line in units of the picture; letters of a line of a label and of the foot."""

NEAR, CLOSE = 5.0, 14.0
"""Marks nearer than this are one; names farther than this from their mark are joined to it by a line."""

DIRECTIONS = (0, 8, 4, 12, 2, 14, 6, 10, 1, 15, 7, 9, 3, 13, 5, 11)
"""In which a name is looked for, sixteenths of a turn from the right."""

ROUND = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))
"""Numbers of a decade that stand on a logarithmic scale, fewest first."""

CLOCK = (60, 120, 300, 600, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000)
"""Round times beyond half a minute, seconds."""


Box = tuple[float, float, float, float]


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
    step = svg.round_step(most / 5 / 2**30) * 2**30
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
    step = svg.round_step((high - low) / 5)
    return tuple(float(f"{step * i:.6g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1))


@dataclass(frozen=True, slots=True)
class _Mark:
    """Rows that stand at one place."""

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
    """Time to the right on a logarithmic scale, memory upwards; the limit of each device type as a broken line.

    Filled points are synchronous, hollow ones change the training semantics. Rows that fall together have one point.
    What does not fit stands below by name. Follows the light or dark scheme of the viewer.
    """
    rows = [row for row in comparison.rows if row.feasible and row.memory is not None]
    failed = ", ".join(row.system for row in comparison.rows if not row.feasible)
    told = [f"not possible: {failed}"] * bool(failed) + [f"+ {row.system}: {row.alters}" for row in rows if row.alters]
    foot = [line for words in told for line in textwrap.wrap(words, FOOT_LETTERS, break_on_hyphens=False)]
    axes = axes_of(rows)
    height = axes.bottom + 58 + LINE * len(foot)
    title = f"{comparison.model} on {comparison.hardware}, global batch {comparison.global_batch}"
    parts = [svg.text(axes.left, 24, title, "title")]
    if rows:
        parts += [*_legend(axes), *_scales(axes, rows), *_marks(axes, rows)]
    else:
        parts.append(svg.text(axes.left, axes.top + 40, "no system can train this model on this cluster"))
    parts += [svg.text(axes.left, axes.bottom + 52 + LINE * i, line, "quiet") for i, line in enumerate(foot)]
    return svg.svg(axes.width, height, STYLE, parts)


def _circle(x: float, y: float, kind: str, tip: str = "") -> str:
    return svg.circle(f"mark {kind}", x, y, 5, tip)


def _legend(axes: Axes) -> list[str]:
    return [
        _circle(axes.left + 6, 42, "sync"),
        svg.text(axes.left + 17, 46, "synchronous", "quiet"),
        _circle(axes.left + 118, 42, "async"),
        svg.text(axes.left + 129, 46, "changes the training semantics", "quiet"),
        svg.text(axes.left - 60, axes.top - 14, "memory of the fullest device", "quiet"),
        svg.text(
            (axes.left + axes.right) / 2, axes.bottom + 34, "time of an iteration, logarithmic", "quiet", "middle"
        ),
    ]


def _scales(axes: Axes, rows: Sequence[SystemRow]) -> list[str]:
    parts = []
    for size in axes.byte_ticks:
        parts.append(svg.line("grid", axes.left, axes.y(size), axes.right, axes.y(size)))
        parts.append(svg.text(axes.left - 8, axes.y(size) + 4, format_bytes(size), anchor="end"))
    for seconds in axes.second_ticks:
        parts.append(svg.line("grid", axes.x(seconds), axes.top, axes.x(seconds), axes.bottom))
        label = format_seconds(seconds).removesuffix(" 0 s")
        parts.append(svg.text(axes.x(seconds), axes.bottom + 16, label, anchor="middle"))
    for capacity in sorted({row.capacity_bytes for row in rows}):
        parts.append(svg.line("limit", axes.left, axes.y(capacity), axes.right, axes.y(capacity)))
        parts.append(svg.text(axes.right + 6, axes.y(capacity) + 4, f"limit {format_bytes(capacity)}", "over"))
    return parts


def _marks(axes: Axes, rows: Sequence[SystemRow]) -> list[str]:
    """Points, and their names where nothing else stands."""
    marks = _together(axes, rows)
    taken: list[Box] = [(m.x - 6, m.y - 6, m.x + 6, m.y + 6) for m in marks]
    limits = [(axes.left, axes.y(c) - 1, axes.right, axes.y(c) + 1) for c in {row.capacity_bytes for row in rows}]
    names: list[str] = []
    points: list[str] = []
    for mark in sorted(marks, key=lambda m: -sum(len(line) for line in m.lines)):
        box = _free(axes, mark, taken, limits)
        leader = _leader(mark, box)
        taken += [box, *_along(leader)]
        if leader:
            names.append(svg.line("leader", *leader))
        for i, line in enumerate(mark.lines):
            names.append(svg.text(box[0] + 2, box[1] + 11 + LINE * i, line, mark.kind))
        points.append(_circle(mark.x, mark.y, mark.kind, "\n".join(_tip(row) for row in mark.rows)))
    return [*names, *points]


def _leader(mark: _Mark, box: Box) -> Box | None:
    """From the rim of a mark to the nearest point of its name; None where they stand beside each other."""
    x, y = min(max(mark.x, box[0]), box[2]), min(max(mark.y, box[1]), box[3])
    away = math.dist((mark.x, mark.y), (x, y))
    if away <= CLOSE:
        return None
    share = 7 / away
    return mark.x + share * (x - mark.x), mark.y + share * (y - mark.y), x, y


def _along(leader: Box | None) -> list[Box]:
    """Small boxes on a line, its last eighth left out, where the name begins."""
    if leader is None:
        return []
    x1, y1, x2, y2 = leader
    points = [(x1 + (x2 - x1) * k / 16, y1 + (y2 - y1) * k / 16) for k in range(15)]
    return [(x - 2, y - 2, x + 2, y + 2) for x, y in points]


def _tip(row: SystemRow) -> str:
    memory = format_bytes(row.memory.total) if row.memory else "-"
    return f"{row.system}: {format_seconds(row.iteration_s)}, {memory}, {row.plan}"


def _together(axes: Axes, rows: Sequence[SystemRow]) -> list[_Mark]:
    """Rows by place, fastest first."""
    found: list[_Mark] = []
    for row in sorted(rows, key=lambda r: (r.iteration_s, r.system)):
        x, y = axes.x(row.iteration_s), axes.y(row.memory.total if row.memory else 0.0)
        asynchronous = row.semantics is Semantics.ASYNC
        same = (
            i for i, m in enumerate(found) if math.dist((m.x, m.y), (x, y)) < NEAR and m.asynchronous is asynchronous
        )
        at = next(same, -1)
        if at < 0:
            found.append(_Mark(x, y, asynchronous, (row,)))
        else:
            found[at] = replace(found[at], rows=(*found[at].rows, row))
    return found


def _free(axes: Axes, mark: _Mark, taken: Sequence[Box], limits: Sequence[Box]) -> Box:
    """Where a name covers least, itself rather than the line to its mark, and is near; that line may cross limits."""
    width, height = 4 + LETTER * max(len(line) for line in mark.lines), LINE * len(mark.lines)
    best, least = None, math.inf
    for box in _places(mark, width, height):
        if box[0] < axes.left or box[1] < axes.top - 12 or box[2] > axes.width or box[3] > axes.bottom:
            continue
        leader = _leader(mark, box)
        cost = 10 * sum(_shared(box, other) for other in (*taken, *limits))
        cost += sum(_shared(piece, other) for piece in _along(leader) for other in taken)
        cost += math.dist(leader[:2], leader[2:]) if leader else 0.0
        if cost < least:
            best, least = box, cost
        if not cost:
            break
    return best or (mark.x + 9, mark.y - height / 2, mark.x + 9 + width, mark.y + height / 2)


def _places(mark: _Mark, width: float, height: float) -> Iterator[Box]:
    """Right, left, above, below and between, farther and farther away."""
    for away in (9, 14, 20, 28, 38, 50, 64, 80, 100, 125, 160, 200, 250):
        for turn in DIRECTIONS:
            dx, dy = math.cos(math.tau * turn / 16), -math.sin(math.tau * turn / 16)
            x = mark.x + away * dx - width * (0.0 if dx > 0.3 else 1.0 if dx < -0.3 else 0.5)
            y = mark.y + away * dy - height * (0.0 if dy > 0.3 else 1.0 if dy < -0.3 else 0.5)
            yield x, y, x + width, y + height


def _shared(one: Box, other: Box) -> float:
    """Area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0

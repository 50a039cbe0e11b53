"""A comparison as one self-contained picture: time of an iteration against memory of the fullest device."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from planner.report._plot_axes import Axes, axes_of
from planner.systems.compare import Comparison
from planner.systems.types import Semantics, SystemRow
from planner.units import format_bytes, format_seconds

STYLE = """
text { font: 12px sans-serif; fill: #222 } .title { font-size: 15px } .quiet { fill: #666 }
.page { fill: #fff } .grid { stroke: #ddd } .leader { stroke: #999 } .limit { stroke: #b91c1c; stroke-dasharray: 5 4 }
.over { fill: #b91c1c } .sync { fill: #2563eb; stroke: #2563eb } .async { fill: #fff; stroke: #c2620a }
.mark { stroke-width: 2 } text.sync { stroke: none; fill: #2563eb } text.async { stroke: none; fill: #a8540a }
@media (prefers-color-scheme: dark) {
  text { fill: #ddd } .quiet { fill: #999 } .page { fill: #16181d } .grid { stroke: #333 } .leader { stroke: #777 }
  .limit { stroke: #f87171 } .over { fill: #f87171 }
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

Box = tuple[float, float, float, float]


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
    foot = [line for text in told for line in textwrap.wrap(text, FOOT_LETTERS, break_on_hyphens=False)]
    axes = axes_of(rows)
    height = axes.bottom + 58 + LINE * len(foot)
    title = f"{comparison.model} on {comparison.hardware}, global batch {comparison.global_batch}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {axes.width:.0f} {height:.0f}">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{axes.width:.0f}" height="{height:.0f}"/>',
        _text(axes.left, 24, title, "title"),
    ]
    if rows:
        parts += [*_legend(axes), *_scales(axes, rows), *_marks(axes, rows)]
    else:
        parts.append(_text(axes.left, axes.top + 40, "no system can train this model on this cluster"))
    parts += [_text(axes.left, axes.bottom + 52 + LINE * i, line, "quiet") for i, line in enumerate(foot)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    style = f' class="{style}"' if style else ""
    place = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}{place}>{escape(text)}</text>'


def _circle(x: float, y: float, kind: str, tip: str = "") -> str:
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="5">{inside}</circle>'


def _line(style: str, ends: Box) -> str:
    x1, y1, x2, y2 = ends
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _legend(axes: Axes) -> list[str]:
    return [
        _circle(axes.left + 6, 42, "sync"),
        _text(axes.left + 17, 46, "synchronous", "quiet"),
        _circle(axes.left + 118, 42, "async"),
        _text(axes.left + 129, 46, "changes the training semantics", "quiet"),
        _text(axes.left - 60, axes.top - 14, "memory of the fullest device", "quiet"),
        _text((axes.left + axes.right) / 2, axes.bottom + 34, "time of an iteration, logarithmic", "quiet", "middle"),
    ]


def _scales(axes: Axes, rows: Sequence[SystemRow]) -> list[str]:
    parts = []
    for size in axes.byte_ticks:
        parts.append(_line("grid", (axes.left, axes.y(size), axes.right, axes.y(size))))
        parts.append(_text(axes.left - 8, axes.y(size) + 4, format_bytes(size), anchor="end"))
    for seconds in axes.second_ticks:
        parts.append(_line("grid", (axes.x(seconds), axes.top, axes.x(seconds), axes.bottom)))
        label = format_seconds(seconds).removesuffix(" 0 s")
        parts.append(_text(axes.x(seconds), axes.bottom + 16, label, anchor="middle"))
    for capacity in sorted({row.capacity_bytes for row in rows}):
        parts.append(_line("limit", (axes.left, axes.y(capacity), axes.right, axes.y(capacity))))
        parts.append(_text(axes.right + 6, axes.y(capacity) + 4, f"limit {format_bytes(capacity)}", "over"))
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
            names.append(_line("leader", leader))
        for i, line in enumerate(mark.lines):
            names.append(_text(box[0] + 2, box[1] + 11 + LINE * i, line, mark.kind))
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

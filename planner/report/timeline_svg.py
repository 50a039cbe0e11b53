"""Draw a timeline as a self-contained SVG: a Gantt chart, and below it the memory of each stage over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.play.memory import MemoryCurve
from planner.report import svg
from planner.report.timeline import LOOKS, omissions
from planner.simulate.segments import (
    ACTIVITIES,
    WINDOWS,
    WORK,
    Activity,
    Row,
    Segments,
    fewer_rows,
    rank_ranges,
    rows,
    segments,
    windows,
)
from planner.simulate.timeline import Lane, Timeline, fullest_lanes
from planner.units import format_bytes, format_fraction, format_seconds

COLOURS = {activity: colour for activity, (_, colour) in LOOKS.items()}
STYLE = (
    "".join(f".{activity.name.lower()} {{ fill: {colour} }} " for activity, colour in COLOURS.items())
    + """
.edge { stroke: #fff; stroke-width: .6 } .number { font-size: 10px; fill: #fff } .strong { font-weight: 600 }
.axis { stroke: #8a8f98 } .held { fill: #4477aa; stroke: #4477aa; fill-opacity: .25 }
.beyond { fill: #cc3311; stroke: #cc3311; fill-opacity: .25 }
@media (prefers-color-scheme: dark) { .idle { fill: #2a2d33 } .edge { stroke: #16181d } }
"""
)

MOST_ROWS = 64
"""Limit on the rows of a picture; beyond it only one replica of each stage is drawn."""

_LEFT, _RIGHT, _TOP, _GAP = 190, 150, 88, 36
_ROW, _STRIP = 22, 44
_NUMBER_ROOM = 13
_NARROWEST_FORWARD, _CLIPPED_FORWARD = 3.0, 7.0
_THINNEST, _EDGED = 0.2, 4.0


@dataclass(frozen=True, slots=True)
class _TimeScale:
    """Maps seconds to horizontal coordinates, window by window."""

    spans: tuple[tuple[float, float], ...]
    begins: tuple[float, ...]
    per_s: float

    def at(self, window: int, seconds: float) -> float:
        return self.begins[window] + (seconds - self.spans[window][0]) * self.per_s

    def ends(self, window: int) -> float:
        return self.at(window, self.spans[window][1])


def draw_svg(timeline: Timeline, *, width: int = 1280) -> str:
    """Draw a timeline as SVG text.

    Args:
        timeline: the timeline.
        width: width in pixels.

    Every stage has a row; its replicas have rows of their own unless there are more than `MOST_ROWS`. If an iteration
    is too long for a forward to be visible, only its start, its steady state and its end are drawn, with a note.
    O(segments).
    """
    parts = segments(timeline)
    grouped = rows(timeline, parts)
    shown = fewer_rows(grouped, MOST_ROWS)
    room = max(200.0, width - _LEFT - _RIGHT)
    scale = _scale(windows(timeline, int(room / _NARROWEST_FORWARD), int(room / _CLIPPED_FORWARD)), room)
    strips = fullest_lanes(timeline)
    notes = omissions(timeline, scale.spans, grouped, shown)
    memory_top = _TOP + _ROW * len(shown) + 52
    height = memory_top + _STRIP * len(strips) + 16 + 16 * len(notes)
    body = [
        *_header(timeline, parts),
        *(line for at, row in enumerate(shown) for line in _gantt_row(timeline, row, parts, scale, _TOP + at * _ROW)),
        *_axis(scale, _TOP, memory_top - 48),
        svg.text(_LEFT - 12, memory_top - 12, "memory of one device", "strong", "end"),
        *(line for at, lane in enumerate(strips) for line in _memory_strip(lane, scale, memory_top + at * _STRIP)),
        *(svg.text(_LEFT, height - 8 - 16 * at, note, "quiet") for at, note in enumerate(reversed(notes))),
    ]
    return svg.svg(width, height, STYLE, body)


def _scale(spans: tuple[tuple[float, float], ...], room: float) -> _TimeScale:
    total = sum(end - begin for begin, end in spans)
    per_s = (room - _GAP * (len(spans) - 1)) / total if total > 0 else 1.0
    begins, x = [], float(_LEFT)
    for begin, end in spans:
        begins.append(x)
        x += (end - begin) * per_s + _GAP
    return _TimeScale(spans, tuple(begins), per_s)


def _header(timeline: Timeline, parts: Segments) -> list[str]:
    title = f"{timeline.name}: {timeline.schedule}, {timeline.micro_batches} micro-batches"
    copies = f", {timeline.copies} copies (one shown)" if timeline.copies > 1 else ""
    facts = (
        f"step {format_seconds(timeline.step_s)}, {timeline.samples_per_s:.4g} samples/s, "
        f"bubble {format_fraction(timeline.bubble_fraction)} of device time, {timeline.transfers} transfers"
    )
    lines = [svg.text(16, 24, title + copies, "title strong"), svg.text(16, 42, facts, "quiet")]
    x = 16.0
    used = [ACTIVITIES[code] for code in np.unique(parts.activity)]
    for activity in [*used, Activity.IDLE]:
        lines.append(svg.rect(_class(activity), x, 52, 12, 12))
        lines.append(svg.text(x + 17, 62, activity.value))
        x += 17 + 6.6 * len(activity.value) + 18
    return lines


def _gantt_row(timeline: Timeline, row: Row, parts: Segments, scale: _TimeScale, y: float) -> list[str]:
    lines = [svg.text(_LEFT - 12, y + 14, row.label, anchor="end")]
    mine = parts.of(row.lanes[0].worker)
    program = timeline.trace.program
    for window, (begin, end) in enumerate(scale.spans):
        left = scale.begins[window]
        lines.append(svg.rect(_class(Activity.IDLE), left, y, scale.ends(window) - left, _ROW - 4))
        inside = mine.pick(np.flatnonzero((mine.end_s > begin) & (mine.begin_s < end)))
        for at in range(len(inside.worker)):
            x0 = scale.at(window, max(float(inside.begin_s[at]), begin))
            x1 = scale.at(window, min(float(inside.end_s[at]), end))
            if x1 - x0 < _THINNEST:
                continue
            activity = ACTIVITIES[inside.activity[at]]
            edge = " edge" if x1 - x0 > _EDGED else ""
            lines.append(svg.rect(_class(activity) + edge, x0, y, x1 - x0, _ROW - 4))
            if activity in WORK and x1 - x0 >= _NUMBER_ROOM:
                number = str(int(program.micro_batch[inside.action[at]]))
                if x1 - x0 >= 7 * len(number):
                    lines.append(svg.text((x0 + x1) / 2, y + 13, number, "number", "middle"))
    return lines


def _axis(scale: _TimeScale, top: float, bottom: float) -> list[str]:
    lines = []
    for window, (begin, end) in enumerate(scale.spans):
        left, right = scale.begins[window], scale.ends(window)
        lines.append(svg.line("axis", left, bottom, right, bottom))
        step = svg.round_step((end - begin) / max(1.0, (right - left) / 110))
        for count in range(int(np.ceil(begin / step - 1e-9)), int(np.floor(end / step + 1e-9)) + 1):
            x = scale.at(window, count * step)
            lines.append(svg.line("axis", x, bottom, x, bottom + 4))
            lines.append(svg.text(x, bottom + 17, format_seconds(count * step), "quiet", "middle"))
        if len(scale.spans) > 1:
            lines.append(svg.text(left, top - 5, WINDOWS[window], "quiet"))
        if window:
            lines.append(svg.text(left - _GAP / 2, (top + bottom) / 2 + 4, "···", "title quiet", "middle"))
    return lines


def _memory_strip(lane: Lane, scale: _TimeScale, y: float) -> list[str]:
    base, tall = y + _STRIP - 8, _STRIP - 12
    top = max(float(lane.capacity_bytes), lane.memory.peak_bytes)
    limit = base - tall * lane.capacity_bytes / top
    lines = [svg.text(_LEFT - 12, y + 22, f"stage {rank_ranges(lane.stages)}", anchor="end")]
    for window in range(len(scale.spans)):
        left, right = scale.begins[window], scale.ends(window)
        corners = [(x, base - tall * held / top) for x, held in _outline(lane.memory, scale, window)]
        lines.append(svg.polygon("held" if lane.fits else "beyond", [(left, base), *corners, (right, base)]))
        lines.append(svg.line("limit", left, limit, right, limit))
    words = f"{format_bytes(lane.memory.peak_bytes)} of {format_bytes(lane.capacity_bytes)}"
    lines.append(svg.text(scale.ends(len(scale.spans) - 1) + 8, y + 22, words, "" if lane.fits else "over"))
    return lines


def _outline(curve: MemoryCurve, scale: _TimeScale, window: int) -> list[tuple[float, float]]:
    """Corners of the memory curve inside a window."""
    begin, end = scale.spans[window]
    first = int(np.searchsorted(curve.time_s, begin, side="right")) - 1
    last = int(np.searchsorted(curve.time_s, end, side="right"))
    corners: list[tuple[float, float]] = []
    for at in range(max(first, 0), last):
        x = scale.at(window, max(float(curve.time_s[at]), begin))
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, float(curve.held_bytes[at])))
    return [*corners, (scale.at(window, end), corners[-1][1])]


def _class(activity: Activity) -> str:
    return activity.name.lower()

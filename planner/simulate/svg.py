"""The timeline as one self-contained SVG: Gantt on top, memory of each stage over the same time below."""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np

from planner.play.memory import MemoryCurve
from planner.schedules.program import SYNC, UPDATE
from planner.simulate.segments import ACTIVITIES, Activity, Row, Segments, rows, segments, windows
from planner.simulate.timeline import Lane, Timeline, fullest_lanes
from planner.units import format_bytes, format_fraction, format_seconds

COLOURS = {
    Activity.FORWARD: "#4477aa",
    Activity.RECOMPUTE: "#ccbb44",
    Activity.BACKWARD: "#228833",
    Activity.WEIGHT_GRAD: "#66ccee",
    Activity.COMMUNICATION: "#ee8866",
    Activity.SYNC: "#aa3377",
    Activity.UPDATE: "#777777",
    Activity.IDLE: "#f0f1f3",
}
"""Fill of each activity; told apart also by readers who see few colours."""

_INK, _FAINT, _LIMIT = "#222222", "#8a8f98", "#cc3311"
_LEFT, _RIGHT, _TOP, _GAP = 190, 150, 76, 36
_ROW, _STRIP = 22, 44
_NUMBER_ROOM = 13
_NARROWEST_FORWARD, _CLIPPED_FORWARD = 3.0, 7.0
_THINNEST = 0.2


@dataclass(frozen=True, slots=True)
class _Scale:
    """Seconds to horizontal positions, window by window."""

    spans: tuple[tuple[float, float], ...]
    begins: tuple[float, ...]
    per_s: float

    def at(self, window: int, seconds: float) -> float:
        return self.begins[window] + (seconds - self.spans[window][0]) * self.per_s

    def ends(self, window: int) -> float:
        return self.at(window, self.spans[window][1])


def draw_svg(timeline: Timeline, *, width: int = 1280, most_rows: int = 64) -> str:
    """Draw a timeline as SVG text.

    Args:
        timeline: what to draw.
        width: pixels.
        most_rows: rows and memory strips beyond that are left out, with a note.

    Iterations too long for a forward to be seen are drawn as their start and their end, with a note. O(segments).
    """
    parts = segments(timeline.trace, timeline.recompute_s)
    grouped = rows(timeline, parts)
    room = max(200.0, width - _LEFT - _RIGHT)
    scale = _scale(windows(timeline, int(room / _NARROWEST_FORWARD), int(room / _CLIPPED_FORWARD)), room)
    strips = fullest_lanes(timeline)
    notes = _notes(timeline, scale, len(grouped), len(strips), most_rows)
    gantt_top = _TOP
    memory_top = gantt_top + _ROW * min(len(grouped), most_rows) + 52
    height = memory_top + _STRIP * min(len(strips), most_rows) + 16 + 16 * len(notes)
    body = [
        *_header(timeline, parts),
        *(
            line
            for at, row in enumerate(grouped[:most_rows])
            for line in _gantt_row(timeline, row, parts, scale, gantt_top + at * _ROW)
        ),
        *_axis(scale, gantt_top, memory_top - 48),
        _text(_LEFT - 12, memory_top - 12, "memory of one device", anchor="end", weight="600"),
        *(
            line
            for at, lane in enumerate(strips[:most_rows])
            for line in _memory_strip(lane, scale, memory_top + at * _STRIP)
        ),
        *(_text(_LEFT, height - 8 - 16 * at, note, colour=_FAINT) for at, note in enumerate(reversed(notes))),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#ffffff"/>', *body, "</svg>", ""])


def _scale(spans: tuple[tuple[float, float], ...], room: float) -> _Scale:
    total = sum(end - begin for begin, end in spans)
    per_s = (room - _GAP * (len(spans) - 1)) / total if total > 0 else 1.0
    begins, x = [], float(_LEFT)
    for begin, end in spans:
        begins.append(x)
        x += (end - begin) * per_s + _GAP
    return _Scale(spans, tuple(begins), per_s)


def _header(timeline: Timeline, parts: Segments) -> list[str]:
    title = f"{timeline.name}: {timeline.schedule}, {timeline.micro_batches} micro-batches"
    copies = f", {timeline.copies} copies (one shown)" if timeline.copies > 1 else ""
    facts = (
        f"step {format_seconds(timeline.step_s)}, {timeline.samples_per_s:.4g} samples/s, "
        f"bubble {format_fraction(timeline.bubble_fraction)} of device time, {timeline.transfers} transfers"
    )
    lines = [_text(16, 24, title + copies, size=15, weight="600"), _text(16, 42, facts, colour="#555555")]
    x = 16.0
    used = [ACTIVITIES[code] for code in np.unique(parts.activity)]
    for activity in [*used, Activity.IDLE]:
        lines.append(_rect(x, 52, 12, 12, COLOURS[activity]))
        lines.append(_text(x + 17, 62, activity.value))
        x += 17 + 6.6 * len(activity.value) + 18
    return lines


def _gantt_row(timeline: Timeline, row: Row, parts: Segments, scale: _Scale, y: float) -> list[str]:
    lines = [_text(_LEFT - 12, y + 14, row.label, anchor="end")]
    mine = parts.of(row.lanes[0].worker)
    program = timeline.trace.program
    for window, (begin, end) in enumerate(scale.spans):
        left = scale.begins[window]
        lines.append(_rect(left, y, scale.ends(window) - left, _ROW - 4, COLOURS[Activity.IDLE]))
        inside = mine.pick(np.flatnonzero((mine.end_s > begin) & (mine.begin_s < end)))
        for at in range(len(inside.worker)):
            x0 = scale.at(window, max(float(inside.begin_s[at]), begin))
            x1 = scale.at(window, min(float(inside.end_s[at]), end))
            if x1 - x0 < _THINNEST:
                continue
            activity, action = ACTIVITIES[inside.activity[at]], int(inside.action[at])
            lines.append(_rect(x0, y, x1 - x0, _ROW - 4, COLOURS[activity], edge=x1 - x0 > 4))
            named = activity is not Activity.COMMUNICATION and program.kind[action] not in (SYNC, UPDATE)
            if named and x1 - x0 >= _NUMBER_ROOM:
                number = str(int(program.micro_batch[action]))
                if x1 - x0 >= 7 * len(number):
                    middle = (x0 + x1) / 2
                    lines.append(_text(middle, y + 13, number, anchor="middle", size=10, colour="#ffffff"))
    return lines


def _axis(scale: _Scale, top: float, bottom: float) -> list[str]:
    lines = []
    for window, (begin, end) in enumerate(scale.spans):
        left, right = scale.begins[window], scale.ends(window)
        lines.append(_line(left, bottom, right, bottom, _FAINT))
        step = _nice((end - begin) / max(1.0, (right - left) / 110))
        for count in range(int(np.ceil(begin / step - 1e-9)), int(np.floor(end / step + 1e-9)) + 1):
            x = scale.at(window, count * step)
            lines.append(_line(x, bottom, x, bottom + 4, _FAINT))
            lines.append(_text(x, bottom + 17, format_seconds(count * step), anchor="middle", colour="#555555"))
        if window:
            lines.append(_text(left - _GAP / 2, (top + bottom) / 2 + 4, "···", anchor="middle", colour=_FAINT, size=16))
    return lines


def _nice(step: float) -> float:
    """The next of 1, 2, 5, 10, ... at or above."""
    if step <= 0:
        return 1.0
    base = 10.0 ** np.floor(np.log10(step))
    return float(next(base * m for m in (1, 2, 5, 10) if base * m >= step * (1 - 1e-9)))


def _memory_strip(lane: Lane, scale: _Scale, y: float) -> list[str]:
    base, tall = y + _STRIP - 8, _STRIP - 12
    top = max(float(lane.capacity_bytes), lane.memory.peak_bytes)
    limit = base - tall * lane.capacity_bytes / top
    colour = COLOURS[Activity.FORWARD] if lane.fits else _LIMIT
    lines = [_text(_LEFT - 12, y + 22, "stage " + ",".join(str(s) for s in lane.stages), anchor="end")]
    for window in range(len(scale.spans)):
        left, right = scale.begins[window], scale.ends(window)
        corners = [f"{x:.1f},{base - tall * held / top:.1f}" for x, held in _outline(lane.memory, scale, window)]
        points = f"{left:.1f},{base:.1f} {' '.join(corners)} {right:.1f},{base:.1f}"
        lines.append(f'<polygon points="{points}" fill="{colour}" fill-opacity="0.25" stroke="{colour}"/>')
        lines.append(_line(left, limit, right, limit, _LIMIT, dashed=True))
    words = f"{format_bytes(lane.memory.peak_bytes)} of {format_bytes(lane.capacity_bytes)}"
    lines.append(_text(scale.ends(len(scale.spans) - 1) + 8, y + 22, words, colour=_INK if lane.fits else _LIMIT))
    return lines


def _outline(curve: MemoryCurve, scale: _Scale, window: int) -> list[tuple[float, float]]:
    """Corners of the step function inside a window."""
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


def _notes(timeline: Timeline, scale: _Scale, row_count: int, strip_count: int, most_rows: int) -> list[str]:
    notes = []
    if len(scale.spans) > 1:
        hidden = scale.spans[1][0] - scale.spans[0][1]
        notes.append(f"{format_seconds(hidden)} of {format_seconds(timeline.played_s)} in the middle are not shown")
    for what, count in (("rows", row_count), ("memory strips", strip_count)):
        if count > most_rows:
            notes.append(f"{count - most_rows} of {count} {what} are not shown")
    return notes


def _rect(x: float, y: float, width: float, height: float, fill: str, *, edge: bool = False) -> str:
    stroke = ' stroke="#ffffff" stroke-width="0.6"' if edge else ""
    return f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" fill="{fill}"{stroke}/>'


def _line(x0: float, y0: float, x1: float, y1: float, colour: str, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"{dash}/>'


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "400",
    colour: str = _INK,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{colour}">{escape(words)}</text>'
    )

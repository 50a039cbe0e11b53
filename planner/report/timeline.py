"""Report of a simulated plan (step time, timeline, memory, error of the prediction), and the timeline as SVG.

As text the timeline has a line for each group of equal workers and a character for each cell of time. As a picture it
is a Gantt chart, and below it the memory of each stage over time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from planner.play.memory import MemoryCurve
from planner.report import svg
from planner.report.tables import Cell, Form, Line, Report, Section, Table, table
from planner.simulate.segments import (
    ACTIVITIES,
    WINDOWS,
    WORK,
    Activity,
    Row,
    Segments,
    fewer_rows,
    lanes_label,
    rank_ranges,
    rows,
    segments,
    windows,
)
from planner.simulate.timeline import Lane, Timeline, fullest_lanes
from planner.sums import float_sum
from planner.units import format_bytes, format_fraction, format_number, format_seconds

LOOKS = {
    Activity.FORWARD: ("F", "#4477aa"),
    Activity.RECOMPUTE: ("R", "#ccbb44"),
    Activity.BACKWARD: ("B", "#228833"),
    Activity.WEIGHT_GRAD: ("W", "#66ccee"),
    Activity.INSIDE: ("=", "#ffaabb"),
    Activity.COMMUNICATION: ("-", "#ee8866"),
    Activity.SYNC: ("S", "#aa3377"),
    Activity.UPDATE: ("U", "#777777"),
    Activity.IDLE: ("·", "#f0f1f3"),
}
"""Character and fill colour of each activity; the colours differ with colour vision deficiency, too."""

GAP = " … "
"""Text between the windows of a clipped picture."""

_NARROWEST = 20
_CLIPPED_FORWARD = 2
_IDLE = ACTIVITIES.index(Activity.IDLE)


def timeline_report(timeline: Timeline, *, width: int = 100) -> Report:
    """The timeline with a picture of characters.

    Args:
        timeline: the simulated plan.
        width: characters of a line of the picture.
    """
    copies = f" x {timeline.copies} copies" if timeline.copies > 1 else ""
    title = (
        f"{timeline.name}: {timeline.schedule}, {timeline.micro_batches} micro-batches{copies}, "
        f"{timeline.transfers} transfers"
    )
    sections = (
        Section(lines=tuple(_pace(timeline))),
        Section(drawing=draw_gantt(timeline, width=width)),
        Section(table=_lanes(timeline)),
        _prediction(timeline),
    )
    return Report(title, sections)


def _pace(timeline: Timeline) -> list[str]:
    lines = []
    if timeline.iterations > 1:
        played = f"{timeline.iterations} iterations played"
        lines.append(f"never drains: {played}, the step is the {timeline.cost.value}")
    return [
        *lines,
        f"step {format_seconds(timeline.step_s, 4)}   {format_number(timeline.samples_per_s)} samples/s   "
        f"{_waits(timeline)}",
    ]


def _waits(timeline: Timeline) -> str:
    """The bubble of a pipeline; of one stage, that there is none."""
    if timeline.trace.program.stages > 1:
        return f"bubble {format_fraction(timeline.bubble_fraction)} of device time"
    return "one stage"


def _lanes(timeline: Timeline) -> Table:
    """The table of workers; those with equal figures share a row."""
    columns = {
        "stage": Form.NAME, "ranks": Form.NAME, **dict.fromkeys(("compute", "communication", "idle"), Form.SHARE),
        "in flight": Form.NUMBER, "peak memory": Form.FIGURE, "of": Form.BYTES,
    }  # fmt: skip
    ranks_by_figures: dict[tuple[Cell, ...], list[int]] = {}
    for lane in timeline.lanes:
        times = (lane.compute_s, lane.communication_s, lane.idle_s)
        shares = (f"{seconds / (timeline.step_s or 1.0):.1%}" for seconds in times)
        peak = format_bytes(lane.memory.peak_bytes) + ("" if lane.fits else " !")
        stages = ",".join(str(stage) for stage in lane.stages)
        figures: tuple[Cell, ...] = (stages, *shares, lane.in_flight, peak, format_bytes(lane.capacity_bytes))
        ranks_by_figures.setdefault(figures, []).extend(lane.ranks)
    rows = ((figures[0], rank_ranges(ranks), *figures[1:]) for figures, ranks in ranks_by_figures.items())
    return table(columns, rows)


def _prediction(timeline: Timeline) -> Section:
    comparison = timeline.comparison
    fits = all(lane.fits for lane in timeline.lanes)
    lines = [] if fits else ["memory exceeds a device where marked with !"]
    if not comparison.effects:
        return Section(lines=(*lines, f"the plan predicts the same: {format_seconds(comparison.predicted_s, 4)}"))
    gap_s = comparison.predicted_s - comparison.simulated_s
    lines.append(
        f"the plan predicts {format_seconds(comparison.predicted_s, 4)}: {format_seconds(abs(gap_s))} "
        f"{'more' if gap_s >= 0 else 'less'} ({format_fraction(abs(comparison.difference))})"
    )
    effects = (
        (f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}", f"{name}: {meaning}")
        for name, seconds, meaning in comparison.effects
    )
    return Section(lines=tuple(lines), table=table({"of it": Form.FIGURE, "by": Form.TEXT}, effects))


def draw_gantt(timeline: Timeline, *, width: int = 100, most_rows: int = 48) -> tuple[Line, ...]:
    """Draw a timeline as lines of characters, each piece with its activity as the style.

    Args:
        timeline: what to draw.
        width: characters of a line, label included; at least 20 are used for the time.
        most_rows: limit on the rows. Beyond it one replica of each stage is drawn, and further stages are left out,
            with a note.

    Returns:
        A line for each row in order of stage and rank, the axis, the legend, and notes on what is left out.

    A cell shows the activity that fills most of it, or waiting if that fills more than half. If an iteration is too
    long for a forward to fill a cell, only its start, its steady state and its end are drawn.
    O(segments + rows * width).
    """
    parts = segments(timeline)
    grouped = rows(timeline, parts)
    shown = fewer_rows(grouped, most_rows)[:most_rows]
    label_width = max(len(lanes_label(row)) for row in shown)
    room = max(_NARROWEST, width - label_width - 1)
    spans = windows(timeline, room, room // _CLIPPED_FORWARD)
    counts = _share(room, spans)
    drawn = [
        ((f"{lanes_label(row):<{label_width}} ", ""), *_pieces(parts.of(row[0].worker), spans, counts)) for row in shown
    ]
    used = [activity for activity in ACTIVITIES if any(style == activity for line in drawn for _, style in line)]
    legend = (piece for activity in used for piece in ((LOOKS[activity][0], activity), (f" {activity}  ", "")))
    notes = (((note, ""),) for note in omissions(timeline, spans, grouped, shown))
    return (*drawn, ((f"{'':<{label_width}} {_axis(spans, counts)}", ""),), tuple(legend), *notes)


def omissions(
    timeline: Timeline, spans: Sequence[tuple[float, float]], grouped: Sequence[Row], shown: Sequence[Row]
) -> tuple[str, ...]:
    """What a picture of some windows and rows leaves out, a sentence each."""
    notes = []
    if len(spans) > 1:
        hidden_s = timeline.played_s - float_sum(end - begin for begin, end in spans)
        times = f"{format_seconds(hidden_s)} of {format_seconds(timeline.played_s)}"
        notes.append(f"{times} between start, steady state and end are not shown")
    if len(grouped) > len(shown):
        stages = {row[0].stages for row in grouped} - {row[0].stages for row in shown}
        why = "" if stages else ": replicas of the same stages, at other times"
        notes.append(f"{len(grouped) - len(shown)} of {len(grouped)} rows are not shown{why}")
    return tuple(notes)


def _share(room: int, spans: tuple[tuple[float, float], ...]) -> list[int]:
    """Number of cells of each window, in proportion to its length; the first window has the remainder."""
    room -= len(GAP) * (len(spans) - 1)
    total = float_sum(end - begin for begin, end in spans)
    others = [max(1, round(room * (end - begin) / total)) for begin, end in spans[1:]]
    return [max(1, room - sum(others)), *others]


def busiest(mine: Segments, edges: np.ndarray) -> np.ndarray:
    """Codes of the activity that fills most of each cell between two edges; waiting if that fills more than half."""
    filled = np.zeros((len(ACTIVITIES), len(edges) - 1))
    for code in np.unique(mine.activity):
        of_activity = mine.activity == code
        filled[code] = np.diff(_elapsed(mine.begin_s[of_activity], mine.end_s[of_activity], edges))
    return np.where(filled.sum(axis=0) < np.diff(edges) / 2, _IDLE, filled.argmax(axis=0))


def _elapsed(begin_s: np.ndarray, end_s: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Seconds inside ascending, disjoint intervals before each edge."""
    length = end_s - begin_s
    before = np.concatenate([[0.0], np.cumsum(length)])
    at = np.searchsorted(begin_s, edges, side="right")
    last = np.maximum(at - 1, 0)
    return np.asarray(np.where(at > 0, before[last] + np.minimum(edges - begin_s[last], length[last]), 0.0))


def _axis(spans: tuple[tuple[float, float], ...], counts: list[int]) -> str:
    """The line of start and end times below the windows."""
    words = []
    for (begin, end), count in zip(spans, counts, strict=True):
        left, right = format_seconds(begin), format_seconds(end)
        words.append(f"{left}{right:>{max(1, count - len(left))}}"[-count:])
    return (" " * len(GAP)).join(words)


def _pieces(
    mine: Segments, spans: Sequence[tuple[float, float]], counts: Sequence[int]
) -> Iterator[tuple[str, Activity | str]]:
    """The cells of a row: runs with the same activity, window by window."""
    for window, (span, count) in enumerate(zip(spans, counts, strict=True)):
        if window:
            yield GAP, ""
        for code, run in groupby(busiest(mine, np.linspace(*span, count + 1)).tolist()):
            yield LOOKS[ACTIVITIES[code]][0] * len(list(run)), ACTIVITIES[code]


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
_MARGIN, _BESIDE = 16, 12
"""Pixels at the edges of the picture, and between labels and chart."""
_ROW, _STRIP = 22, 44
_NUMBER_ROOM = 13
_NARROWEST_WIDTH, _CLIPPED_WIDTH = 3.0, 7.0
_THINNEST, _EDGED = 0.2, 4.0


@dataclass(frozen=True, slots=True)
class _TimeScale:
    """Maps seconds to horizontal coordinates, window by window."""

    spans: tuple[tuple[float, float], ...]
    begins: tuple[float, ...]
    per_s: float

    @property
    def labels(self) -> float:
        """Coordinate at which the labels of rows end."""
        return self.begins[0] - _BESIDE

    def at(self, window: int, seconds: float) -> float:
        return self.begins[window] + (seconds - self.spans[window][0]) * self.per_s

    def ends(self, window: int) -> float:
        return self.at(window, self.spans[window][1])


def draw_svg(timeline: Timeline, *, width: int = 1280) -> str:
    """Draw a timeline as SVG text.

    Args:
        timeline: the timeline.
        width: width in pixels; the picture is wider where labels leave the chart less than 200.

    Every stage has a row; its replicas have rows of their own unless there are more than `MOST_ROWS`. If an iteration
    is too long for a forward to be visible, only its start, its steady state and its end are drawn, with a note.
    O(segments).
    """
    parts = segments(timeline)
    grouped = rows(timeline, parts)
    shown = fewer_rows(grouped, MOST_ROWS)
    strips = fullest_lanes(timeline)
    labels = [*map(lanes_label, shown), *map(_strip_label, strips)]
    left = max(_LEFT, _MARGIN + _BESIDE + max(map(svg.text_width, labels)))
    right = max(_RIGHT, _MARGIN + max(svg.text_width(_held_words(lane)) for lane in strips))
    room = max(200.0, width - left - right)
    scale = _scale(windows(timeline, int(room / _NARROWEST_WIDTH), int(room / _CLIPPED_WIDTH)), left, room)
    full_width = left + room + right
    notes = omissions(timeline, scale.spans, grouped, shown)
    memory_top = _TOP + _ROW * len(shown) + 52
    height = memory_top + _STRIP * len(strips) + 16 + 16 * len(notes)
    body = [
        *_header(timeline, parts, full_width - 2 * _MARGIN),
        *(line for at, row in enumerate(shown) for line in _gantt_row(timeline, row, parts, scale, _TOP + at * _ROW)),
        *_time_axis(scale, _TOP, memory_top - 48),
        svg.text(scale.labels, memory_top - 12, "memory of one device", "strong", "end"),
        *(line for at, lane in enumerate(strips) for line in _memory_strip(lane, scale, memory_top + at * _STRIP)),
        *(svg.text(left, height - 8 - 16 * at, note, "quiet") for at, note in enumerate(reversed(notes))),
    ]
    return svg.svg(full_width, height, STYLE, body)


def _scale(spans: tuple[tuple[float, float], ...], left: float, room: float) -> _TimeScale:
    total = float_sum(end - begin for begin, end in spans)
    per_s = (room - _GAP * (len(spans) - 1)) / total if total > 0 else 1.0
    begins, x = [], left
    for begin, end in spans:
        begins.append(x)
        x += (end - begin) * per_s + _GAP
    return _TimeScale(spans, tuple(begins), per_s)


def _header(timeline: Timeline, parts: Segments, room: float) -> list[str]:
    title = f"{timeline.name}: {timeline.schedule}, {timeline.micro_batches} micro-batches"
    copies = f", {timeline.copies} copies (one shown)" if timeline.copies > 1 else ""
    facts = (
        f"step {format_seconds(timeline.step_s)}, {timeline.samples_per_s:.4g} samples/s, "
        f"{_waits(timeline)}, {timeline.transfers} transfers"
    )
    title = svg.fitted(title + copies, room, svg.TITLE)
    lines = [svg.text(_MARGIN, 24, title, "title strong"), svg.text(_MARGIN, 42, facts, "quiet")]
    x = float(_MARGIN)
    used = [ACTIVITIES[code] for code in np.unique(parts.activity)]
    for activity in [*used, Activity.IDLE]:
        lines.append(svg.rect(_class(activity), x, 52, 12, 12))
        lines.append(svg.text(x + 17, 62, activity.value))
        x += 17 + 6.6 * len(activity.value) + 18
    return lines


def _gantt_row(timeline: Timeline, row: Row, parts: Segments, scale: _TimeScale, y: float) -> list[str]:
    lines = [svg.text(scale.labels, y + 14, lanes_label(row), anchor="end")]
    mine = parts.of(row[0].worker)
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


def _time_axis(scale: _TimeScale, top: float, bottom: float) -> list[str]:
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
    lines = [svg.text(scale.labels, y + 22, _strip_label(lane), anchor="end")]
    for window in range(len(scale.spans)):
        left, right = scale.begins[window], scale.ends(window)
        corners = [(x, base - tall * held / top) for x, held in _outline(lane.memory, scale, window)]
        lines.append(svg.polygon("held" if lane.fits else "beyond", [(left, base), *corners, (right, base)]))
        lines.append(svg.line("limit", left, limit, right, limit))
    style = "" if lane.fits else "over"
    lines.append(svg.text(scale.ends(len(scale.spans) - 1) + 8, y + 22, _held_words(lane), style))
    return lines


def _strip_label(lane: Lane) -> str:
    return f"stage {rank_ranges(lane.stages)}"


def _held_words(lane: Lane) -> str:
    return f"{format_bytes(lane.memory.peak_bytes)} of {format_bytes(lane.capacity_bytes)}"


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

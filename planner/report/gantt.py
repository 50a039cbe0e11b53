"""The timeline as characters: one line for each group of alike workers, one character a cell of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from planner.report.tables import Line
from planner.simulate.segments import ACTIVITIES, Activity, Segments, rows, segments, windows
from planner.simulate.timeline import Timeline
from planner.units import format_seconds

SYMBOLS = {
    Activity.FORWARD: "F",
    Activity.RECOMPUTE: "R",
    Activity.BACKWARD: "B",
    Activity.WEIGHT_GRAD: "W",
    Activity.COMMUNICATION: "-",
    Activity.SYNC: "S",
    Activity.UPDATE: "U",
    Activity.IDLE: "·",
}
"""The character of each activity."""

GAP = " … "
"""Stands between the start and the end of a clipped picture."""

_NARROWEST = 20
_CLIPPED_FORWARD = 2
_IDLE = ACTIVITIES.index(Activity.IDLE)


@dataclass(frozen=True, slots=True)
class GanttRow:
    """One line: its label and the activity of each cell, by window."""

    label: str
    cells: tuple[tuple[Activity, ...], ...]


@dataclass(frozen=True, slots=True)
class Gantt:
    """A picture of characters, free of colour.

    Attributes:
        rows: in order of stage and rank.
        axis: times below the cells.
        legend: activities that occur.
        notes: what is not shown.
    """

    rows: tuple[GanttRow, ...]
    axis: str
    legend: tuple[Activity, ...]
    notes: tuple[str, ...]

    @property
    def label_width(self) -> int:
        """Characters of the longest label."""
        return max((len(row.label) for row in self.rows), default=0)

    def lines(self) -> tuple[Line, ...]:
        """The picture as lines, each piece with the activity as its style."""
        width = self.label_width
        drawn = [((f"{row.label:<{width}} ", ""), *_pieces(row)) for row in self.rows]
        legend = [
            piece for activity in self.legend for piece in ((SYMBOLS[activity], activity), (f" {activity}  ", ""))
        ]
        notes = (((note, ""),) for note in self.notes)
        return (*drawn, ((f"{'':<{width}} {self.axis}", ""),), tuple(legend), *notes)


def draw_gantt(timeline: Timeline, *, width: int = 100, most_rows: int = 48) -> Gantt:
    """Draw a timeline.

    Args:
        timeline: what to draw.
        width: characters of a line, label included; at least 20 are used for the time.
        most_rows: rows beyond that are left out, with a note.

    A cell shows the activity that fills most of it, or waiting when that fills more than half. Iterations too long
    for a forward to get a cell are drawn as their start and their end. O(segments + rows * width).
    """
    parts = segments(timeline.trace, timeline.recompute_s)
    grouped = rows(timeline, parts)
    shown = grouped[:most_rows]
    room = max(_NARROWEST, width - max(len(row.label) for row in shown) - 1)
    spans = windows(timeline, room, room // _CLIPPED_FORWARD)
    counts = _share(room, spans)
    drawn = tuple(
        GanttRow(
            row.label, tuple(_cells(parts.of(row.lanes[0].worker), s, n) for s, n in zip(spans, counts, strict=True))
        )
        for row in shown
    )
    notes = []
    if len(spans) > 1:
        hidden = spans[1][0] - spans[0][1]
        notes.append(f"{format_seconds(hidden)} of {format_seconds(timeline.played_s)} in the middle are not shown")
    if len(grouped) > len(shown):
        notes.append(f"{len(grouped) - len(shown)} of {len(grouped)} rows are not shown")
    used = {activity for row in drawn for cells in row.cells for activity in cells}
    return Gantt(drawn, _axis(spans, counts), tuple(a for a in ACTIVITIES if a in used), tuple(notes))


def _share(room: int, spans: tuple[tuple[float, float], ...]) -> list[int]:
    """Cells of each window, in proportion to its length."""
    room -= len(GAP) * (len(spans) - 1)
    total = sum(end - begin for begin, end in spans)
    first = max(1, round(room * (spans[0][1] - spans[0][0]) / total)) if total > 0 else room
    return [room] if len(spans) == 1 else [first, max(1, room - first)]


def _cells(mine: Segments, span: tuple[float, float], count: int) -> tuple[Activity, ...]:
    """The activity of each of `count` equal cells of a window."""
    edges = np.linspace(span[0], span[1], count + 1)
    filled = np.zeros((len(ACTIVITIES), count))
    for code in np.unique(mine.activity):
        chosen = mine.activity == code
        filled[code] = np.diff(_elapsed(mine.begin_s[chosen], mine.end_s[chosen], edges))
    cell = (span[1] - span[0]) / count
    filled[_IDLE] = 0.0
    busiest = filled.argmax(axis=0)
    codes = np.where(filled.sum(axis=0) < cell / 2, _IDLE, busiest)
    return tuple(ACTIVITIES[code] for code in codes)


def _elapsed(begin_s: np.ndarray, end_s: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Time spent inside ascending, disjoint stretches before each edge."""
    length = end_s - begin_s
    before = np.concatenate([[0.0], np.cumsum(length)])
    at = np.searchsorted(begin_s, edges, side="right")
    last = np.maximum(at - 1, 0)
    return np.asarray(np.where(at > 0, before[last] + np.minimum(edges - begin_s[last], length[last]), 0.0))


def _axis(spans: tuple[tuple[float, float], ...], counts: list[int]) -> str:
    """Start and end of each window, written below it."""
    words = []
    for (begin, end), count in zip(spans, counts, strict=True):
        left, right = format_seconds(begin), format_seconds(end)
        words.append(f"{left}{right:>{max(1, count - len(left))}}"[-count:])
    return (" " * len(GAP)).join(words)


def _pieces(row: GanttRow) -> Iterator[tuple[str, str]]:
    """The cells of a line, neighbours of one activity together."""
    for window, cells in enumerate(row.cells):
        if window:
            yield GAP, ""
        for activity, run in groupby(cells):
            yield SYMBOLS[activity] * len(list(run)), activity

"""Draw a timeline as text: a line for each group of equal workers, a character for each cell of time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from planner.report.tables import Line
from planner.simulate.segments import ACTIVITIES, Activity, Row, Segments, fewer_rows, rows, segments, windows
from planner.simulate.timeline import Timeline
from planner.units import format_seconds

SYMBOLS = {
    Activity.FORWARD: "F",
    Activity.RECOMPUTE: "R",
    Activity.BACKWARD: "B",
    Activity.WEIGHT_GRAD: "W",
    Activity.INSIDE: "=",
    Activity.COMMUNICATION: "-",
    Activity.SYNC: "S",
    Activity.UPDATE: "U",
    Activity.IDLE: "·",
}
"""The character of each activity."""

GAP = " … "
"""Text between the windows of a clipped picture."""

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
    """A timeline as text without colours.

    Attributes:
        rows: in order of stage and rank.
        axis: times below the cells.
        legend: activities that occur.
        notes: what the picture leaves out.
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
        most_rows: limit on the rows. Beyond it one replica of each stage is drawn, and further stages are left out,
            with a note.

    A cell shows the activity that fills most of it, or waiting if that fills more than half. If an iteration is too
    long for a forward to fill a cell, only its start, its steady state and its end are drawn.
    O(segments + rows * width).
    """
    parts = segments(timeline)
    grouped = rows(timeline, parts)
    shown = fewer_rows(grouped, most_rows)[:most_rows]
    room = max(_NARROWEST, width - max(len(row.label) for row in shown) - 1)
    spans = windows(timeline, room, room // _CLIPPED_FORWARD)
    counts = _share(room, spans)
    drawn = tuple(GanttRow(row.label, _cells(parts.of(row.lanes[0].worker), spans, counts)) for row in shown)
    used = {activity for row in drawn for cells in row.cells for activity in cells}
    legend = tuple(activity for activity in ACTIVITIES if activity in used)
    return Gantt(drawn, _axis(spans, counts), legend, omissions(timeline, spans, grouped, shown))


def omissions(
    timeline: Timeline, spans: Sequence[tuple[float, float]], grouped: Sequence[Row], shown: Sequence[Row]
) -> tuple[str, ...]:
    """What a picture of some windows and rows leaves out, a sentence each."""
    notes = []
    if len(spans) > 1:
        hidden_s = timeline.played_s - sum(end - begin for begin, end in spans)
        times = f"{format_seconds(hidden_s)} of {format_seconds(timeline.played_s)}"
        notes.append(f"{times} between start, steady state and end are not shown")
    if len(grouped) > len(shown):
        stages = {row.lanes[0].stages for row in grouped} - {row.lanes[0].stages for row in shown}
        why = "" if stages else ": replicas of the same stages, at other times"
        notes.append(f"{len(grouped) - len(shown)} of {len(grouped)} rows are not shown{why}")
    return tuple(notes)


def _share(room: int, spans: tuple[tuple[float, float], ...]) -> list[int]:
    """Number of cells of each window, in proportion to its length; the first window has the remainder."""
    room -= len(GAP) * (len(spans) - 1)
    total = sum(end - begin for begin, end in spans)
    others = [max(1, round(room * (end - begin) / total)) for begin, end in spans[1:]]
    return [max(1, room - sum(others)), *others]


def _cells(
    mine: Segments, spans: Sequence[tuple[float, float]], counts: Sequence[int]
) -> tuple[tuple[Activity, ...], ...]:
    """By window, the activity of each of its equal cells."""
    return tuple(
        tuple(ACTIVITIES[code] for code in busiest(mine, np.linspace(*span, count + 1)))
        for span, count in zip(spans, counts, strict=True)
    )


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


def _pieces(row: GanttRow) -> Iterator[tuple[str, str]]:
    """The pieces of a line: runs of cells with the same activity."""
    for window, cells in enumerate(row.cells):
        if window:
            yield GAP, ""
        for activity, run in groupby(cells):
            yield SYMBOLS[activity] * len(list(run)), activity

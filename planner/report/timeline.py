"""Report of a simulated plan: step time, timeline, memory by worker, error of the plan's prediction.

The timeline is drawn as text: a line for each group of equal workers, a character for each cell of time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from planner.report.tables import Cell, Form, Line, Report, Section, Table, table
from planner.simulate.segments import (
    ACTIVITIES,
    Activity,
    Row,
    Segments,
    fewer_rows,
    rank_ranges,
    rows,
    segments,
    windows,
)
from planner.simulate.timeline import Timeline
from planner.units import format_bytes, format_fraction, format_seconds

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
        Section(drawing=draw_gantt(timeline, width=width).lines()),
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
        f"step {format_seconds(timeline.step_s, 4)}   {timeline.samples_per_s:,.4g} samples/s   "
        f"bubble {format_fraction(timeline.bubble_fraction)} of device time",
    ]


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
        (
            f"{'+' if effect.seconds >= 0 else '-'}{format_seconds(abs(effect.seconds))}",
            f"{effect.name}: {effect.meaning}",
        )
        for effect in comparison.effects
    )
    return Section(lines=tuple(lines), table=table({"of it": Form.FIGURE, "by": Form.TEXT}, effects))


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
            piece for activity in self.legend for piece in ((LOOKS[activity][0], activity), (f" {activity}  ", ""))
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
            yield LOOKS[activity][0] * len(list(run)), activity

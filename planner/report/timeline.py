"""Report of a simulated plan: step time, timeline, memory by worker, error of the plan's prediction."""

from __future__ import annotations

from planner.report.gantt import draw_gantt
from planner.report.tables import Cell, Form, Report, Section, Table, table
from planner.simulate import Timeline, rank_ranges
from planner.units import format_bytes, format_fraction, format_seconds


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

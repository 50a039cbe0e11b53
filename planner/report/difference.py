"""Changes between two plans in words and tables."""

from __future__ import annotations

from collections.abc import Sequence

from planner.plans.diff import Area, Change, Value
from planner.plans.types import Plan
from planner.plans.words import module_ranges
from planner.report.explanation import percent
from planner.report.tables import Form, Report, Section, Table, table
from planner.units import format_bytes, format_seconds, plural

_LONGEST = 60

_HEADINGS = {
    Area.MODEL: "Model",
    Area.HARDWARE: "Hardware",
    Area.OPTIONS: "Options",
    Area.BATCHES: "Micro-batches and copies",
    Area.STAGES: "Stages",
    Area.BLOCKS: "Blocks",
    Area.SHARDINGS: "Inside groups of ranks (one block, one rank and micro-batch)",
    Area.BOUNDARIES: "Boundaries",
    Area.PARAMETERS: "Parameters",
    Area.SCHEDULE: "Schedule",
    Area.REQUIRES: "Required of the backend",
    Area.PREDICTIONS: "Predictions",
    Area.ALTERNATIVES: "Alternatives",
    Area.COVERAGE: "Coverage",
    Area.NOTES: "Notes",
}


def diff_report(old: Plan, new: Plan, changes: Sequence[Change]) -> Report:
    """The changes by part of the plan, moved blocks gathered, speed first."""
    if not changes:
        return Report("The plans say the same", ())
    sections = [Section(lines=(_speed(old, new),))]
    for area, heading in _HEADINGS.items():
        of_area = [change for change in changes if change.area is area]
        if area is Area.BLOCKS:
            moved = [c for c in of_area if c.path[-1] == "stage" and None not in (c.old, c.new)]
            if moved:
                sections.append(Section("Moved blocks", items=_moves(moved)))
            of_area = [c for c in of_area if c not in moved]
        if of_area:
            sections.append(Section(heading, table=_table(of_area)))
    return Report(f"{plural(len(changes), 'change')} between the plans", tuple(sections))


def _speed(old: Plan, new: Plan) -> str:
    a, b = old.predictions.iteration_s, new.predictions.iteration_s
    rates = old.predictions.samples_per_s, new.predictions.samples_per_s
    return (
        f"Iteration {format_seconds(a)} -> {format_seconds(b)} ({b / a - 1:+.1%}), "
        f"throughput {rates[0]:,.4g} -> {rates[1]:,.4g} samples/s ({rates[1] / rates[0] - 1:+.1%})."
    )


def _moves(moved: Sequence[Change]) -> tuple[str, ...]:
    """`layers.4-5: stage 1 -> stage 0`, neighbours that moved together in one line."""
    groups: dict[tuple[Value, Value], list[str]] = {}
    for change in moved:
        groups.setdefault((change.old, change.new), []).append(change.path[0])
    return tuple(f"{', '.join(module_ranges(names))}: stage {a} -> stage {b}" for (a, b), names in groups.items())


def _table(changes: Sequence[Change]) -> Table:
    columns = {"what": Form.TEXT, "old": Form.TEXT, "new": Form.TEXT, "change": Form.CHANGE}
    rows = (
        (
            " / ".join(change.path),
            _shown(change.path[-1], change.old),
            _shown(change.path[-1], change.new),
            "" if change.relative is None else change.relative,
        )
        for change in changes
    )
    return table(columns, rows)


def _shown(name: str, value: Value) -> str:
    """A value for people; long ones are cut, since the data holds them whole."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return _number(name, value)
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def _number(name: str, value: float) -> str:
    if name.endswith("_s") and "per_s" not in name:
        return format_seconds(value)
    if name.endswith("bytes"):
        return format_bytes(value)
    if name in ("gap", "bubble_fraction", "overlap"):
        return percent(value)
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"

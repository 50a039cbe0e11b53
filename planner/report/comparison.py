"""Reports of comparisons of systems: ranking, systems that change the training semantics, systems that do not fit; the
same as a picture by time and memory.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from planner.costs import precision
from planner.plans.figures import GIB, Headline, headline_of
from planner.plans.files import plain
from planner.report import svg
from planner.report.tables import Cell, Form, Report, Section, Table, data_table, table
from planner.systems import Comparison, Semantics, SystemRow
from planner.units import format_bytes, format_number, format_seconds

MARK, OTHER_UPDATE = "*", "+"
"""Marks of systems that change the training semantics, and of systems whose updates differ from the others'."""

COLUMNS = {
    "system": Form.NAME, "semantics": Form.NAME, "iteration": Form.SECONDS, "samples/s": Form.NUMBER,
    "peak memory": Form.FIGURE, "bubble": Form.SHARE, "sent": Form.BYTES, "versions": Form.NUMBER,
    "staleness": Form.NUMBER, "devices": Form.FIGURE, "plan": Form.TEXT,
}  # fmt: skip

MEANING = "What the columns mean"
LEGEND = (
    "iteration: time of the global batch: the makespan where a pipeline drains, its steady pace where it does not",
    "peak memory: of the fullest device, the runtime's reserve included",
    "bubble: share of the used devices' time in which they run no stage and no update, as in plans: waits, transfers "
    "between stages and exchanges, but not communication inside a group",
    "sent: what leaves devices in an iteration; busiest port: the same through the fullest port of a level, out / in",
)

DATA = (
    "system", "semantics", "feasible", "iteration_s", "samples_per_s", "peak_memory_bytes", "capacity_bytes", "bubble",
    "sent_bytes", "weight_versions", "staleness", "devices", "available", "plan", "reason", "alters",
)  # fmt: skip
"""Columns of the rows for tools."""


def comparison_report(comparison: Comparison, remark: str = "") -> Report:
    """All systems by group (ranked, changed semantics, not possible), and the traffic of each.

    Args:
        comparison: systems on one model and cluster.
        remark: why the precision was chosen, if the user gave none.
    """
    title = f"{comparison.model} on {comparison.hardware}, global batch {comparison.global_batch}"
    title += f", {comparison.precision}{f' ({remark})' if remark else ''}"
    first = headline_of_row(comparison, comparison.rows[0]) if comparison.rows else None
    sections = [] if first is None else [Section(lines=(title, f"the line above is of {comparison.rows[0].system}"))]
    sections += [Section(heading, table=shown) for heading, shown in _groups(comparison) if shown.rows]
    links = _links(comparison)
    if links.rows:
        sections.append(Section("Busiest port of each level, out / in", table=links))
    if comparison.limit_costs:
        sections.append(Section("What the limits of training frameworks cost", table=_limit_costs(comparison)))
    notes = (*_marks(comparison), *comparison.notes)
    if notes:
        sections.append(Section("Notes", lines=notes))
    sections.append(Section(MEANING, items=LEGEND))
    return Report(str(first or title), tuple(sections), _data(comparison))


def headline_of_row(comparison: Comparison, row: SystemRow) -> Headline | None:
    """The headline of one row; None if it does not fit or lacks figures."""
    setting = next((own for own, system, _ in comparison.decisions if system.key == row.system), None)
    if setting is None or row.memory is None or not row.feasible:
        return None
    headline = headline_of(
        setting.prices.graph_at(row.micro_batch),
        setting.cluster,
        setting.prices.profiles(row.micro_batch)[0],
        chosen=precision(setting.job.precision),
        global_batch=comparison.global_batch,
        ranks=range(row.devices),
        iteration_s=row.iteration_s,
        memory_bytes=row.memory.total,
        capacity_bytes=row.capacity_bytes,
        error=row.error,
    )
    return headline if comparison.price is None else headline.priced(comparison.price)


def _limit_costs(comparison: Comparison) -> Table:
    """The fastest plan with each limit lifted, compared with the plan within all limits."""
    columns = {"limit lifted": Form.TEXT, "iteration": Form.SECONDS, "change": Form.CHANGE}
    base_s = next(iter(comparison.limit_costs.values()))
    rows: list[tuple[Cell, ...]] = []
    for words, iteration_s in comparison.limit_costs.items():
        known = iteration_s is not None and base_s is not None
        rows.append((words, iteration_s, iteration_s / base_s - 1 if known else None))  # type: ignore[operator]
    return table(columns, rows)


def _groups(comparison: Comparison) -> list[tuple[str, Table]]:
    """Rows under headings."""
    feasible = [r for r in comparison.rows if r.feasible]
    asynchronous_apart = comparison.semantics == "sync"
    ranked = [r for r in feasible if not asynchronous_apart or r.semantics is Semantics.SYNC]
    others = [r for r in feasible if r not in ranked]
    failed = ((_name(row), row.reason) for row in comparison.rows if not row.feasible)
    return [
        ("Ranked", table(COLUMNS, map(_cells, ranked))),
        (
            "Asynchronous: these change the training semantics and are not ranked with the others",
            table(COLUMNS, map(_cells, others)),
        ),
        ("Not possible", table({"system": Form.NAME, "reason": Form.TEXT}, failed)),
    ]


def _name(row: SystemRow) -> str:
    return row.system + (MARK if row.semantics is Semantics.ASYNC else "") + (OTHER_UPDATE if row.alters else "")


def _cells(row: SystemRow) -> tuple[Cell, ...]:
    memory = None if row.memory is None else f"{format_bytes(row.memory.total)} of {format_bytes(row.capacity_bytes)}"
    pace = (row.iteration_s, row.samples_per_s, memory, row.bubble, row.sent_bytes)
    devices = f"{row.devices} of {row.available}"
    return _name(row), row.semantics.value, *pace, row.weight_versions, row.staleness, devices, row.plan


def _marks(comparison: Comparison) -> list[str]:
    """Meaning of the marks behind names."""
    lines = []
    if any(row.semantics is Semantics.ASYNC for row in comparison.rows):
        lines.append(
            f"{MARK} asynchronous: gradients are computed with old weights; how many more samples that takes is unknown"
        )
    return lines + [f"{OTHER_UPDATE} {row.system}: {row.alters}" for row in comparison.rows if row.alters]


def _links(comparison: Comparison) -> Table:
    """Bytes out of and into the busiest port of each level."""
    rows = [row for row in comparison.rows if row.feasible and row.links]
    levels = dict.fromkeys(link.level for row in rows for link in row.links)
    shown = []
    for row in rows:
        sent = {link.level: f"{format_bytes(link.out_bytes)} / {format_bytes(link.in_bytes)}" for link in row.links}
        shown.append((row.system, *(sent.get(level) for level in levels)))
    return table({"system": Form.NAME, **dict.fromkeys(levels, Form.FIGURE)}, shown)


def _data(comparison: Comparison) -> Table:
    return data_table(map(_document, comparison.rows), DATA)


_OF_COMPARISON = ("model", "hardware", "global_batch", "precision", "semantics", "notes")


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON data: the fields of each row (`planner.systems.SystemRow`) and its headline."""
    return {
        "format": "shardplan-comparison",
        "version": 2,
        **{name: getattr(comparison, name) for name in _OF_COMPARISON},
        "rows": [{**_document(row), "headline": headline_of_row(comparison, row)} for row in comparison.rows],
    }


def _document(row: SystemRow) -> dict[str, Any]:
    """The fields of a row as plain data with its peak memory; of one that does not fit, those that have a value."""
    peak = {} if row.memory is None else {"peak_memory_bytes": row.memory.total}
    return (asdict(row) if row.feasible else plain(row)) | peak


def comparison_svg(comparison: Comparison) -> str:
    """Iteration time to the right, memory upwards; capacities of devices as dashed lines.

    Filled points are synchronous, hollow ones change the training semantics. Systems that do not fit are named below.
    """
    points, capacities, notes = [], set(), []
    for row in comparison.rows:
        if row.feasible and row.memory is not None:
            held, alters = max(row.memory.total, 1.0), "+" * bool(row.alters)
            tip = f"{row.system}: {format_seconds(row.iteration_s)}, {format_bytes(held)}, {row.plan}"
            kind = "second" if row.semantics is Semantics.ASYNC else "first"
            points.append(svg.Dot(row.iteration_s, held / GIB, kind, tip, row.system + alters))
            capacities.add(row.capacity_bytes / GIB)
            notes += [f"+ {row.system}: {row.alters}"] * bool(row.alters)
    failed = ", ".join(row.system for row in comparison.rows if not row.feasible)
    return svg.scatter(
        f"{comparison.model} on {comparison.hardware}, global batch {comparison.global_batch}",
        points,
        svg.Axis("time of an iteration", lambda seconds: format_seconds(seconds).removesuffix(" 0 s"), svg.time_ticks),
        svg.Axis("memory of the fullest device", lambda gib: f"{format_number(gib)} GiB"),
        nothing="no system can train this model on this cluster",
        legend={"first": "synchronous", "second": "changes the training semantics"},
        limits=sorted(capacities),
        notes=[*([f"not possible: {failed}"] if failed else []), *notes],
    )

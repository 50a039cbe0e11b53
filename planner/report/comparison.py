"""Reports of comparisons: of systems (ranking, systems that change the training semantics, systems that do not fit; the
same as a picture by time and memory), and of two plans (verdict, summary, figures, causes, on request every value).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from planner.check.attribution import Attribution
from planner.costs import precision
from planner.errors import Problem
from planner.escaping import html, markdown, workflow_command
from planner.plans.comparison import PlanComparison, value_words
from planner.plans.diff import Area, Change, Value
from planner.plans.figures import GIB, Headline, headline_of
from planner.plans.files import plain
from planner.plans.idle import idle_count
from planner.plans.rules import FILE_RULES, ComparedFigure, Metric, Severity
from planner.plans.words import module_ranges
from planner.report import svg
from planner.report.tables import Cell, Form, Report, Section, Table, data_table, report_to_markdown, table
from planner.systems import Comparison, Semantics, SystemRow
from planner.units import format_bytes, format_number, format_seconds, plural

MARK, OTHER_UPDATE = "*", "+"
"""Marks of systems that change the training semantics, and of systems whose updates differ from the others'."""

COLUMNS = {
    "system": Form.NAME, "semantics": Form.NAME, "iteration": Form.SECONDS, "samples/s": Form.NUMBER,
    "peak memory": Form.FIGURE, "bubble": Form.SHARE, "exposed": Form.SHARE, "sent": Form.BYTES,
    "versions": Form.NUMBER, "staleness": Form.NUMBER, "devices": Form.FIGURE, "plan": Form.TEXT,
}  # fmt: skip

MEANING = "What the columns mean"
LEGEND = (
    "iteration: time of the global batch: the makespan where a pipeline drains, its steady pace where it does not",
    "peak memory: of the fullest device, the runtime's reserve included",
    "bubble: share of the used devices' time in which they wait for other stages of a pipeline, as in plans",
    "exposed: share in which they communicate and compute nothing: transfers between stages, exchanges of gradients "
    "and weights, communication inside a group",
    "sent: what leaves devices in an iteration; busiest port: the same through the fullest port of a level, out / in",
)

DATA = (
    "system", "semantics", "feasible", "iteration_s", "samples_per_s", "peak_memory_bytes", "capacity_bytes", "bubble",
    "exposed", "sent_bytes", "weight_versions", "staleness", "devices", "available", "plan", "reason", "alters",
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
    return Report(str(first or title), tuple(sections), data_table(map(_document, comparison.rows), DATA))


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
        use=idle_count(setting.cluster, setting.job, range(row.devices)),
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
    bubble = row.bubble or None
    pace = (row.iteration_s, row.samples_per_s, memory, bubble, row.exposed, row.sent_bytes)
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
        svg.PlotAxis(
            "time of an iteration", lambda seconds: format_seconds(seconds).removesuffix(" 0 s"), svg.time_ticks
        ),
        svg.PlotAxis("memory of the fullest device", lambda gib: f"{format_number(gib)} GiB"),
        nothing="no system can train this model on this cluster",
        legend={"first": "synchronous", "second": "changes the training semantics"},
        limits=sorted(capacities),
        notes=[*([f"not possible: {failed}"] if failed else []), *notes],
    )


_LONGEST = 60

MARKER = "<!-- shardplan diff -->"
"""First line of the Markdown, by which a bot finds and replaces its own comment."""

MARKDOWN_BYTES = 60_000
"""Limit on the bytes of the Markdown; GitHub accepts 65,536 characters."""

_HEADINGS = {
    Area.BATCHES: "Micro-batches and copies",
    Area.SHARDINGS: "Inside groups of ranks (one block, one rank and micro-batch)",
    Area.REQUIRES: "Required of the backend",
}
"""Headings of areas that their name is not the heading of."""

_FIGURES = {
    Metric.STEP_TIME: "time of a step",
    Metric.THROUGHPUT: "throughput",
    Metric.PEAK_MEMORY: "fullest device",
    Metric.BUBBLE: "bubble",
    Metric.GAP: "gap to the bound",
    Metric.PRICE: "price of the work",
}


def diff_report(
    comparison: PlanComparison,
    attribution: Attribution | None = None,
    failures: Mapping[str, str] | None = None,
    *,
    every_value: bool = False,
) -> Report:
    """Three sentences (what changed, what the planner did, what it costs), then figures, causes, gates and findings.

    Args:
        comparison: the comparison.
        attribution: the difference by cause; None if it was not requested.
        failures: by gate why it fails, "" for a gate that holds.
        every_value: true to list all values that differ.
    """
    sections: list[Section] = []
    if not comparison.only_names and (comparison.causes or comparison.decisions or comparison.changes):
        sections = [Section(lines=tuple(_sentences(comparison)))]
        sections += [Section("Figures", table=_figures(comparison.costs))] if comparison.costs else []
        sections += _attributed(comparison, attribution)
    findings = [r for r in comparison.remarks if r.severity is not Severity.INFO or r.rule in FILE_RULES]
    if findings:
        sections.append(Section("Findings", items=tuple(f"{r.severity} {r.rule}: {r.message}" for r in findings)))
    if failures:
        gates = tuple(f"{gate}: {reason or 'holds'}" for gate, reason in failures.items())
        sections.append(Section("Gates", items=gates))
    if every_value:
        sections += _values(comparison.changes)
    elif comparison.changes and not comparison.only_names:
        sections.append(Section(lines=(f"{_counted(comparison.changes)} (--all lists each)",)))
    return Report(diff_verdict(comparison, failures), tuple(sections))


def diff_verdict(comparison: PlanComparison, failures: Mapping[str, str] | None = None) -> str:
    """The result in a line: failed gates, else what differs."""
    failed = [gate for gate, reason in (failures or {}).items() if reason]
    if failed:
        return f"FAILED: {', '.join(failed)}"
    of_file = [r.message for r in comparison.remarks if r.rule in FILE_RULES and r.severity is Severity.ERROR]
    if of_file:
        return of_file[0]
    if not (comparison.changes or comparison.remarks or comparison.decisions):
        compared = f"compared {plural(comparison.stages, 'stage')}, {plural(comparison.operators, 'operator')}"
        return f"{compared}: no changes"
    if not comparison.costs:
        return comparison.decisions[0]
    if comparison.only_names:
        names = comparison.causes[0]
        return f"all gates hold: {names}" if failures else f"{names[:1].upper()}{names[1:]}."
    step = next((cost for cost in comparison.costs if cost.metric is Metric.STEP_TIME), None)
    head = "all gates hold: " if failures else ""
    if step is None or step.changed is None:
        return f"{head}{plural(len(comparison.changes), 'value')} differ"
    return f"{head}a step takes {_change_words(step, share=False)}"


def _sentences(comparison: PlanComparison) -> Iterator[str]:
    """Three sentences: what changed, what the planner decides, what it costs."""
    yield f"Changed: {'; '.join(comparison.causes) or 'none of model, hardware, options and tool'}."
    yield f"Planner: {'; '.join(comparison.decisions) or 'decides as before'}."
    if comparison.costs:
        step, memory = (
            next(c for c in comparison.costs if c.metric is m) for m in (Metric.STEP_TIME, Metric.PEAK_MEMORY)
        )
        yield f"Cost: a step {_change_words(step)}, the fullest device {_change_words(memory)}."


def _change_words(cost: ComparedFigure, *, share: bool = True) -> str:
    """`37.21 s -> 37.27 s (+0.16%)`, or `37.21 s, as before` where the change rounds to zero."""
    before, after = (
        cost.words(value, part if share else None)
        for value, part in ((cost.old, cost.old_share), (cost.new, cost.new_share))
    )
    if cost.changed == 0:
        return f"{after}, as before"
    return f"{before} -> {after}" + ("" if cost.changed is None else f" ({cost.changed:+.2%})")


def _figures(costs: Sequence[ComparedFigure]) -> Table:
    columns = {"figure": Form.NAME, "old": Form.FIGURE, "new": Form.FIGURE, "change": Form.CHANGE}
    rows = (
        (
            _FIGURES[cost.metric],
            cost.words(cost.old, cost.old_share),
            cost.words(cost.new, cost.new_share),
            "" if cost.relative is None or cost.metric in (Metric.BUBBLE, Metric.GAP) else cost.relative,
        )
        for cost in costs
    )
    return table(columns, rows)


def _attributed(comparison: PlanComparison, attribution: Attribution | None) -> list[Section]:
    """The section of the difference by cause; empty without an attribution."""
    parts, unpriced = attribution or ((), ())
    if not parts:
        return []
    columns = {"cause": Form.NAME, "time of a step": Form.FIGURE, "fullest device": Form.FIGURE}
    rows = (
        (" and ".join(part.causes), _signed(part.seconds, format_seconds), _signed(part.memory_bytes, format_bytes))
        for part in parts
    )
    return [Section("Where it comes from", unpriced, table=table(columns, rows))]


def _signed(value: float, shown: Callable[[float], str]) -> str:
    return ("+" if value > 0 else "-" if value < 0 else "") + shown(abs(value))


def _counted(changes: Sequence[Change]) -> str:
    counts = Counter(change.area for change in changes)
    by_area = ", ".join(f"{area} {count}" for area, count in counts.items())
    return f"{plural(len(changes), 'value')} of the file {'differs' if len(changes) == 1 else 'differ'}: {by_area}"


def _values(changes: Sequence[Change]) -> Iterator[Section]:
    """Every value that differs, a section for each area; moved blocks are grouped."""
    for area in Area:
        of_area = [change for change in changes if change.area is area]
        if area is Area.BLOCKS:
            moved = [c for c in of_area if c.path[-1] == "stage" and None not in (c.old, c.new)]
            if moved:
                yield Section("Moved blocks", items=_moves(moved))
            of_area = [c for c in of_area if c not in moved]
        if of_area:
            yield Section(_HEADINGS.get(area, area.capitalize()), table=changes_table(of_area))


def _moves(moved: Sequence[Change]) -> tuple[str, ...]:
    """Lines `layers.4-5: stage 1 -> stage 0`, neighbouring blocks with the same move together."""
    groups: dict[tuple[Value, Value], list[str]] = {}
    for change in moved:
        groups.setdefault((change.old, change.new), []).append(change.path[0])
    return tuple(f"{', '.join(module_ranges(names))}: stage {a} -> stage {b}" for (a, b), names in groups.items())


def changes_table(changes: Sequence[Change]) -> Table:
    """Changes as rows (what, old, new, change); long values are cut, JSON has them in full."""
    columns = {"what": Form.TEXT, "old": Form.TEXT, "new": Form.TEXT, "change": Form.CHANGE}
    rows = (
        (
            " / ".join(change.path),
            _cut(value_words(change.path[-1], change.old)),
            _cut(value_words(change.path[-1], change.new)),
            "" if change.relative is None else change.relative,
        )
        for change in changes
    )
    return table(columns, rows)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def diff_markdown(
    comparison: PlanComparison,
    attribution: Attribution | None = None,
    failures: Mapping[str, str] | None = None,
    *,
    room: int = MARKDOWN_BYTES,
) -> str:
    """The comparison as a review comment: verdict, a table, the rest folded as far as there is room, in bytes."""
    head = [MARKER, f"**shardplan: {markdown(diff_verdict(comparison, failures))}**"]
    if comparison.costs and not comparison.only_names and (comparison.changes or comparison.remarks):
        head.append(report_to_markdown(Report("", (Section(table=_figures(comparison.costs)),))).strip())
    full_report = diff_report(comparison, attribution, failures)
    summary = Report("", tuple(section for section in full_report.sections if section.heading != "Figures"))
    title = "What changed, what the planner did, what it costs"
    folded = [(title, report_to_markdown(summary))] if summary.sections else []
    folded += [
        (section.heading, report_to_markdown(Report("", (dataclasses.replace(section, heading=""),))))
        for section in _values(comparison.changes)
    ]
    text = "\n\n".join(head) + "\n"
    for title, body in folded:
        part = f"\n<details><summary>{html(title)}</summary>\n\n{body.strip()}\n\n</details>\n"
        if len((text + part).encode()) > room - 200:
            text += f"\n{title} and what follows is left out here for its length; `--format json` has it.\n"
            break
        text += part
    return text


_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def diff_annotations(comparison: PlanComparison, failures: Mapping[str, str] | None = None, *, file: str = "") -> str:
    """The findings and the failed gates as workflow commands of GitHub Actions, one line each."""
    messages = [("error", f"gate {gate}", reason) for gate, reason in (failures or {}).items() if reason]
    messages += [(_LEVELS[remark.severity], remark.rule, remark.message) for remark in comparison.remarks]
    lines = [workflow_command(level, text, file=file, title=title) for level, title, text in messages]
    lines = lines or [workflow_command("notice", diff_verdict(comparison, failures), file=file, title="shardplan")]
    return "".join(f"{line}\n" for line in lines)


def annotation(level: str, problem: Problem) -> str:
    """A finding in a file as a workflow command of GitHub Actions.

    Args:
        level: "error" or "warning".
        problem: the finding; its place may be `file:line:column`.
    """
    file, line, column = (*problem.where.rsplit(":", 2), "", "")[:3] if problem.excerpt else (problem.where, "", "")
    text = problem.message + (f" ({problem.hint})" if problem.hint else "")
    return workflow_command(level, text, file=file, line=line, col=column)

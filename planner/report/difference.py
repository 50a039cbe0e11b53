"""Reports of the comparison of two plans: verdict, summary, figures, causes, and on request every value."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from planner.check.attribution import Attribution
from planner.errors import Problem
from planner.plans.comparison import PlanComparison, value_words
from planner.plans.diff import Area, Change, Value
from planner.plans.rules import Cost, Metric, Severity
from planner.plans.words import module_ranges
from planner.report.tables import Form, Report, Section, Table, report_to_markdown, table
from planner.units import format_bytes, format_seconds, plural

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
    if comparison.causes or comparison.decisions or comparison.changes:
        sections = [Section(lines=tuple(_sentences(comparison)))]
        sections += [Section("Figures", table=_figures(comparison.costs))] if comparison.costs else []
        sections += _attributed(comparison, attribution)
    findings = [remark for remark in comparison.remarks if remark.severity is not Severity.INFO]
    if findings:
        sections.append(Section("Findings", items=tuple(f"{r.severity} {r.rule}: {r.message}" for r in findings)))
    if failures:
        gates = tuple(f"{gate}: {reason or 'holds'}" for gate, reason in failures.items())
        sections.append(Section("Gates", items=gates))
    if every_value:
        sections += _values(comparison.changes)
    elif comparison.changes:
        sections.append(Section(lines=(f"{_counted(comparison.changes)} (--all lists each)",)))
    return Report(diff_verdict(comparison, failures), tuple(sections))


def diff_verdict(comparison: PlanComparison, failures: Mapping[str, str] | None = None) -> str:
    """The result in a line: failed gates, else what differs."""
    failed = [gate for gate, reason in (failures or {}).items() if reason]
    if failed:
        return f"FAILED: {', '.join(failed)}"
    if not (comparison.changes or comparison.remarks or comparison.decisions):
        compared = f"compared {plural(comparison.stages, 'stage')}, {plural(comparison.operators, 'operator')}"
        return f"{compared}: no changes"
    if not comparison.costs:
        return comparison.decisions[0]
    step = next((cost for cost in comparison.costs if cost.metric is Metric.STEP_TIME), None)
    head = "all gates hold: " if failures else ""
    if step is None or step.relative is None:
        return f"{head}{plural(len(comparison.changes), 'value')} differ"
    return f"{head}a step takes {step.words(step.old, None)} -> {step.words(step.new, None)} ({step.relative:+.2%})"


def _sentences(comparison: PlanComparison) -> Iterator[str]:
    """Three sentences: what changed, what the planner decides, what it costs."""
    yield f"Changed: {'; '.join(comparison.causes) or 'none of model, hardware, options and tool'}."
    yield f"Planner: {'; '.join(comparison.decisions) or 'decides as before'}."
    if comparison.costs:
        step, memory = (
            next(c for c in comparison.costs if c.metric is m) for m in (Metric.STEP_TIME, Metric.PEAK_MEMORY)
        )
        costs = (
            f"{subject} {cost.words(cost.old, cost.old_share)} -> {cost.words(cost.new, cost.new_share)}"
            + ("" if cost.relative is None else f" ({cost.relative:+.2%})")
            for subject, cost in (("a step", step), ("the fullest device", memory))
        )
        yield f"Cost: {', '.join(costs)}."


def _figures(costs: Sequence[Cost]) -> Table:
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
    if attribution is None or not attribution.parts:
        return []
    columns = {"cause": Form.NAME, "time of a step": Form.FIGURE, "fullest device": Form.FIGURE}
    rows = (
        (" and ".join(part.causes), _signed(part.seconds, format_seconds), _signed(part.memory_bytes, format_bytes))
        for part in attribution.parts
    )
    return [Section("Where it comes from", attribution.unpriced, table=table(columns, rows))]


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
    comparison: PlanComparison, attribution: Attribution | None = None, failures: Mapping[str, str] | None = None
) -> str:
    """The comparison as a review comment: verdict, a table, the rest folded; at most `MARKDOWN_BYTES`."""
    head = [MARKER, f"**shardplan: {diff_verdict(comparison, failures)}**"]
    if comparison.costs and (comparison.changes or comparison.remarks):
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
        part = f"\n<details><summary>{title}</summary>\n\n{body.strip()}\n\n</details>\n"
        if len((text + part).encode()) > MARKDOWN_BYTES - 200:
            text += f"\n{title} and what follows is left out here for its length; `--format json` has it.\n"
            break
        text += part
    return text


_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def diff_annotations(comparison: PlanComparison, failures: Mapping[str, str] | None = None, *, file: str = "") -> str:
    """The findings and the failed gates as workflow commands of GitHub Actions, one line each."""
    messages = [("error", f"gate {gate}", reason) for gate, reason in (failures or {}).items() if reason]
    messages += [(_LEVELS[remark.severity], remark.rule, remark.message) for remark in comparison.remarks]
    lines = [_command(level, text, file=file, title=title) for level, title, text in messages]
    lines = lines or [_command("notice", diff_verdict(comparison, failures), file=file, title="shardplan")]
    return "".join(f"{line}\n" for line in lines)


def annotation(level: str, problem: Problem) -> str:
    """A finding in a file as a workflow command of GitHub Actions.

    Args:
        level: "error" or "warning".
        problem: the finding; its place may be `file:line:column`.
    """
    file, line, column = (*problem.where.rsplit(":", 2), "", "")[:3] if problem.excerpt else (problem.where, "", "")
    text = problem.message + (f" ({problem.hint})" if problem.hint else "")
    return _command(level, text, file=file, line=line, col=column)


def _command(level: str, text: str, **attributes: str) -> str:
    """A workflow command with the attributes that have a value."""
    written = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in attributes.items() if value)
    return f"::{level} {written}::{_escaped(text)}"


def _escaped(text: str, further: str = "") -> str:
    for character in "%\r\n" + further:
        text = text.replace(character, f"%{ord(character):02X}")
    return text

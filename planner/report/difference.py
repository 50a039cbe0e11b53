"""Two plans compared, for people and for reviews: verdict, sentences, figures, causes, and every value on demand."""

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
from planner.report.render import report_to_markdown
from planner.report.tables import Form, Report, Section, Table, table
from planner.units import format_bytes, format_seconds, plural

_LONGEST = 60

MARKER = "<!-- shardplan diff -->"
"""First line of the Markdown, by which a bot finds its own comment and writes over it."""

MARKDOWN_BYTES = 60_000
"""Bytes of the Markdown at the most; GitHub takes 65,536 characters."""

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

_FIGURES = {
    Metric.STEP_TIME: "time of a step",
    Metric.THROUGHPUT: "throughput",
    Metric.PEAK_MEMORY: "fullest device",
    Metric.BUBBLE: "bubble",
    Metric.GAP: "gap to the bound",
    Metric.PRICE: "price of the work",
}


def diff_report(
    found: PlanComparison,
    attribution: Attribution | None = None,
    struck: Mapping[str, str] | None = None,
    *,
    every_value: bool = False,
) -> Report:
    """Three sentences (what changed, what the planner did, what it costs), then figures, causes, gates and findings.

    Args:
        found: the comparison.
        attribution: which cause makes which part of the difference; None where it was not asked for.
        struck: why each gate fails by its text, "" for one that holds.
        every_value: list all values that differ, too.
    """
    sections: list[Section] = []
    if found.causes or found.decisions or found.changes:
        sections = [Section(lines=tuple(_sentences(found)))]
        sections += [Section("Figures", table=_figures(found.costs))] if found.costs else []
        sections += _attributed(found, attribution)
    told = [remark for remark in found.remarks if remark.severity is not Severity.INFO]
    if told:
        sections.append(Section("Findings", items=tuple(f"{r.severity} {r.rule}: {r.message}" for r in told)))
    if struck:
        sections.append(Section("Gates", items=tuple(f"{gate}: {why or 'holds'}" for gate, why in struck.items())))
    if every_value:
        sections += _values(found.changes)
    elif found.changes:
        sections.append(Section(lines=(f"{_counted(found.changes)} (--all lists each)",)))
    return Report(diff_verdict(found, struck), tuple(sections))


def diff_verdict(found: PlanComparison, struck: Mapping[str, str] | None = None) -> str:
    """The answer in a line: which gates fail, else what differs."""
    failed = [gate for gate, why in (struck or {}).items() if why]
    if failed:
        return f"FAILED: {', '.join(failed)}"
    if not (found.changes or found.remarks or found.decisions):
        compared = f"compared {plural(found.stages, 'stage')}, {plural(found.operators, 'operator')}"
        return f"{compared}: no changes"
    if not found.costs:
        return found.decisions[0]
    step = next((cost for cost in found.costs if cost.metric is Metric.STEP_TIME), None)
    head = "all gates hold: " if struck else ""
    if step is None or step.relative is None:
        return f"{head}{plural(len(found.changes), 'value')} differ"
    return f"{head}a step takes {step.words(step.old, None)} -> {step.words(step.new, None)} ({step.relative:+.2%})"


def _sentences(found: PlanComparison) -> Iterator[str]:
    """What changed, what the planner did about it, what it costs."""
    yield f"Changed: {'; '.join(found.causes) or 'none of model, hardware, options and tool'}."
    yield f"Planner: {'; '.join(found.decisions) or 'decides as before'}."
    if found.costs:
        step, memory = (next(c for c in found.costs if c.metric is m) for m in (Metric.STEP_TIME, Metric.PEAK_MEMORY))
        said = (
            f"{what} {cost.words(cost.old, cost.old_share)} -> {cost.words(cost.new, cost.new_share)}"
            + ("" if cost.relative is None else f" ({cost.relative:+.2%})")
            for what, cost in (("a step", step), ("the fullest device", memory))
        )
        yield f"Cost: {', '.join(said)}."


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


def _attributed(found: PlanComparison, attribution: Attribution | None) -> list[Section]:
    """Which cause makes which part of the difference."""
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
    said = ", ".join(f"{area} {count}" for area, count in counts.items())
    return f"{plural(len(changes), 'value')} of the file {'differs' if len(changes) == 1 else 'differ'}: {said}"


def _values(changes: Sequence[Change]) -> Iterator[Section]:
    """Every value that differs, by part of the plan; moved blocks gathered."""
    for area, heading in _HEADINGS.items():
        of_area = [change for change in changes if change.area is area]
        if area is Area.BLOCKS:
            moved = [c for c in of_area if c.path[-1] == "stage" and None not in (c.old, c.new)]
            if moved:
                yield Section("Moved blocks", items=_moves(moved))
            of_area = [c for c in of_area if c not in moved]
        if of_area:
            yield Section(heading, table=changes_table(of_area))


def _moves(moved: Sequence[Change]) -> tuple[str, ...]:
    """`layers.4-5: stage 1 -> stage 0`, neighbours that moved together in one line."""
    groups: dict[tuple[Value, Value], list[str]] = {}
    for change in moved:
        groups.setdefault((change.old, change.new), []).append(change.path[0])
    return tuple(f"{', '.join(module_ranges(names))}: stage {a} -> stage {b}" for (a, b), names in groups.items())


def changes_table(changes: Sequence[Change]) -> Table:
    """Changes as rows: what, old, new, and by how much; long values are cut, since the data holds them whole."""
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
    found: PlanComparison, attribution: Attribution | None = None, struck: Mapping[str, str] | None = None
) -> str:
    """The comparison as a comment of a review: verdict, one table, the rest folded; at most `MARKDOWN_BYTES`."""
    head = [MARKER, f"**shardplan: {diff_verdict(found, struck)}**"]
    if found.costs and (found.changes or found.remarks):
        head.append(report_to_markdown(Report("", (Section(table=_figures(found.costs)),))).strip())
    whole = diff_report(found, attribution, struck)
    told = Report("", tuple(section for section in whole.sections if section.heading != "Figures"))
    folded = [("What changed, what the planner did, what it costs", report_to_markdown(told))] if told.sections else []
    folded += [
        (section.heading, report_to_markdown(Report("", (dataclasses.replace(section, heading=""),))))
        for section in _values(found.changes)
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


def diff_annotations(found: PlanComparison, struck: Mapping[str, str] | None = None, *, file: str = "") -> str:
    """The findings and the failed gates as workflow commands of GitHub Actions, one line each."""
    said = [("error", f"gate {gate}", why) for gate, why in (struck or {}).items() if why]
    said += [(_LEVELS[remark.severity], remark.rule, remark.message) for remark in found.remarks]
    where = f"file={_escaped(file, ':,')}," if file else ""
    lines = (f"::{level} {where}title={_escaped(title, ':,')}::{_escaped(text)}\n" for level, title, text in said)
    return "".join(lines) or f"::notice {where}title=shardplan::{_escaped(diff_verdict(found, struck))}\n"


def annotation(level: str, problem: Problem) -> str:
    """A finding in a file as a workflow command of GitHub Actions.

    Args:
        level: "error" or "warning".
        problem: the finding; its place may be `file:line:column`.
    """
    file, line, column = (*problem.where.rsplit(":", 2), "", "")[:3] if problem.excerpt else (problem.where, "", "")
    places = {"file": file, "line": line, "col": column}
    said = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in places.items() if value)
    return f"::{level} {said}::{_escaped(problem.message + (f' ({problem.hint})' if problem.hint else ''))}"


def _escaped(text: str, further: str = "") -> str:
    for character in "%\r\n" + further:
        text = text.replace(character, f"%{ord(character):02X}")
    return text

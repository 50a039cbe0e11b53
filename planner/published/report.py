"""Reports of partition plans: the plan, its proof, and the differences between two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.plans.diff import Change
from planner.published.options import FLAGS
from planner.published.plan_file import ChoiceRun, ObjectiveSection, Part, PartitionPlan, Scalar, in_words
from planner.report.tables import Cell, Form, Report, Section, Table, table
from planner.units import format_bytes, format_rate, plural

_MS = 1e3


def _figure(value: float, unit: str) -> str:
    """A value of an objective as text: `17.79 ms`; seconds below one as milliseconds."""
    if unit == "s" and value < 1:
        value, unit = value * _MS, "ms"
    return f"{value:.6g} {unit}"


def partition_report(plan: PartitionPlan) -> Report:
    """The plan: its proof, its parts, trivial plans for comparison, and the options of the problem."""
    goal = plan.objective
    title = f"{plan.instance.name}: {goal.name} {_figure(goal.value, goal.unit)}"
    sections = [
        Section(lines=(_proof(goal, plan.solver), *_pace(plan))),
        Section("Parts", table=_parts_table(plan)),
        Section("Plans that anybody would try first", table=_trivial_table(plan)),
        Section("The problem", lines=(f"{plan.instance.family}, {plan.instance.nodes} nodes, "
                                      f"{plan.instance.edges} edges",), items=tuple(_options(plan))),
    ]  # fmt: skip
    if plan.statistics:
        counts = ", ".join(f"{name} {count:,}" for name, count in plan.statistics.items())
        sections.append(Section("The search", lines=(counts,)))
    if plan.notes:
        sections.append(Section("Notes", items=plan.notes))
    return Report(title, tuple(sections))


def _proof(goal: ObjectiveSection, solver: str) -> str:
    """The proof of a plan in a sentence: it is optimal, or within a gap of a bound."""
    if goal.proven_optimal:
        return f"Proven optimal among {goal.space} (found by {solver})."
    limit = "" if goal.stopped_after_s is None else f" within its limit of {goal.stopped_after_s:g} s"
    return (
        f"No plan among {goal.space} is below {_figure(goal.bound, goal.unit)}: this one is within {goal.gap:.3%} of "
        f"it; the search stopped{limit} (best plan by {solver})."
    )


def _pace(plan: PartitionPlan) -> list[str]:
    """Which part sets the pace, where the objective is the largest of the parts' values."""
    values = [(part.value or 0.0, number) for number, part in enumerate(plan.parts)]
    if not values or max(values)[0] < plan.objective.value * (1 - 1e-9):
        return []
    values.sort(key=lambda pair: (-pair[0], pair[1]))
    number, part = values[0][1], plan.parts[values[0][1]]
    text = f"Part {number} ({part.kind}, nodes {in_words(part.nodes)}) sets the pace"
    if len(values) > 1:
        text += f"; the next one takes {_figure(values[1][0], plan.objective.unit)}"
    return [text + "."]


def _parts_table(plan: PartitionPlan) -> Table:
    optional: list[tuple[str, Form, bool, Callable[[Part], Cell]]] = [
        ("devices", Form.NUMBER, any(p.devices > 1 for p in plan.parts), lambda p: p.devices),
        ("replicas", Form.NUMBER, any(p.replicas > 1 for p in plan.parts), lambda p: p.replicas),
        ("tensor", Form.NUMBER, any(p.tensor > 1 for p in plan.parts), lambda p: p.tensor),
        ("from", Form.NAME, any(p.first_device is not None for p in plan.parts), _place),
        ("runs as", Form.TEXT, any(p.configuration for p in plan.parts), lambda p: p.configuration),
        ("memory", Form.BYTES, any(p.memory_bytes is not None for p in plan.parts), _memory),
        ("choices", Form.TEXT, any(p.choices for p in plan.parts), lambda p: _choices(p.choices)),
        ("inside", Form.TEXT, any(p.inner for p in plan.parts), lambda p: _inside(p.inner)),
    ]
    further = [(name, form, cell) for name, form, needed, cell in optional if needed]
    columns = {"#": Form.FIGURE, "part": Form.NAME, "nodes": Form.TEXT, "value": Form.FIGURE, "": Form.BAR}
    most = max((part.value or 0.0 for part in plan.parts), default=0.0)
    rows = []
    for number, part in enumerate(plan.parts):
        value = "" if part.value is None else _figure(part.value, plan.objective.unit)
        share: Cell = (part.value or 0.0) / most if most > 0 else ""
        own = (str(number), part.kind, in_words(part.nodes) or "-", value, share)
        rows.append((*own, *(cell(part) for _, _, cell in further)))
    return table(columns | {name: form for name, form, _ in further}, rows)


def _place(part: Part) -> str:
    if part.first_device is None:
        return ""
    return f"{part.first_device}" + (f" (x{part.copies}, every {part.stride})" if part.copies > 1 else "")


def _memory(part: Part) -> Cell:
    return "" if part.memory_bytes is None else part.memory_bytes


def _choices(runs: Sequence[ChoiceRun]) -> str:
    named = [run.name or f"choice {run.choice}" for run in runs]
    if len(runs) == 1:
        return named[0]
    return "; ".join(f"{name}: {in_words(run.nodes, 3)}" for name, run in zip(named, runs, strict=True))


def _inside(parts: Sequence[Part]) -> str:
    return " | ".join(f"{in_words(part.nodes, 2)} x{part.replicas}" for part in parts)


def _trivial_table(plan: PartitionPlan) -> Table:
    rows = []
    for trivial in plan.trivial:
        value, times = "-", ""
        if trivial.value is not None:
            value = _figure(trivial.value, plan.objective.unit)
            times = f"{trivial.value / plan.objective.value:.2f}x" if plan.objective.value > 0 else ""
        rows.append((trivial.name, value, times, ", ".join(trivial.breaks) or "nothing"))
    columns = {"plan": Form.TEXT, "value": Form.FIGURE, "of this": Form.FIGURE, "breaks": Form.TEXT}
    return table(columns, rows)


def _options(plan: PartitionPlan) -> list[str]:
    return [f"{FLAGS.get(name, name)} {_option(name, value)}" for name, value in plan.options.items()]


def _option(name: str, value: Scalar | None) -> str:
    if name == "memory_bytes":
        return "unlimited" if value is None else format_bytes(float(value))  # type: ignore[arg-type]
    if name == "bandwidth_byte_per_s":
        return ",".join(format_rate(float(rate)) for rate in value)  # type: ignore[union-attr]
    if name == "machines":
        return "x".join(str(count) for count in value)  # type: ignore[union-attr]
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def partition_diff_report(old: PartitionPlan, new: PartitionPlan, changes: Sequence[Change]) -> Report:
    """The differences between two plans, objectives first."""
    if not changes:
        return Report("The plans say the same", ())
    a, b = old.objective, new.objective
    lines = [f"{a.name} {_figure(a.value, a.unit)} -> {b.name} {_figure(b.value, b.unit)}"]
    if (a.name, a.unit) == (b.name, b.unit) and a.value > 0:
        lines[0] += f" ({b.value / a.value - 1:+.2%})"
    rows = ((".".join(change.path), _cell(change.old), _cell(change.new)) for change in changes)
    shown = table(dict.fromkeys(("what", "old", "new"), Form.TEXT), rows)
    title = f"{plural(len(changes), 'change')} between the plans"
    return Report(title, (Section(lines=tuple(lines)), Section("Changes", table=shown)))


def _cell(value: Any) -> str:  # noqa: ANN401
    if value is None:
        return "-"
    if isinstance(value, Part):
        return f"{value.kind}, nodes {in_words(value.nodes)}"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return in_words(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."

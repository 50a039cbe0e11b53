"""Reports of answers about one's own configurations: predictions, fixes, why not, gains of changes, targets, sweeps."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from planner.ask import Fix, TargetAnswer, WhyNot, Worth
from planner.ask.choices import ComparedPart
from planner.ask.sweeps import SweepRow
from planner.plans import Plan
from planner.plans.explain import plan_shape
from planner.plans.figures import GIB
from planner.plans.step import plan_step
from planner.prediction import Prediction
from planner.report import svg
from planner.report.explanation import memory_section
from planner.report.plans import plan_report
from planner.report.tables import Cell, Form, Report, Section, Table, data_table, table
from planner.sums import float_sum
from planner.units import format_bytes, format_number, format_seconds, plural

KINDS = ("weights", "gradients", "optimizer", "activations", "workspace", "reserve")
MOST_STAGES = 6
MOST_PARTS = 3
"""Parts that a verdict names at most."""
SMALL = 0.005
"""Fraction of a step below which a difference is not mentioned."""


def prediction_report(prediction: Prediction, fixes: Sequence[Fix] = ()) -> Report:
    """Time and memory of one configuration; if it does not fit, memory by kind and stage, and fixes.

    Args:
        prediction: the prediction.
        fixes: changes that reduce memory.
    """
    plan = plan_report(prediction.plan)
    sections = [*plan.sections, Section(lines=tuple(_memory(prediction)))]
    if not prediction.fits:
        sections.append(memory_section(prediction.plan, plan_step(prediction.plan)))
    if fixes:
        sections.append(Section("What would make it fit, and its price", table=_fixes(fixes)))
    elif not prediction.fits and prediction.fullest.memory.total > prediction.fullest.capacity_bytes:
        sections.append(Section(lines=("no single change or pair of changes that was tried saves memory",)))
    return Report(plan.title, tuple(sections))


def _memory(prediction: Prediction) -> Iterator[str]:
    """The fullest worker's memory by kind, and how much it exceeds its capacity."""
    worker = prediction.fullest
    stages = ", ".join(map(str, worker.stages[:MOST_STAGES])) + (", ..." if len(worker.stages) > MOST_STAGES else "")
    kinds = ", ".join(f"{kind} {format_bytes(getattr(worker.memory, kind))}" for kind in KINDS)
    yield f"fullest worker (stage{'s' if len(worker.stages) > 1 else ''} {stages}): {kinds}"
    shown, full = prediction.driver_bytes, prediction.driver_bytes == worker.capacity_bytes
    caches = "which caches of the allocator fill" if full else "caches of the allocator included"
    yield f"the driver would show about {format_bytes(shown)}, {caches}"
    total, capacity = worker.memory.total, worker.capacity_bytes
    if prediction.fits:
        yield f"fits: {format_bytes(total)} of {format_bytes(capacity)}; {_headroom(prediction)}"
    for problem in prediction.problems:
        yield f"does not fit: {problem}"
    if total > capacity:
        yield f"missing: {format_bytes(total - capacity)} a device"


def _headroom(prediction: Prediction) -> str:
    """Whether a prediction that fits also leaves the headroom free, in words."""
    limit_bytes = (1 - prediction.headroom) * prediction.fullest.capacity_bytes
    if prediction.fits_with_headroom:
        return f"leaves the headroom of {prediction.headroom:.1%} free"
    over = format_bytes(prediction.fullest.memory.total - limit_bytes)
    limit = f"the {format_bytes(limit_bytes)} below a headroom of {prediction.headroom:.1%}"
    return f"{over} more than {limit}, so it may run out"


def _fixes(fixes: Sequence[Fix]) -> Table:
    columns = {"change": Form.TEXT, "memory": Form.FIGURE, "step": Form.CHANGE, "then": Form.TEXT}
    rows = (
        (fix.words, f"{fix.bytes / (1 << 30):+.3g} GiB", fix.time, _then(fix))
        for fix in fixes
    )  # fmt: skip
    return table(columns, rows)


def _then(fix: Fix) -> str:
    return "fits" if fix.fits else f"lacks {format_bytes(fix.missing_bytes)}"


def why_not_report(answer: WhyNot) -> Report:
    """The verdict, then the parts in which the choice loses time and memory."""
    verdict = [_verdict(answer), *_reasons(answer)]
    shapes = (
        f"the plan: {answer.plan_shape}",
        f"{answer.asked}: {answer.shape}",
        f"configurations priced: {answer.tried}",
    )
    sections = [
        Section(lines=(*verdict, *shapes)),
        Section("Where a step goes, as a mean over all devices", table=_parts(answer.times, Form.SECONDS)),
        Section("Memory of the fullest device", table=_parts(answer.memory, Form.BYTES)),
    ]
    return Report(str(answer.headline or answer.asked), tuple(sections))


def _verdict(answer: WhyNot) -> str:
    change = answer.iteration_s / answer.plan_s - 1
    times = f"{format_seconds(answer.iteration_s)} against {format_seconds(answer.plan_s)}"
    if answer.problems:
        missing = float_sum(part.other for part in answer.memory) - answer.capacity_bytes
        lacks = f"a device lacks {format_bytes(missing)}" if missing > 0 else answer.problems[0]
        return f"{answer.asked} does not fit: {lacks}; it would take {times} ({change:+.1%})"
    if abs(change) < SMALL:
        return f"{answer.asked} takes about as long: {times} ({change:+.1%})"
    return f"{answer.asked} is {'slower' if change > 0 else 'faster'}: {times} ({change:+.1%})"


def _reasons(answer: WhyNot) -> Iterator[str]:
    """The parts of a step in which the choice loses and gains most time."""
    changes = sorted(answer.times, key=lambda part: part.own - part.other)
    for word, parts in (("loses", changes), ("gains", reversed(changes))):
        sign = 1 if word == "loses" else -1
        large = [p for p in parts if sign * (p.other - p.own) > SMALL * answer.plan_s][:MOST_PARTS]
        if large:
            yield f"it {word} " + ", ".join(f"{format_seconds(abs(p.other - p.own))} in {p.name}" for p in large)


def _parts(parts: Sequence[ComparedPart], form: Form) -> Table:
    columns = {"part": Form.TEXT, "plan": form, "choice": form, "change": Form.FIGURE}
    total = ComparedPart("total", float_sum(p.own for p in parts), float_sum(p.other for p in parts))
    rows = ((p.name, p.own, p.other, _change(p)) for p in (*parts, total))
    return table(columns, rows)


def _change(part: ComparedPart) -> str:
    return f"{part.other / part.own - 1:+.1%}" if part.own else ("new" if part.other else "-")


def worth_report(plan: Plan, gains: Sequence[Worth]) -> Report:
    """Gains of changes, the best first, each with a bound on the step time.

    Args:
        plan: the plan that gains are relative to.
        gains: result of `planner.ask.find_worth`.
    """
    plan_s = plan.predictions.reached_s
    columns = {
        "with": Form.TEXT, "step": Form.SECONDS, "change": Form.CHANGE, "bound": Form.SECONDS,
        "plan, or why there is none": Form.TEXT,
    }  # fmt: skip
    rows = (
        (w.words, w.iteration_s, None if w.gain is None else 0.0 - round(w.gain, 6), w.bound_s, w.shape) for w in gains
    )
    line = f"each planned anew, against {format_seconds(plan_s)} a step: {plan_shape(plan)}"
    return Report(str(plan.headline or plan.model.name), (Section(lines=(line,)), Section(table=table(columns, rows))))


def target_report(answer: TargetAnswer, *, remark: str = "") -> Report:
    """The plan that reaches a target, after a verdict and the numbers of devices that were tried.

    Args:
        answer: result of `planner.ask.least_devices`.
        remark: why the precision was chosen, if the user gave none.
    """
    plan = plan_report(answer.plan, remark=remark)
    used = plural(answer.plan.hardware.device_count, "device")
    step = format_seconds(answer.plan.predictions.reached_s)
    verdict = f"{answer.target.words} needs steps of at most {format_seconds(answer.most_s)}: {used}, steps of {step}"
    return Report(plan.title, (Section(lines=(verdict,), table=_tried(answer)), *plan.sections))


def _tried(answer: TargetAnswer) -> Table:
    priced = any(size.dollars_per_hour for size in answer.tried)
    columns = {"devices": Form.NUMBER, "step": Form.SECONDS, "against target": Form.CHANGE}
    columns |= {"a step": Form.FIGURE} if priced else {}
    rows = []
    for size in answer.tried:
        change = None if size.step_s is None else size.step_s / answer.most_s - 1
        dollars = (f"${format_number(size.dollars_per_step, 3)}" if size.dollars_per_step else None,) if priced else ()
        remark = size.reason or ("reaches it" if size.reaches else "")
        rows.append((size.devices, size.step_s, change, *dollars, remark))
    return table({**columns, "": Form.TEXT}, rows)


MARK = "*"
PARETO = f"{MARK} no other row is at least as good in throughput, price and memory, and better in one of them"
FIGURES = (
    "iteration_s", "bound_s", "samples_per_s", "tokens_per_s_per_device", "mfu", "memory_bytes", "device_bytes",
    "dollars_per_hour", "dollars_per_tera_tokens", "dollars_per_mega_samples",
)  # fmt: skip
DATA = (*FIGURES, "pareto", "shape", "reason", "seconds")
"""Columns of the rows for tools, after the swept names."""


def sweep_report(rows: Sequence[SweepRow]) -> Report:
    """All points in order; values that all points share are in the title only."""
    swept = swept_names(rows)
    common = [(name, value) for name, value in rows[0].point if name not in swept] if rows else []
    tokens = any(row.headline and row.headline.sequence for row in rows)
    priced = any(row.headline and row.headline.dollars_per_hour for row in rows)
    columns = dict.fromkeys(swept, Form.NAME) | {"": Form.NAME, "step": Form.SECONDS}
    columns |= {
        "tokens/s/device" if tokens else "samples/s/device": Form.FIGURE,
        "MFU": Form.SHARE,
        "memory": Form.BYTES,
    }
    columns |= {"$/10^12 tokens" if tokens else "$/10^6 samples": Form.FIGURE} if priced else {}
    columns |= {"plan, or why there is none": Form.TEXT}
    shown = table(columns, (_cells(row, swept, priced=priced) for row in rows))
    made = sum(row.headline is not None for row in rows)
    lines = (f"{plural(len(rows), 'point')}, {made} with a plan", PARETO)
    title = ", ".join(value if name in ("model", "hardware") else f"{name} {value}" for name, value in common)
    return Report(
        f"sweep: {title}", (Section(table=shown), Section(lines=lines)), data_table(_data(rows), (*swept, *DATA))
    )


def swept_names(rows: Sequence[SweepRow]) -> list[str]:
    """Names with more than one value among the points."""
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.point:
            values.setdefault(name, set()).add(value)
    return [name for name, found in values.items() if len(found) > 1]


def _cells(row: SweepRow, swept: Sequence[str], *, priced: bool) -> tuple[Cell, ...]:
    point, line = dict(row.point), row.headline
    values = [point.get(name) for name in swept]
    if line is None:
        return (*values, "", None, None, None, None, *([None] if priced else []), row.reason)
    rate = line.tokens_per_s_per_device or line.samples_per_s / line.device_count
    dollars = line.dollars_per_tera_tokens or line.dollars_per_mega_samples
    price = (format_number(dollars, 3),) if priced else ()
    figures = (line.iteration_s, f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}", line.mfu, line.memory_bytes)
    return (*values, MARK if row.pareto else "", *figures, *price, row.shape)


def _data(rows: Sequence[SweepRow]) -> list[dict[str, object]]:
    data = []
    for row in rows:
        line = row.headline
        figures = {} if line is None else {name: getattr(line, name) for name in FIGURES if hasattr(line, name)}
        result = {"bound_s": row.bound_s or None, "pareto": row.pareto, "shape": row.shape, "reason": row.reason}
        data.append({**dict(row.point), **figures, **result, "seconds": round(row.seconds, 3)})
    return data


NAME_LETTERS, MOST_NAMED = 35, 24
"""Letters of a name that fit beside the chart; points of a sweep up to which all are named."""


def sweep_svg(rows: Sequence[SweepRow]) -> str:
    """Throughput of all devices to the right, price (or memory if no price is known) upwards.

    Pareto-optimal points are coloured and named, the others where there are few; each has a tooltip with its values.
    """
    made = [(row, row.headline) for row in sorted(rows, key=lambda row: row.pareto) if row.headline is not None]
    priced = all(line.dollars_per_hour for _, line in made)
    unit, power = ("tokens", 12) if any(line.sequence for _, line in made) else ("samples", 6)
    swept, points = swept_names(rows), []
    for row, line in made:
        values = ", ".join(f"{name} {value}" for name, value in row.point if name in swept)
        named = row.pareto or len(made) <= MOST_NAMED
        shown = textwrap.shorten(values, NAME_LETTERS, placeholder=" ..") if named else ""
        dollars = line.dollars_per_tera_tokens or line.dollars_per_mega_samples
        rate = line.samples_per_s * (line.sequence or 1)
        height, kind = dollars if priced else line.memory_bytes / GIB, ("other", "first")[row.pareto]
        points.append(svg.Dot(rate, height, kind, f"{values}: {line}", shown))
    return svg.scatter(
        sweep_report(rows).title,
        points,
        svg.PlotAxis(f"{unit} a second, all devices"),
        svg.PlotAxis(f"dollars for 10^{power} {unit}" if priced else "memory of the fullest device, GiB"),
        nothing="no point has a plan",
        legend={"first": "no other is as good in throughput, price and memory", "other": "another one is"},
    )

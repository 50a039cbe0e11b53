"""Reports of a model's costs on a device, and of the calibration of these costs by measured runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from planner.calibration import Calibration, FittedRun
from planner.costs import CostReport, Profile, cost_report
from planner.costs.report import Group
from planner.graph import NO_RULE, Graph
from planner.report.tables import Cell, Form, Report, Section, Table, data_table, table
from planner.units import format_bytes, format_flop_rate, format_flops, format_fraction, format_seconds, plural

MOST_ROWS = 12
"""Default number of rows of a table."""

DATA = (
    "key", "op", "module", "forward_s", "backward_s", "weight_grad_s", "forward_flops", "backward_flops",
    "moved_bytes", "output_bytes", "saved_bytes", "origin", "format",
)  # fmt: skip


def profile_report(graph: Graph, profile: Profile, *, most_rows: int = MOST_ROWS, remark: str = "") -> Report:
    """Totals of a profile by layer and operator; the rows for tools list all nodes.

    Args:
        graph: the model.
        profile: its costs.
        most_rows: rows of the tables of layers and operators.
        remark: why the precision was chosen, if the user gave none.
    """
    costs = cost_report(graph, profile)
    precision = f"{costs.precision} ({remark})" if remark else costs.precision
    sections = (
        Section(lines=tuple(_totals(costs))),
        Section(table=_groups("layer", costs.layers, most_rows, costs.whole.total_s)),
        Section(table=_groups("operator", costs.operators, most_rows, costs.whole.total_s)),
        _coverage(costs),
    )
    title = f"{costs.model} on {costs.device}, {precision}, micro-batch {costs.micro_batch} ({costs.source})"
    return Report(title, sections, data_table(_nodes(graph, profile), DATA))


def _totals(costs: CostReport) -> list[str]:
    total = costs.whole
    rate = f" = {format_flop_rate(costs.flop_per_s)}" if costs.flop_per_s else ""
    doubts = [f"warning: {note.where}: {note.message}" for note in costs.notes if note.code == NO_RULE]
    return [
        *doubts,
        f"parameters  {total.parameters:,}",
        f"work        {format_flops(total.forward_flops)} forward, {format_flops(total.backward_flops)} backward",
        f"time        {format_seconds(total.forward_s)} forward, {format_seconds(total.backward_s)} backward{rate}",
        f"kept        {format_bytes(total.saved_bytes)} of activations for backward",
    ]


def _groups(kind: str, groups: Sequence[Group], most_rows: int, total_s: float) -> Table:
    """The costliest groups, and the total share of the others."""
    columns = {
        kind: Form.TEXT, "": Form.FIGURE, "share": Form.SHARE, "forward": Form.SECONDS, "backward": Form.SECONDS,
        "work": Form.FLOPS, "kept": Form.BYTES, "parameters": Form.COUNT,
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for group in groups[:most_rows]:
        count = group.nodes if kind == "operator" else group.count
        named = f"{group.name}{' (fallback)' if group.fallback_nodes else ''}", f"x{count}" if count > 1 else ""
        times = (group.total_s / total_s if total_s else "", group.forward_s, group.backward_s)
        work = group.forward_flops + group.backward_flops
        rows.append((*named, *times, work or None, group.saved_bytes or None, group.parameters or None))
    other_groups = groups[most_rows:]
    if other_groups:
        share = sum(g.total_s for g in other_groups) / total_s if total_s else 0.0
        rows.append((f"{len(other_groups)} more", "", share, *[""] * 5))
    return table(columns, rows)


def _coverage(costs: CostReport) -> Section:
    coverage = costs.coverage
    priced = f"{coverage.by_rule} by rule"
    if coverage.fallback_ops:
        names = ", ".join(f"{op} x{count}" for op, count in coverage.fallback_ops.items())
        priced += f", {coverage.by_fallback} by fallback ({names})"
    others = f"{coverage.plumbing} plumbing, {coverage.folded} folded, {coverage.dead} dead"
    line = f"coverage  {coverage.total} nodes: {priced}, {others}"
    notes = (
        f"{note.level.value}: {note.message}" + (f" ({note.where})" if note.where else "")
        for note in costs.notes
        if note.code != NO_RULE
    )
    return Section(lines=(line,), items=tuple(notes))


def _nodes(graph: Graph, profile: Profile) -> Iterator[Mapping[str, Cell]]:
    """All nodes with their figures; products with their number format; saved bytes include shared ones."""
    for i, node in enumerate(graph.nodes):
        figures = {name: f"{float(getattr(profile, name)[i]):.9g}" for name in DATA[3:10]}
        saved = sum(item.byte_count for item in profile.saved[i])
        named: dict[str, Cell] = {"key": node.key, "op": node.op, "module": node.module}
        form = profile.formats[i] if profile.formats and profile.forward_flops[i] else ""
        yield {**named, **figures, "saved_bytes": saved, "origin": profile.origin[i].value, "format": form}


def calibration_report(calibration: Calibration) -> Report:
    """The fitted factors, every run, and the mean errors before, after, and of left-out runs."""
    factors = table(
        {"figure": Form.NAME, "what it is": Form.TEXT, "factor": Form.FIGURE, "80 %": Form.FIGURE, "now": Form.FIGURE},
        [(f.name, f.meaning, f"{f.value:.3f}", f"{f.low:.3f} to {f.high:.3f}", f.figure) for f in calibration.factors],
    )
    runs = table(
        {
            "run": Form.TEXT, "measured": Form.SECONDS, "before": Form.SECONDS, "off": Form.CHANGE,
            "after": Form.SECONDS, "off after": Form.CHANGE, "off left out": Form.CHANGE,
        },
        [_row(run) for run in calibration.runs],
    )  # fmt: skip
    errors = [format_fraction(calibration.error(name)) for name in ("before_s", "after_s", "left_out_s")]
    lines = [
        f"mean error of {plural(len(calibration.runs), 'run')}: {errors[0]} before, {errors[1]} after; {errors[2]} of "
        "runs that had no part in the fit (each left out in turn)"
    ]
    bounded = [factor.name for factor in calibration.factors if factor.bounded]
    if bounded:
        lines.append(f"{', '.join(bounded)}: as far from 1 as a fit may go; look for what else is wrong")
    if calibration.memory:
        value, low, high = calibration.memory
        lines.append(f"peak memory: measured {value:.3f} times what is predicted (80 %: {low:.3f} to {high:.3f})")
    return Report(
        f"{calibration.base}, fitted to measured runs",
        (Section(table=factors), Section(table=runs), Section(lines=tuple(lines))),
    )


def _row(fitted: FittedRun) -> tuple[str | float, ...]:
    measured = fitted.run.seconds
    return (
        _words(fitted),
        measured,
        fitted.before_s,
        fitted.before_s / measured - 1,
        fitted.after_s,
        fitted.after_s / measured - 1,
        fitted.left_out_s / measured - 1,
    )


def _words(fitted: FittedRun) -> str:
    """A run's configuration without degrees of 1."""
    d = fitted.run.degrees
    parts = [f"tp {d.tensor}" * (d.tensor > 1), f"pp {d.pipeline}" * (d.pipeline > 1), f"dp {d.data}" * (d.data > 1)]
    parts += [f"{d.chunks} chunks" * (d.chunks > 1), f"micro-batch {d.micro_batch}", d.schedule]
    parts += [f"ZeRO-{d.zero}" * (d.zero > 0), "recompute" * d.recompute, f"batch {fitted.run.global_batch}"]
    return ", ".join(part for part in parts if part)

"""Reports of a model's costs on a device, of their calibration by measured runs, and of runs of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from planner.calibration import Calibration, FittedRun
from planner.costs import CostReport, Profile, cost_report
from planner.costs.report import CostGroup
from planner.graph import NO_RULE, Graph
from planner.plans import Plan
from planner.report.tables import Cell, Form, Report, Section, Table, data_table, table
from planner.simulate import Timeline, simulate
from planner.sums import float_sum
from planner.units import format_bytes, format_flop_rate, format_flops, format_fraction, format_seconds, plural

if TYPE_CHECKING:
    from planner.runtime import GradientCheck, RunReport
    from planner.runtime.jobs import ActionTime

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


def _groups(kind: str, groups: Sequence[CostGroup], most_rows: int, total_s: float) -> Table:
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
        share = float_sum(g.total_s for g in other_groups) / total_s if total_s else 0.0
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


_NAMED = 3
_TIMED = {"cpu": "thread CPU time", "cuda": "GPU time"}
_MEMORY = {
    "cpu": "memory by which a process grew",
    "cuda": "memory that torch's allocator handed out",
    "meta": "memory of all tensors, without data",
}


def run_document(run: RunReport) -> dict[str, Any]:
    """A run as JSON: losses, seconds of steps, the check of gradients, seconds by stage and pass."""
    check = run.check
    checked = check and {
        "loss": check.loss,
        "expected_loss": check.expected_loss,
        "largest_error": check.largest,
        "wrong": [{"stage": stage, "parameter": name, "error": error} for stage, name, error in check.wrong],
        "computed_whole": list(check.computed_whole),
    }
    times, memory = ([asdict(item) for item in measured] for measured in (run.times, run.memory))
    document = {"losses": list(run.losses), "step_s": list(run.step_s), "check": checked, "times": times}
    return {**document, "memory": memory, "alone": run.alone, "device": run.device}


def run_report(plan: Plan, run: RunReport, *, measured: bool = False) -> Report:
    """The report of a run.

    Args:
        plan: the plan.
        run: the results of the run.
        measured: true to add the iteration time that the measured times give, and the memory of ranks.
    """
    sections = [] if run.check is None else [_checked(run.check)]
    if run.times:
        timed = _TIMED[run.device]
        heading = f"{timed} of one micro-batch here, and what the plan predicts for {plan.hardware.name}"
        columns = {"stage": Form.NUMBER, "pass": Form.TEXT, **_COMPARED}
        rows = [(str(t.stage), t.kind, *_beside(format_seconds, t.measured_s, t.predicted_s)) for t in run.times]
        sections.append(Section(heading, table=table(columns, rows)))
    if measured:
        sections += [*_iteration(plan, run), _memory(run)]
    processes = f"{plan.world_size} processes" if run.alone is None else f"rank {run.alone} of {plan.world_size}"
    return Report(f"{plan.model.name}: {plan.schedule.name} on {processes}", tuple(sections))


_COMPARED = {"here": Form.FIGURE, "predicted": Form.FIGURE, "here / predicted": Form.FIGURE}


def _beside(form: Callable[[float], str], measured: float, predicted: float) -> tuple[str, str, str]:
    """A measured and a predicted figure, and their ratio."""
    return form(measured), form(predicted), f"{measured / predicted:.3g}" if predicted else ""


def _iteration(plan: Plan, run: RunReport) -> list[Section]:
    """An iteration simulated with the stage times of this machine, as ranks with a core each would take."""
    if run.alone is not None:
        steps = ", ".join(format_seconds(s) for s in run.step_s[:_NAMED])
        line = f"{steps}: wall seconds of its steps; what others would send is stood in for"
        return [Section(f"rank {run.alone} alone", (line,))] if run.times else []
    row = ("iteration", *_beside(format_seconds, measured_timeline(plan, run.times).step_s, simulate(plan).step_s))
    own = "a core" if run.device == "cpu" else "a GPU"
    heading = f"an iteration with {own} for each rank: these times in the plan's orders, exchanges as predicted"
    return [Section(heading, table=table({"": Form.TEXT, **_COMPARED}, [row]))]


def measured_timeline(
    plan: Plan, action_times: Sequence[ActionTime], exchanged_s: Sequence[tuple[float, float]] = ()
) -> Timeline:
    """An iteration as ranks with a device each would take it with the measured times; exchanges are as predicted.

    Args:
        plan: the plan.
        action_times: measured times of all stages.
        exchanged_s: by stage, predicted seconds of a forward and of a backward pass that wait for weights and gradients
            (ZeRO 2 and 3), which plans do not state apart; by default none.
    """
    times = {(t.stage, t.kind): t.measured_s for t in action_times}
    for at in range(len(plan.stages)):
        both_s, forward_s, repeated_s = plan.inside_s(at)
        waits = exchanged_s[at] if exchanged_s else (0.0, 0.0)
        times[at, "forward"] += forward_s + waits[0]
        times[at, "backward"] += both_s - forward_s + repeated_s + waits[1]
        times[at, "update"] += plan.summed_s(at)
    stages = tuple(
        replace(
            prediction, forward_s=times[at, "forward"], backward_s=times[at, "backward"], update_s=times[at, "update"],
            recompute_s=0.0, weight_grad_s=times.get((at, "weight gradient")),
        )
        for at, prediction in enumerate(plan.predictions.stages)
    )  # fmt: skip
    played = replace(plan, predictions=replace(plan.predictions, stages=stages))
    return simulate(played)


def _memory(run: RunReport) -> Section:
    columns = {"rank": Form.NUMBER, **_COMPARED}
    rows = [(str(m.rank), *_beside(format_bytes, m.measured_bytes, m.predicted_bytes)) for m in run.memory]
    heading = f"{_MEMORY[run.device]}, and what the plan predicts beside its reserve"
    return Section(heading, table=table(columns, rows))


def _checked(check: GradientCheck) -> Section:
    lines = [
        f"loss {check.loss:.15g}; of the whole model {check.expected_loss:.15g}",
        f"gradients of {len(check.errors)} weights: largest error {check.largest:.1e} of a gradient's largest element",
    ]
    if check.wrong:
        stage, name, error = check.wrong[0]
        lines.append(f"{len(check.wrong)} differ; the first is {name} of stage {stage}, by {error:.1e}")
    if check.computed_whole:
        lines.append(
            f"{len(check.computed_whole)} operators that the plan cuts were computed whole by every rank of a group: "
            + ", ".join(check.computed_whole[:_NAMED])
        )
    return Section("gradients differ" if check.wrong else "gradients are the whole model's", tuple(lines))

"""What came of a run of a plan: gradients against the whole model's, losses, times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from planner.plans import Plan
from planner.report.tables import Form, Report, Section, table
from planner.simulate import simulate
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.runtime import GradientCheck, RunReport

_NAMED = 3


def run_document(found: RunReport) -> dict[str, Any]:
    """A run as JSON: losses, seconds of steps, the check of gradients, thread CPU seconds by stage and pass."""
    check = found.check
    checked = check and {
        "loss": check.loss,
        "expected_loss": check.expected_loss,
        "largest_error": check.largest,
        "wrong": [{"stage": stage, "parameter": name, "error": error} for stage, name, error in check.wrong],
        "computed_whole": list(check.computed_whole),
    }
    times, memory = ([asdict(each) for each in measured] for measured in (found.times, found.memory))
    document = {"losses": list(found.losses), "step_s": list(found.step_s), "check": checked, "times": times}
    return {**document, "memory": memory, "alone": found.alone}


def run_report(plan: Plan, found: RunReport, *, measured: bool = False) -> Report:
    """A run as it is shown.

    Args:
        plan: the plan.
        found: what came of it.
        measured: also say what an iteration would take with the times measured here, and what ranks kept.
    """
    sections = [] if found.check is None else [_checked(found.check)]
    if found.times:
        heading = f"thread CPU time of one micro-batch here, and what the plan predicts for {plan.hardware.name}"
        columns = {"stage": Form.NUMBER, "pass": Form.TEXT, **_COMPARED}
        rows = [(str(t.stage), t.kind, *_beside(format_seconds, t.measured_s, t.predicted_s)) for t in found.times]
        sections.append(Section(heading, table=table(columns, rows)))
    if measured:
        sections += [*_iteration(plan, found), _memory(found)]
    processes = f"{plan.world_size} processes" if found.alone is None else f"rank {found.alone} of {plan.world_size}"
    return Report(f"{plan.model.name}: {plan.schedule.name} on {processes}", tuple(sections))


_COMPARED = {"here": Form.FIGURE, "predicted": Form.FIGURE, "here / predicted": Form.FIGURE}


def _beside(form: Callable[[float], str], measured: float, predicted: float) -> tuple[str, str, str]:
    """A measured and a predicted figure, and how many times the second the first is."""
    return form(measured), form(predicted), f"{measured / predicted:.3g}" if predicted else ""


def _iteration(plan: Plan, found: RunReport) -> list[Section]:
    """An iteration played with the stages' times of this machine, which is what ranks with a core each would take."""
    if found.alone is not None:
        steps = ", ".join(format_seconds(s) for s in found.step_s[:_NAMED])
        line = f"{steps}: wall seconds of its steps; what others would send is stood in for"
        return [Section(f"rank {found.alone} alone", (line,))]
    times = {(t.stage, t.kind): t.measured_s for t in found.times}
    stages = tuple(
        replace(
            said, forward_s=times[at, "forward"], backward_s=times[at, "backward"], update_s=times[at, "update"],
            recompute_s=0.0,
        )
        for at, said in enumerate(plan.predictions.stages)
    )  # fmt: skip
    here = replace(plan, predictions=replace(plan.predictions, stages=stages))
    row = ("iteration", *_beside(format_seconds, simulate(here).step_s, simulate(plan).step_s))
    heading = "an iteration with a core for each rank: these times in the plan's orders, exchanges as predicted"
    return [Section(heading, table=table({"": Form.TEXT, **_COMPARED}, [row]))]


def _memory(found: RunReport) -> Section:
    columns = {"rank": Form.NUMBER, **_COMPARED}
    rows = [(str(m.rank), *_beside(format_bytes, m.measured_bytes, m.predicted_bytes)) for m in found.memory]
    heading = "memory by which a process grew, and what the plan predicts beside its reserve"
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

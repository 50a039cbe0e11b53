"""What came of a run of a plan: gradients against the whole model's, losses, times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.plans import Plan
from planner.report.tables import Form, Report, Section, table
from planner.units import format_seconds

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
    times = [
        {"stage": t.stage, "kind": t.kind, "measured_s": t.measured_s, "predicted_s": t.predicted_s}
        for t in found.times
    ]
    return {"losses": list(found.losses), "step_s": list(found.step_s), "check": checked, "times": times}


def run_report(plan: Plan, found: RunReport) -> Report:
    """A run as it is shown."""
    sections = [] if found.check is None else [_checked(found.check)]
    if found.times:
        columns = {"stage": Form.NUMBER, "pass": Form.TEXT, "here": Form.FIGURE, "predicted": Form.FIGURE}
        rows = [
            (str(t.stage), t.kind, format_seconds(t.measured_s), format_seconds(t.predicted_s)) for t in found.times
        ]
        heading = f"thread CPU time of one micro-batch here, and what the plan predicts for {plan.hardware.name}"
        sections.append(Section(heading, table=table(columns, rows)))
    title = f"{plan.model.name}: {plan.schedule.name} on {plan.world_size} processes"
    return Report(title, tuple(sections))


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

"""Which number of devices reaches a target: the numbers that were tried, and what each takes."""

from __future__ import annotations

from planner.ask import TargetAnswer
from planner.report.plans import plan_report
from planner.report.tables import Form, Report, Section, Table, table
from planner.units import format_seconds, plural


def target_report(answer: TargetAnswer, *, remark: str = "") -> Report:
    """The plan that reaches a target, the verdict before it and the numbers of devices that were tried.

    Args:
        answer: of `planner.ask.least_devices`.
        remark: why the precision was chosen, where nobody asked for one.
    """
    plan = plan_report(answer.plan, remark=remark)
    used = plural(answer.plan.hardware.device_count, "device")
    step = format_seconds(answer.plan.predictions.reached_s)
    verdict = f"{answer.target.words} needs steps of at most {format_seconds(answer.most_s)}: {used}, steps of {step}"
    return Report(plan.title, (Section(lines=(verdict,), table=_tried(answer)), *plan.sections))


def _tried(answer: TargetAnswer) -> Table:
    priced = any(each.dollars_per_hour for each in answer.tried)
    columns = {"devices": Form.NUMBER, "step": Form.SECONDS, "against target": Form.CHANGE}
    columns |= {"a step": Form.FIGURE} if priced else {}
    rows = []
    for each in answer.tried:
        apart = None if each.step_s is None else each.step_s / answer.most_s - 1
        dollars = (f"${each.dollars_per_step:,.3g}" if each.dollars_per_step else None,) if priced else ()
        rows.append((each.devices, each.step_s, apart, *dollars, each.reason or ("reaches it" if each.reaches else "")))
    return table({**columns, "": Form.TEXT}, rows)

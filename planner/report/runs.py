"""Reports of runs of a plan: gradients compared with the whole model's, losses, times, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from planner.plans import Plan
from planner.report.tables import Form, Report, Section, table
from planner.simulate import Timeline, simulate
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.runtime import GradientCheck, RunReport
    from planner.runtime.jobs import ActionTime

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

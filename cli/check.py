"""`shardplan check`: check a plan by itself and against its model and hardware."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import click

import planner

from . import _partition
from ._options import against_options, flag, for_option, format_option, load_against, own_inputs, read_file, shown_name
from ._report import FOUND, say_checked, show, terminal_width, written

LACKING = 9
"""Exit code for a sound plan that a training framework cannot run."""


@click.command("check")
@click.argument("plan_file", metavar="PLAN")
@against_options
@click.option(
    "--search",
    "search_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="Time limit of a new search that checks bound, proof and alternatives; 0 for no search.",
)
@flag(
    "--replan",
    help="Plan anew for --model and --hardware, or those that the plan names, and exit with 7 unless the result is the "
    "same plan, as with a lock file.",
)
@for_option("Check that this training framework (megatron, torchtitan, ..) can run the plan; repeatable.")
@format_option("text", "json")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    plan_file: str,
    search_s: float,
    replan: bool,
    backends: tuple[str, ...],
    form: str,
    **against: Any,  # noqa: ANN401
) -> int:
    """Check PLAN: schema, digest, stages, boundaries, ties, schedule, sums. Exits with 7 if there are findings.

    With --for, also check that a training framework can run the plan as it is; exits with 9 if this is the only
    finding.

    With --model and --hardware, the plan's configuration is evaluated anew and every value of the file is compared with
    the result; a new search checks bound, proof and alternatives. With only one of them, the plan is compared with the
    model or the hardware. What could not be checked is listed.

    With --replan the plan is made anew, which takes as long as `shardplan plan`; differences are shown as by
    `shardplan diff`.

    \b
    Examples:
      shardplan check model.plan.json
      shardplan check model.plan.json --model model.onnx --dim seq=2048 --hardware dgx-a100 --nodes 2
      shardplan check model.plan.json --replan --model model.onnx --hardware cluster.yaml
      shardplan check model.plan.json --for megatron --for torchtitan
      shardplan check gnmt.partition.json --model gnmt_training.json
    """
    text = read_file(plan_file)
    if planner.partitions.is_partition_plan(text):
        return _partition.check(ctx, plan_file, text, against["model"], form)
    plan = planner.load_plan(text, name=shown_name(plan_file))
    if replan:
        against = own_inputs(plan, plan_file, against)
    inputs = load_against(plan.hardware.stack, against)
    if replan:
        return _replanned(plan_file, plan, *inputs, form=form)
    report = planner.check_plan(plan, *inputs, search_s=search_s, backends=backends)
    names = {"plan": plan_file, "model": against["model"], "hardware": against["hardware"]}
    inputs_named = " and ".join(f"{what} {names[what]}" for what in ("model", "hardware") if names[what])
    counts = {"stage": len(plan.stages), "rank": plan.world_size, "operator": plan.model.operators}
    ok = f"ok ({', '.join(planner.units.plural(number, noun) for noun, number in counts.items())})"
    ok += f", checked against {inputs_named}" if inputs_named else ""
    remarks = ["not checked:", *_hanging(report.unchecked)] if report.unchecked else []
    ok += f", taken as it is by {' and '.join(backends)}" if backends else ""
    code = say_checked(form, names, report.findings, ok, remarks, unchecked=report.unchecked)
    lacking = all(finding.fault == planner.plans.Fault.BACKEND for finding in report.findings)
    return LACKING if code and lacking else code


def _hanging(lines: Sequence[str]) -> list[str]:
    """Lines indented by two spaces and wrapped to the terminal."""
    width = terminal_width() or max(map(len, lines)) + 2
    return [
        part for line in lines for part in textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")
    ]


def _replanned(name: str, plan: Any, graph: Any, cluster: Any, *, form: str) -> int:  # noqa: ANN401
    """Print whether planning anew gives the same plan, and the differences; returns the exit code."""
    anew: Any
    try:
        anew = planner.replan(plan, graph, cluster)
    except planner.InfeasibleError as error:
        anew = planner.plans.infeasible_answer(error, graph.fingerprint, cluster.fingerprint, plan.provenance)
    comparison = planner.plans.compare_answers(plan, anew)
    same = isinstance(anew, planner.Plan) and anew.digest == plan.digest
    if form == "json":
        document = {
            "plan": name,
            "ok": same,
            "verdict": planner.report.diff_verdict(comparison),
            "causes": comparison.causes,
        }
        document |= {"decisions": comparison.decisions, "costs": comparison.costs, "changes": comparison.changes}
        click.echo(written(None, document, "json"), nl=False)
    elif same:
        remark = (
            "" if anew == plan else f"; made by version {plan.provenance.version}, this is {anew.provenance.version}"
        )
        click.echo(f"{name}: planning anew gives the same plan{remark}")
    else:
        click.echo(f"{name}: planning anew gives a different answer\n")
        causes = planner.check.attribute(plan, anew) if isinstance(anew, planner.Plan) else None
        show(planner.report.diff_report(comparison, causes))
    return 0 if same else FOUND

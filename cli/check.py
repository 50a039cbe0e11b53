"""`shardplan check`: is a plan whole, and is it for this model and this hardware?"""

from __future__ import annotations

import click

from . import _partition
from ._options import against_options, for_option, format_option, load_against
from ._report import say_checked

LACKING = 9
"""Exit code for a sound plan that needs what a training framework lacks."""


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
    help="Time for searching again what the plan claims about all others; 0: do not.",
)
@for_option("Say what this training framework (megatron, torchtitan, ..) lacks of what the plan needs; repeatable.")
@format_option("text", "json")
def command(
    plan_file: str,
    model: str | None,
    dims: tuple[str, ...],
    costs: str | None,
    hardware: str | None,
    nodes: int | str | None,
    stack: str,
    search_s: float,
    backends: tuple[str, ...],
    form: str,
) -> int:
    """Check PLAN: schema, digest, stages, boundaries, ties, schedule, sums; exits with 7 when something is wrong.

    With --for also whether a training framework takes the plan as it is; exits with 9 when it is sound, but needs what
    the framework lacks.

    With --model and --hardware the plan's own decision is evaluated anew, as planning does it: every value of the file
    is compared with what comes out, and what the plan claims about all other plans is searched again. With one of them
    what the model or the hardware alone can tell. What could not be checked is listed.

    \b
    Examples:
      shardplan check model.plan.json
      shardplan check model.plan.json --model model.onnx --dim seq=2048 --hardware dgx-a100 --nodes 2
      shardplan check model.plan.json --for megatron --for torchtitan
      shardplan check gnmt.partition.json --model gnmt_training.json
    """
    import planner

    if planner.is_partition_plan(plan_file):
        given = {"--dim": dims, "--costs": costs, "--hardware": hardware, "--nodes": nodes, "--stack": stack}
        given["--for"] = backends
        return _partition.check(plan_file, model, form, [flag for flag, value in given.items() if value])
    plan = planner.read_plan(plan_file)
    against = load_against(
        plan.hardware.stack, model=model, dims=dims, costs=costs, hardware=hardware, nodes=nodes, stack=stack
    )
    report = planner.check_plan(plan, *against, search_s=search_s, backends=backends)
    names = {"plan": plan_file, "model": model, "hardware": hardware}
    known = " and ".join(f"{what} {names[what]}" for what in ("model", "hardware") if names[what])
    counts = {"stage": len(plan.stages), "rank": plan.world_size, "operator": plan.model.operators}
    ok = f"ok ({', '.join(planner.plural(number, noun) for noun, number in counts.items())})"
    ok += f", checked against {known}" if known else ""
    remarks = ["not checked:", *(f"  {line}" for line in report.unchecked)] if report.unchecked else []
    ok += f", taken as it is by {' and '.join(backends)}" if backends else ""
    code = say_checked(form, names, report.findings, ok, remarks, unchecked=report.unchecked)
    lacking = all(finding.fault == planner.plans.Fault.BACKEND for finding in report.findings)
    return LACKING if code and lacking else code

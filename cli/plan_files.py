"""Commands on one plan file: check, explain, simulate, report, export, migrate; and the schemas of files."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import planner

from . import _options, _partition
from ._inputs import own_inputs
from ._options import Options, flag, load_against, read_file, shown_name
from ._report import FOUND, progress_line, say, say_checked, say_document, show, terminal_width, written
from .run import model_of_plan


@_options.command("explain")
@click.argument("plan_file", type=_options.PLAN, metavar="PLAN")
@_options.against_options
@_options.set_option
@_options.price_option
@click.option(
    "--why-not", metavar="CHOICE",
    help="Price this choice and compare it with the plan: tp=4,pp=8; also cp, ep, dp, interleave, micro-batch, zero, "
    "schedule and recompute (never, always, or modules as mlp+act). Values that are left open are chosen best. Uses "
    "the model and the hardware that the plan names, unless others are given.",
)  # fmt: skip
@_options.flag(
    "--worth",
    help="Plan the job again with 1 GiB more memory, with each link twice as fast, with one more node and without each "
    "limit, and show the gains. Takes a search each; uses --model and --hardware, or those that the plan names.",
)
@_options.format_option("text", "json", "markdown")
def explain(given: Options) -> None:
    """Explain PLAN: bottleneck, memory, alternatives and their cost, what is proven, what is not modelled.

    With --model and --hardware, also explain how operators are split over the ranks of a group, with the cost of other
    splits.

    \b
    Examples:
      shardplan explain model.plan.json
      shardplan explain model.plan.json --model model.onnx --hardware dgx-a100 --nodes 2
      shardplan explain 70b.plan.json --why-not tp=4,pp=8
      shardplan explain model.plan.json --model model.onnx --hardware dgx-a100 --nodes 2 --worth
      shardplan explain model.plan.json --format markdown >> summary.md
    """
    if planner.published.is_partition_plan(given.plan_file):
        _partition.explain(given)
        return
    plan = planner.read_plan(given.plan_file)
    if given.why_not:
        planner.ask.read_choice(given.why_not)
    against = own_inputs(plan, given) if given.why_not or given.worth else given
    if bool(against.model) is not bool(against.hardware):
        raise click.UsageError("--model and --hardware must be given together: splits are priced for both")
    if given.price:
        plan = planner.with_price(plan, given.price)
    graph, cluster = load_against(plan.hardware.stack, against)
    if given.why_not:
        answer = planner.explain_why_not(plan, graph, cluster, given.why_not)
        show(planner.report.why_not_report(answer), answer, given.form)
        return
    if given.worth:
        found = _worth(plan, graph, cluster, against)
        show(planner.report.worth_report(plan, found), found, given.form)
        return
    if graph is not None and graph.fingerprint == plan.model.fingerprint:
        graph = planner.rebatch(graph, plan.micro_batches.size)
    explanation = planner.plans.explain_plan(plan, graph, cluster)
    report = planner.report.explanation_report(explanation)
    show(report, planner.report.explanation_document(explanation), given.form)


def _worth(plan: Any, graph: Any, cluster: Any, against: Options) -> Any:  # noqa: ANN401
    """The gains of changes; with one more node only if the cluster has nodes."""

    def larger() -> Any:  # noqa: ANN401
        nodes = cluster.device_count // cluster.node_size + 1
        return _options.load_hardware(against, nodes=nodes, stack=cluster.stack)

    with progress_line(False, counted=False, doing="planning with more of everything"):
        return planner.find_worth(plan, graph, cluster, larger if cluster.node_size else None)


PLAIN_WIDTH = 110
"""Columns of the timeline if the output is no terminal."""


@_options.command("simulate")
@click.argument("plan_file", type=_options.PLAN, metavar="PLAN")
@_options.format_option("text", "json")
@_options.file_to_write("--svg", "svg_file", help="Also draw the timeline to this SVG file.")
@_options.file_to_write(
    "--trace", "trace_file", help="Also write a trace of every action, for ui.perfetto.dev or chrome://tracing."
)
@click.option(
    "--overlap-transfers/--blocking-transfers",
    "overlap",
    default=None,
    help="Whether transfers between stages overlap with computation or block the stage. [default: as in the plan]",
)
@click.option("--width", type=click.IntRange(min=40), help="Columns of the timeline. [default: the terminal's]")
def simulate(given: Options) -> None:
    """Simulate PLAN's schedule: step time, bubble, memory over time, and the error of the plan's prediction.

    \b
    Examples:
      shardplan simulate model.plan.json
      shardplan simulate model.plan.json --svg model.svg --trace model.trace.json
      shardplan simulate model.plan.json --overlap-transfers --format json
    """
    if given.form == "json":
        _options.refuse_others(vars(given).keys() - {"width"}, "--format json, which has no timeline")
    transfers = None
    if given.overlap is not None:
        transfers = planner.Transfers.OVERLAPPED if given.overlap else planner.Transfers.BLOCKING
    timeline = planner.simulate_plan(planner.read_plan(given.plan_file), transfers=transfers)
    if given.svg_file:
        planner.files.write_whole(given.svg_file, planner.draw_svg(timeline))
    if given.trace_file:
        planner.files.write_whole(given.trace_file, planner.trace_json(timeline))
    if given.form == "json":
        say_document(json.dumps(planner.simulate.timeline_document(timeline)) + "\n")
        return
    show(planner.report.timeline_report(timeline, width=given.width or terminal_width() or PLAIN_WIDTH))
    for what, file in (("picture", given.svg_file), ("trace", given.trace_file)):
        if file:
            say(f"wrote {what} to {file}")


@_options.command("report")
@click.argument("plan_file", type=_options.PLAN, metavar="PLAN")
@_options.file_to_write("--output", "-o", required=True, help="HTML file to write; `-` is standard output.")
@_options.against_options
@_options.set_option
@_options.price_option
def report(given: Options) -> None:
    """Write PLAN as a self-contained HTML page: model, timeline, memory, time by kind, alternatives.

    The page needs no network and no other file. The roofline of the costliest operators needs the model and the
    hardware: those that the plan names are used if they can be found and are unchanged; else give --model and
    --hardware.

    \b
    Examples:
      shardplan report model.plan.json -o report.html
      shardplan report model.plan.json -o report.html --model model.onnx --hardware dgx-a100 --nodes 2
      shardplan plan gpt2 -H dgx-a100 -o - | shardplan report - -o - > report.html
    """
    plan = planner.load_plan(read_file(given.plan_file), name=shown_name(given.plan_file))
    if given.price:
        plan = planner.with_price(plan, given.price)
    named = not (given.model or given.hardware)
    try:
        inputs = own_inputs(plan, given) if named else given
        page = planner.report.plan_page(plan, *load_against(plan.hardware.stack, inputs))
    except (planner.ModelError, planner.HardwareError, planner.UsageError) as error:
        if not named:
            raise
        page = planner.report.plan_page(plan, lacking=str(error))
    planner.files.write_whole(given.output, page)


@_options.command("export")
@click.argument("plan_file", type=_options.PLAN, metavar="PLAN")
@click.option(
    "--to",
    "name",
    required=True,
    metavar="NAME",
    help="Target framework: megatron, torchtitan, deepspeed, torch, jax, transformers, galvatron or onnx.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Folder for the files; created if missing, existing files are replaced.",
)
@click.option(
    "--model",
    "-m",
    type=_options.MODEL,
    help="The plan's model file or bundled model, to check that the ranks divide its attention heads; onnx writes a "
    "copy of it.",
)
@_options.dims_option
@_options.format_option("text", "json")
def export(given: Options) -> None:
    """Write PLAN as launch script and configuration of a training framework.

    EXPORT.md in the same folder lists how each part of the plan was mapped, and what could not be mapped. A plan that
    the framework cannot express is refused with all reasons and what avoids them; the exit code is 7 then.

    \b
    Examples:
      shardplan export model.plan.json --to megatron -o megatron
      shardplan export model.plan.json --to torchtitan -o titan --model model.onnx
    """
    plan, model, folder = planner.read_plan(given.plan_file), given.model, given.folder
    if given.dims and not model:
        raise click.UsageError("--dim needs --model")
    graph = _options.load_graph(given) if model else None
    exported = planner.export.export(plan, given.name, graph, model_of_plan(plan, model) if model else None)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise planner.OutputError(
            f"cannot make the folder: {error.strerror or error}", where=folder, hint="name another with -o"
        ) from error
    paths = [Path(folder, file) for file in exported.files]
    for path, text in zip(paths, exported.files.values(), strict=True):
        planner.files.write_whole(str(path), text)
    if given.form == "json":
        files = [str(path) for path in paths]
        document = {"files": files, "mapped": exported.mapped, "left_out": exported.left_out}
        say_document(json.dumps(document, indent=2) + "\n")
        return
    for path in paths:
        say(f"wrote {path}")
    say(f"{planner.units.plural(len(exported.left_out), 'thing')} not mapped: see {Path(folder, planner.export.PAGE)}")


@_options.command("migrate")
@click.argument("old", type=_options.PLAN)
@click.option("--output", "-o", metavar="NEW", help="File to write; - is standard output. [default: replace OLD]")
def migrate(given: Options) -> None:
    """Convert the plan file OLD to this version; `-` reads standard input.

    Decisions and predictions do not change. A file of this version is written as it is. A plan with a wrong digest
    keeps a wrong digest, so that `check` still detects that it was edited.

    \b
    Examples:
      shardplan migrate old.plan.json -o new.plan.json
      shardplan migrate - < old.plan.json > new.plan.json
    """
    old, output = given.old, given.output
    plan = planner.load_plan(read_file(old), name=shown_name(old))
    if not output and old != "-" and not os.path.exists(old):
        raise planner.UsageError(f"{old} cannot be written over", hint="name the new file with -o, or - with it")
    target = output or old
    if target == "-":
        click.echo(planner.dump_plan(plan), nl=False)
        return
    planner.write_plan(plan, target)
    say(f"plan written to {target}")


@_options.command("schema")
@click.argument("subject", type=click.Choice(["plan", "configuration", "partition", "hardware"]))
def schema(given: Options) -> None:
    """Print the JSON Schema of plan files, configuration files, partition plans or hardware profiles.

    \b
    Examples:
      shardplan schema plan > plan.schema.json
      shardplan schema hardware > hardware.schema.json
    """
    schemas = {
        "plan": planner.plans.plan_schema,
        "configuration": planner.plans.configuration_schema,
        "partition": planner.published.partition_schema,
        "hardware": planner.hardware.profile_json_schema,
    }
    click.echo(json.dumps(schemas[given.subject](), indent=1, ensure_ascii=False))


LACKING = 9
"""Exit code for a sound plan that a training framework cannot run."""


@_options.command("check")
@click.argument("plan_file", type=_options.PLAN, metavar="PLAN")
@_options.against_options
@_options.set_option
@click.option(
    "--search",
    "search_s",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="Time limit of a new search that checks bound, proof, alternatives and free choice; 0 for no search.",
)
@flag(
    "--replan",
    help="Plan anew for --model and --hardware, or those that the plan names, and exit with 7 unless the result is the "
    "same plan, as with a lock file.",
)
@_options.for_option("Check that this training framework (megatron, torchtitan, ..) can run the plan; repeatable.")
@_options.format_option("text", "json")
def check(given: Options) -> int:
    """Check PLAN: schema, digest, stages, boundaries, ties, schedule, sums. Exits with 7 if there are findings.

    With --for, also check that a training framework can run the plan as it is; exits with 9 if this is the only
    finding.

    With --model and --hardware, the plan's configuration is evaluated anew and every value of the file is compared with
    the result; a new search checks bound, proof, alternatives and free choice. With only one of them, the plan is
    compared with the model or the hardware. What could not be checked is listed.

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
    text, plan_file, backends = read_file(given.plan_file), given.plan_file, given.backends
    if planner.published.is_partition_plan(text):
        return _partition.check(text, given)
    plan = planner.load_plan(text, name=shown_name(plan_file))
    against = own_inputs(plan, given) if given.replan else given
    inputs = load_against(plan.hardware.stack, against)
    if given.replan:
        return _replanned(plan_file, plan, *inputs, form=given.form)
    report = planner.check_plan(plan, *inputs, search_s=given.search_s, backends=backends)
    names = {"plan": plan_file, "model": given.model, "hardware": given.hardware}
    inputs_named = " and ".join(f"{what} {names[what]}" for what in ("model", "hardware") if names[what])
    counts = {"stage": len(plan.stages), "rank": plan.world_size, "operator": plan.model.operators}
    ok = f"ok ({', '.join(planner.units.plural(number, noun) for noun, number in counts.items())})"
    ok += f", checked against {inputs_named}" if inputs_named else ""
    remarks = ["not checked:", *_hanging(report.unchecked)] if report.unchecked else []
    ok += f", taken as it is by {' and '.join(backends)}" if backends else ""
    code = say_checked(given.form, names, report.findings, ok, remarks, unchecked=report.unchecked)
    lacking = all(finding.fault == planner.plans.Fault.BACKEND for finding in report.findings)
    return LACKING if code and lacking else code


def _hanging(lines: Sequence[str]) -> list[str]:
    """Lines indented by two spaces and wrapped to the terminal."""
    shown = list(map(planner.escaping.visible, lines))
    width = terminal_width() or max(map(len, shown)) + 2
    return [
        part for line in shown for part in textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")
    ]


def _replanned(name: str, plan: Any, graph: Any, cluster: Any, *, form: str) -> int:  # noqa: ANN401
    """Print whether planning anew gives the same plan, and the differences; returns the exit code."""
    anew: Any
    try:
        anew = planner.replan(plan, graph, cluster)
    except planner.InfeasibleError as error:
        anew = planner.plans.infeasible_answer(error, graph.fingerprint, cluster.fingerprint, plan.provenance)
    comparison = planner.plans.compare_plans(plan, anew)
    same = isinstance(anew, planner.Plan) and anew.digest == plan.digest
    if form == "json":
        document = {
            "plan": name,
            "ok": same,
            "verdict": planner.report.diff_verdict(comparison),
            "causes": comparison.causes,
        }
        document |= {"decisions": comparison.decisions, "costs": comparison.costs, "changes": comparison.changes}
        say_document(written(None, document, "json"))
    elif same:
        remark = (
            "" if anew == plan else f"; made by version {plan.provenance.version}, this is {anew.provenance.version}"
        )
        say(f"{name}: planning anew gives the same plan{remark}")
    else:
        say(f"{name}: planning anew gives a different answer")
        click.echo()
        causes = planner.check.attribute(plan, anew) if isinstance(anew, planner.Plan) else None
        show(planner.report.diff_report(comparison, causes))
    return 0 if same else FOUND

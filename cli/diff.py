"""`shardplan diff`: compare two plans: what changed, what the planner decides, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

import planner

from . import _options, _partition
from ._options import Options, flag, read_file, shown_name
from ._report import say_document, show, written

AREAS = (
    "model", "hardware", "options", "batches", "stages", "blocks", "shardings", "boundaries", "parameters", "schedule",
    "requires", "predictions", "alternatives", "coverage", "notes",
)  # fmt: skip


@_options.command("diff")
@click.argument("old", type=_options.PLAN)
@click.argument("new", type=_options.PLAN)
@_options.format_option("text", "json", "markdown", "github")
@click.option(
    "--tolerance",
    type=_options.fraction(float("inf")),
    default="0%",
    show_default=True,
    help="Treat predicted numbers as equal if they differ by at most this, such as 1%.",
)
@click.option("--ignore", multiple=True, type=click.Choice(AREAS), help="Leave out this part of the plans; repeatable.")
@click.option(
    "--fail-on",
    "gates",
    multiple=True,
    metavar="GATE",
    help="Exit with 1 only if this gate fails, not on any difference: a change (step_time:+3%, throughput:-3%), a "
    "share (peak_memory:95%, of all memory of a device), a limit (step_time:2s, peak_memory:70GiB), a severity (error, "
    "warning, info), a rule, or `default`: step_time:+3%, peak_memory:+5% and error; repeatable.",
)
@click.option(
    "--rules",
    type=_options.FileText("rules"),
    metavar="FILE",
    help="YAML file of your own severities: `rule: error|warning|info|off`.",
)
@click.option(
    "--model",
    "models",
    type=_options.MODEL,
    multiple=True,
    metavar="MODEL",
    help="Model of one of the plans, to price each cause; repeatable.",
)
@click.option(
    "--hardware",
    "-H",
    "hardware",
    type=_options.HARDWARE,
    multiple=True,
    metavar="NAME",
    help="Hardware of one of the plans, likewise; repeatable.",
)
@_options.dims_option
@flag("--all", "every_value", help="Also list every value that differs.")
def command(given: Options) -> int:
    """Compare two plan files: what changed, what the planner decides differently, and what it costs.

    OLD and NEW are files, `-` (standard input), or REV:path (a file of a git revision). Layers are matched by
    structure, so that an additional layer is one change. With --model and --hardware the old decisions are priced under
    the new inputs, which gives the cost of each cause; an input belongs to the plan that has its fingerprint.

    Exits with 0 if the plans are equal and with 1 if they differ; with --fail-on, with 1 if a gate fails. docs/diff.md
    lists the rules.

    \b
    Examples:
      shardplan diff old.plan.json new.plan.json
      shardplan diff main:model.plan.json model.plan.json --fail-on default
      shardplan diff main:p.json p.json -H main:cluster.yaml -H cluster.yaml --model model.onnx --format markdown
      shardplan diff <(git show HEAD:model.plan.json) model.plan.json --fail-on error --format github
    """
    old, new, form = given.old, given.new, given.form
    if old == new == "-":
        raise planner.UsageError("only one of the two plans can come from standard input", hint="name the other one")
    watched = planner.plans.gates(given.gates)
    texts = read_file(old), read_file(new)
    if any(planner.partitions.is_partition_plan(text) for text in texts):
        return _partition.diff(texts, given)
    before, after = (
        planner.plans.load_answer(text, name=shown_name(path)) for text, path in zip(texts, (old, new), strict=True)
    )
    said = read_file(given.rules, "name a file of rules") if given.rules else None
    rules = None if said is None else planner.plans.read_rules(said, name=given.rules)
    ignored = tuple(planner.plans.Area(area) for area in given.ignore)
    comparison = planner.plans.compare_plans(before, after, tolerance=given.tolerance, ignore=ignored, rules=rules)
    causes = _attributed(before, after, given)
    failures = {gate.text: gate.struck(comparison.costs, comparison.remarks) for gate in watched}
    if watched and not isinstance(after, planner.Plan):
        failures["a plan that fits"] = comparison.decisions[0]
    if form == "markdown":
        say_document(planner.report.diff_markdown(comparison, causes, failures), form)
    elif form == "github":
        file = "" if new == "-" else new
        say_document(planner.report.diff_annotations(comparison, failures, file=file), form)
    elif form == "json":
        document = {"old": old, "new": new, "verdict": planner.report.diff_verdict(comparison, failures)}
        further = {"attribution": causes, "gates": failures}
        say_document(written(None, {**document, **_fields(comparison), **further}, "json"))
    else:
        show(planner.report.diff_report(comparison, causes, failures, every_value=given.every_value))
    if watched:
        return _partition.DIFFERENT if any(failures.values()) else 0
    return _partition.DIFFERENT if comparison.changes or comparison.decisions or comparison.causes else 0


def _fields(comparison: Any) -> dict[str, Any]:  # noqa: ANN401
    return {name: getattr(comparison, name) for name in comparison.__dataclass_fields__}


def _attributed(old: Any, new: Any, given: Options) -> Any:  # noqa: ANN401
    """The difference by cause; None if a side has no plan."""
    plans = [plan for plan in (old, new) if isinstance(plan, planner.Plan)]
    if given.dims and not given.models:
        raise planner.UsageError("--dim needs --model", hint="name the model that has the dimension")
    graphs = []
    for model in given.models:
        with _options.file_at(model) as path:
            graphs.append(_options.load_graph(Options(model=path, dims=given.dims)))
    clusters = []
    for name in given.hardware:
        with _options.file_at(name) as path:
            clusters.append(_cluster(path, plans))
    return planner.check.attribute(old, new, graphs, clusters) if len(plans) == 2 else None


def _cluster(name: str, plans: Sequence[Any]) -> Any:  # noqa: ANN401
    """The cluster, with nodes and stack of the plan that it belongs to, if there is one."""
    cluster = planner.load_cluster(name)
    for plan in plans:
        for nodes in (None, plan.hardware.nodes):
            try:
                stack = planner.hardware.named_stack(plan.hardware.stack)
                sized = planner.load_cluster(name, nodes=nodes, stack=stack)
            except planner.ShardplanError:  # the profile does not have so many nodes: it belongs to the other plan
                continue
            if sized.fingerprint == plan.hardware.fingerprint:
                return sized
    return cluster

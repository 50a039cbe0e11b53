"""`shardplan diff`: compare two plans: what changed, what the planner decides, what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

import planner

from . import _options, _partition
from ._options import Options, flag, read_file, shown_name
from ._report import FOUND, say_document, show, written
from ._repository import Repository
from ._review import Reviewer

AREAS = (
    "model", "hardware", "options", "batches", "stages", "blocks", "shardings", "boundaries", "parameters", "schedule",
    "requires", "predictions", "alternatives", "coverage", "notes",
)  # fmt: skip


@_options.command("diff")
@click.argument("old", type=_options.PLAN)
@click.argument("new", type=_options.PLAN, required=False)
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
@_options.file_to_write(
    "--comment",
    "comment_file",
    help="With a revision alone: also write a comment in Markdown, if there is anything to say.",
)
def command(given: Options) -> int:
    """Compare two plan files: what changed, what the planner decides differently, and what it costs.

    OLD and NEW are files, `-` (standard input), or REV:path (a file of a git revision). Layers are matched by
    structure, so that an additional layer is one change. With --model and --hardware the old decisions are priced under
    the new inputs, which gives the cost of each cause; an input belongs to the plan that has its fingerprint.

    Exits with 0 if the plans are equal and with 1 if they differ; with --fail-on, with 1 if a gate fails. docs/diff.md
    lists the rules.

    With a revision alone (`shardplan diff main`), all `*.plan.json` of this git repository are compared with those of
    the revision: changed, new, renamed and removed ones are shown by name, and those whose model, hardware or other
    source is no longer the one that they were made for are stale.

    \b
    Examples:
      shardplan diff old.plan.json new.plan.json
      shardplan diff main:model.plan.json model.plan.json --fail-on default
      shardplan diff main:p.json p.json -H main:cluster.yaml -H cluster.yaml --model model.onnx --format markdown
      shardplan diff main --fail-on default --comment comment.md
      shardplan diff <(git show HEAD:model.plan.json) model.plan.json --fail-on error --format github
    """
    old, new, form = given.old, given.new, given.form
    if new is None:
        return _review(given)
    if given.comment_file:
        raise planner.UsageError("--comment is for a revision alone", hint="leave it out, or leave out NEW")
    if old == new == "-":
        raise planner.UsageError("only one of the two plans can come from standard input", hint="name the other one")
    watched = planner.plans.gates(given.gates)
    texts = read_file(old), read_file(new)
    if any(planner.published.is_partition_plan(text) for text in texts):
        return _partition.diff(texts, given)
    before, after = (
        planner.plans.load_answer(text, name=shown_name(path)) for text, path in zip(texts, (old, new), strict=True)
    )
    comparison = _compared(before, after, given, _rules(given))
    causes = _attributed(before, after, given)
    failures = _failures(comparison, after, watched)
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


def _review(given: Options) -> int:
    """Compare all plans of the repository with those of a revision.

    Raises:
        UsageError: there is no such revision, or an option is for two plans only.
    """
    for name in ("models", "hardware", "dims"):
        if getattr(given, name):
            raise planner.UsageError(
                "a revision alone takes models and hardware from the repository",
                hint="leave out --model, --hardware and --dim, or name two plans",
            )
    watched, rules = planner.plans.gates(given.gates), _rules(given)
    reviewer = Reviewer(
        given,
        lambda before, after: _compared(before, after, given, rules),
        lambda comparison, after: _failures(comparison, after, watched),
        planner.plans.severities(rules),
    )
    reviews, unchanged = reviewer.reviews(Repository.at(given.old))
    if given.comment_file and reviews:
        planner.files.write_whole(given.comment_file, planner.report.review_markdown(reviews, unchanged))
    if given.form == "json":
        say_document(written(None, planner.report.review_document(reviews, unchanged), "json"))
    elif given.form == "markdown":
        say_document(planner.report.review_markdown(reviews, unchanged), given.form)
    elif given.form == "github":
        say_document(planner.report.review_annotations(reviews, unchanged), given.form)
    else:
        say_document(planner.report.review_text(reviews, unchanged, every_value=given.every_value), given.form)
    if any(remark.rule == "unreadable-plan" for review in reviews for remark in review.comparison.remarks):
        return FOUND
    failed = any(any(review.failures.values()) for review in reviews) if watched else bool(reviews)
    return _partition.DIFFERENT if failed else 0


def _rules(given: Options) -> Any:  # noqa: ANN401
    """Severities of the user's own, by rule; None if there are none."""
    if not given.rules:
        return None
    return planner.plans.read_rules(read_file(given.rules, "name a file of rules"), name=given.rules)


def _compared(before: Any, after: Any, given: Options, rules: Any) -> Any:  # noqa: ANN401
    """The comparison of two plans with the options of the command."""
    ignored = tuple(planner.plans.Area(area) for area in given.ignore)
    return planner.plans.compare_plans(before, after, tolerance=given.tolerance, ignore=ignored, rules=rules)


def _failures(comparison: Any, after: Any, watched: Sequence[Any]) -> dict[str, str]:  # noqa: ANN401
    """By gate why it fails; with any gates, also those that hold of every plan."""
    closed = planner.plans.CLOSED if watched else {}
    others = [remark for remark in comparison.remarks if remark.rule not in closed]
    failures = {gate.text: gate.struck(comparison.costs, others) for gate in watched if after is not None}
    if watched and isinstance(after, planner.plans.InfeasibleAnswer):
        failures["a plan that fits"] = comparison.decisions[0]
    grave = [remark for remark in comparison.remarks if remark.severity is planner.plans.Severity.ERROR]
    found = {remark.rule: remark.message for remark in reversed(grave)}
    failures |= {name: found[rule] for rule, name in closed.items() if rule in found}
    return failures


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
            graphs.append(_graph(path, plans, given.dims))
    clusters = []
    for name in given.hardware:
        with _options.file_at(name) as path:
            clusters.append(_cluster(path, plans))
    return planner.check.attribute(old, new, graphs, clusters) if len(plans) == 2 else None


def _graph(model: str, plans: Sequence[Any], dims: Sequence[str]) -> Any:  # noqa: ANN401
    """The model at the sizes given, else at those of the plan that it belongs to, if there is one.

    Raises:
        ShardplanError: the model cannot be read at any of these sizes; the error is that of the last ones.
    """
    graph, error = None, None
    for own in dict.fromkeys([tuple(dims)] if dims else [*(plan.provenance.dims for plan in plans), ()]):
        try:
            graph = _options.load_graph(Options(model=model, dims=own))
        except planner.ShardplanError as problem:
            error = problem
            continue
        if any(graph.fingerprint == plan.model.fingerprint for plan in plans):
            return graph
    if graph is None and error is not None:
        raise error
    return graph


def _cluster(name: str, plans: Sequence[Any]) -> Any:  # noqa: ANN401
    """The cluster, with nodes, stack and changed figures of the plan that it belongs to, if there is one."""
    cluster = planner.load_cluster(name)
    for plan in plans:
        for nodes in (None, plan.hardware.nodes):
            try:
                stack = planner.hardware.named_stack(plan.hardware.stack)
                sized = planner.load_cluster(name, nodes=nodes, stack=stack, changes=plan.provenance.changes)
            except planner.ShardplanError:  # the profile does not have so many nodes: it belongs to the other plan
                continue
            if sized.fingerprint == plan.hardware.fingerprint:
                return sized
    return cluster

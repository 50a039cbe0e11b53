"""`shardplan explain`: explain a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

import planner

from . import _partition
from ._options import (
    against_options,
    flag,
    format_option,
    load_against,
    load_hardware,
    own_inputs,
    price_option,
    set_option,
)
from ._report import progress_line, show


@click.command("explain")
@click.argument("plan_file", metavar="PLAN")
@against_options
@set_option
@price_option
@click.option(
    "--why-not", metavar="CHOICE",
    help="Price this choice and compare it with the plan: tp=4,pp=8; also cp, ep, dp, interleave, micro-batch, zero, "
    "schedule and recompute (never, always, or modules as mlp+act). Values that are left open are chosen best. Uses "
    "the model and the hardware that the plan names, unless others are given.",
)  # fmt: skip
@flag(
    "--worth",
    help="Plan the job again with 1 GiB more memory, with each link twice as fast, with one more node and without each "
    "limit, and show the gains. Takes a search each; uses --model and --hardware, or those that the plan names.",
)
@format_option("text", "json", "markdown")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    plan_file: str,
    price: float | None,
    why_not: str | None,
    worth: bool,
    form: str,
    **against: Any,  # noqa: ANN401
) -> None:
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
    if planner.partitions.is_partition_plan(plan_file):
        _partition.explain(ctx, plan_file, form)
        return
    plan = planner.read_plan(plan_file)
    if why_not:
        planner.ask.read_choice(why_not)
    if why_not or worth:
        against = own_inputs(plan, plan_file, against)
    if bool(against["model"]) is not bool(against["hardware"]):
        raise click.UsageError("--model and --hardware must be given together: splits are priced for both")
    if price:
        plan = planner.with_price(plan, price)
    graph, cluster = load_against(plan.hardware.stack, against)
    if why_not:
        answer = planner.explain_why_not(plan, graph, cluster, why_not)
        show(planner.report.why_not_report(answer), answer, form)
        return
    if worth:
        found = _worth(plan, graph, cluster, against)
        show(planner.report.worth_report(plan, found), found, form)
        return
    if graph is not None and graph.fingerprint == plan.model.fingerprint:
        graph = planner.rebatch(graph, plan.micro_batches.size)
    explanation = planner.plans.explain_plan(plan, graph, cluster)
    show(planner.report.explanation_report(explanation), explanation, form)


def _worth(plan: Any, graph: Any, cluster: Any, against: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """The gains of changes; with one more node only if the cluster has nodes."""

    def larger() -> Any:  # noqa: ANN401
        nodes = cluster.device_count // cluster.node_size + 1
        return load_hardware(against, nodes=nodes, stack=against["stack"] or plan.hardware.stack)

    with progress_line(False, counted=False, doing="planning with more of everything"):
        return planner.find_worth(plan, graph, cluster, larger if cluster.node_size else None)

"""`shardplan explain`: why a plan is as it is."""

from __future__ import annotations

import click

from . import _partition
from ._report import show


@click.command("explain")
@click.argument("plan_file", metavar="PLAN")
@click.option("--format", "form", type=click.Choice(["text", "json", "markdown"]), default="text", show_default=True)
def command(plan_file: str, form: str) -> None:
    """Say why PLAN is as it is: bottleneck, memory, what the next best plans cost, what is proven and what left out.

    \b
    Examples:
      shardplan explain model.plan.json
      shardplan explain model.plan.json --format markdown >> summary.md
    """
    import planner

    if planner.is_partition_plan(plan_file):
        _partition.explain(plan_file, form)
        return
    explanation = planner.explain_plan(planner.read_plan(plan_file))
    show(planner.explanation_report(explanation), explanation, form)

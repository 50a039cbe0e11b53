"""`shardplan diff`: what differs between two plans, by meaning."""

from __future__ import annotations

import click

from . import _partition
from ._options import format_option
from ._report import show

AREAS = (
    "model", "hardware", "options", "batches", "stages", "blocks", "shardings", "boundaries", "parameters", "schedule",
    "requires", "predictions", "alternatives", "coverage", "notes",
)  # fmt: skip


def _fraction(ctx: click.Context, param: click.Parameter, value: str) -> float:
    """`1%` or `0.01` as 0.01."""
    number, percent = (value[:-1], True) if value.endswith("%") else (value, False)
    try:
        fraction = float(number) / (100.0 if percent else 1.0)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is no fraction such as 1% or 0.01", ctx, param) from error
    if not 0.0 <= fraction < float("inf"):
        raise click.BadParameter(f"{value!r} is not at least 0", ctx, param)
    return fraction


@click.command("diff")
@click.argument("old")
@click.argument("new")
@format_option("text", "json", "markdown")
@click.option(
    "--tolerance",
    default="0%",
    show_default=True,
    callback=_fraction,
    help="Predicted numbers that differ by no more than this count as equal, such as 1%.",
)
@click.option("--ignore", multiple=True, type=click.Choice(AREAS), help="Leave this part out; repeatable.")
def command(old: str, new: str, form: str, tolerance: float, ignore: tuple[str, ...]) -> int:
    """Compare two plan files by meaning; exits with 0 when they say the same and with 1 when they differ.

    Moved blocks, changed replicas, meshes, layouts, boundaries, schedules and predictions are told by name; digest and
    provenance do not count.

    \b
    Examples:
      shardplan diff old.plan.json new.plan.json
      shardplan diff main.plan.json branch.plan.json --tolerance 1% --format markdown
      shardplan diff a.plan.json b.plan.json --ignore predictions --ignore alternatives
    """
    import planner

    if planner.is_partition_plan(old) or planner.is_partition_plan(new):
        return _partition.diff(old, new, form, tolerance, ignore)
    before, after = planner.read_plan(old), planner.read_plan(new)
    changes = planner.diff_plans(before, after, tolerance=tolerance, ignore=[planner.Area(area) for area in ignore])
    show(planner.diff_report(before, after, changes), {"old": old, "new": new, "changes": changes}, form)
    return _partition.DIFFERENT if changes else 0

"""`shardplan simulate`: simulate a plan's schedule in time and memory."""

from __future__ import annotations

import json

import click

import planner

from ._options import file_to_write, format_option, refuse_others
from ._report import show, terminal_width

PLAIN_WIDTH = 110
"""Columns of the timeline if the output is no terminal."""


@click.command("simulate")
@click.argument("plan_file", metavar="PLAN")
@format_option("text", "json")
@file_to_write("--svg", "svg_file", help="Also draw the timeline to this SVG file.")
@file_to_write(
    "--trace", "trace_file", help="Also write a trace of every action, for ui.perfetto.dev or chrome://tracing."
)
@click.option(
    "--overlap-transfers/--blocking-transfers",
    "overlap",
    default=None,
    help="Whether transfers between stages overlap with computation or block the stage. [default: as in the plan]",
)
@click.option("--width", type=click.IntRange(min=40), help="Columns of the timeline. [default: the terminal's]")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    plan_file: str,
    form: str,
    svg_file: str | None,
    trace_file: str | None,
    overlap: bool | None,
    width: int | None,
) -> None:
    """Simulate PLAN's schedule: step time, bubble, memory over time, and the error of the plan's prediction.

    \b
    Examples:
      shardplan simulate model.plan.json
      shardplan simulate model.plan.json --svg model.svg --trace model.trace.json
      shardplan simulate model.plan.json --overlap-transfers --format json
    """
    if form == "json":
        refuse_others(ctx, set(ctx.params) - {"width"}, "--format json, which has no timeline")
    transfers = None
    if overlap is not None:
        transfers = planner.Transfers.OVERLAPPED if overlap else planner.Transfers.BLOCKING
    timeline = planner.simulate_plan(planner.read_plan(plan_file), transfers=transfers)
    if svg_file:
        planner.files.write_whole(svg_file, planner.draw_svg(timeline))
    if trace_file:
        planner.files.write_whole(trace_file, planner.trace_json(timeline))
    if form == "json":
        click.echo(json.dumps(planner.simulate.timeline_document(timeline)))
        return
    show(planner.report.timeline_report(timeline, width=width or terminal_width() or PLAIN_WIDTH))
    for what, file in (("picture", svg_file), ("trace", trace_file)):
        if file:
            click.echo(f"wrote {what} to {file}")

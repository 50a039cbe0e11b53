"""`shardplan simulate`: play a plan's schedule out in time and memory."""

from __future__ import annotations

import json
import shutil
from itertools import groupby
from typing import TYPE_CHECKING

import click

from ._options import refuse_others

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from planner import Timeline

_STYLES = {
    "forward": "black on bright_blue",
    "recompute": "black on yellow",
    "backward": "black on green",
    "weight gradient": "black on cyan",
    "communication": "black on bright_red",
    "synchronisation": "black on magenta",
    "update": "black on white",
    "idle": "bright_black",
}
_PLAIN_WIDTH = 110


@click.command("simulate")
@click.argument("plan_file", metavar="PLAN")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--svg", "svg_file", type=click.Path(dir_okay=False), help="Also draw it to this SVG file.")
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(dir_okay=False),
    help="Also write every action to this file, for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "--overlap-transfers/--blocking-transfers",
    "overlap",
    default=None,
    help="Whether transfers between stages run beside computation or occupy the stage. [default: as the plan says]",
)
@click.option("--width", type=click.IntRange(min=40), help="Columns of the picture. [default: the terminal's]")
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
    """Play PLAN's schedule out: step time, bubble, memory over time, and how far the plan's own prediction is off.

    \b
    Examples:
      shardplan simulate model.plan.json
      shardplan simulate model.plan.json --svg model.svg --trace model.trace.json
      shardplan simulate model.plan.json --overlap-transfers --format json
    """
    import planner

    if form == "json":
        refuse_others(ctx, set(ctx.params) - {"width"}, "--format json, which has no picture")
    transfers = None
    if overlap is not None:
        transfers = planner.Transfers.OVERLAPPED if overlap else planner.Transfers.BLOCKING
    timeline = planner.simulate_plan(planner.read_plan(plan_file), transfers=transfers)
    if svg_file:
        planner.write_whole(svg_file, planner.draw_svg(timeline))
    if trace_file:
        planner.write_whole(trace_file, planner.trace_json(timeline))
    if form == "json":
        click.echo(json.dumps(planner.timeline_document(timeline)))
        return
    _print(timeline, width)
    for what, file in (("picture", svg_file), ("trace", trace_file)):
        if file:
            click.echo(f"wrote {what} to {file}")


def _print(timeline: Timeline, width: int | None) -> None:
    from rich.console import Console

    columns = width or shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns
    console = Console(width=columns, highlight=False, soft_wrap=True)
    _print_totals(console, timeline)
    _print_gantt(console, timeline, columns)
    console.print()
    console.print(_table(timeline), soft_wrap=False)
    _print_comparison(console, timeline)


def _print_totals(console: Console, timeline: Timeline) -> None:
    from rich.markup import escape

    from planner import format_fraction, format_seconds

    copies = f" x {timeline.copies} copies" if timeline.copies > 1 else ""
    console.print(
        f"[bold]{escape(timeline.name)}[/bold]: {timeline.schedule}, {timeline.micro_batches} micro-batches{copies}, "
        f"{timeline.transfers} transfers"
    )
    if timeline.iterations > 1:
        console.print(
            f"never drains: {timeline.iterations} iterations played, the step is the {timeline.cost.value}",
            style="bright_black",
        )
    console.print(
        f"step [bold]{format_seconds(timeline.step_s, 4)}[/bold]   {timeline.samples_per_s:,.4g} samples/s   "
        f"bubble {format_fraction(timeline.bubble_fraction)} of device time"
    )
    console.print()


def _print_gantt(console: Console, timeline: Timeline, columns: int) -> None:
    from rich.text import Text

    from planner import SYMBOLS, draw_gantt

    picture = draw_gantt(timeline, width=columns)
    if not console.is_terminal:
        for text in picture.lines():
            console.print(Text(text))
        return
    for row in picture.rows:
        line = Text(f"{row.label:<{picture.label_width}} ")
        for at, cells in enumerate(row.cells):
            line.append(" … " if at else "")
            for activity, run in groupby(cells):
                line.append(SYMBOLS[activity] * len(list(run)), style=_STYLES[activity.value])
        console.print(line)
    console.print(Text(f"{'':<{picture.label_width}} {picture.axis}"))
    legend = Text()
    for activity in picture.legend:
        legend.append(f" {SYMBOLS[activity]} ", style=_STYLES[activity.value]).append(f" {activity}  ")
    console.print(legend)
    for note in picture.notes:
        console.print(Text(note, style="bright_black"))


def _table(timeline: Timeline) -> Table:
    """Lanes with equal figures share a line."""
    from rich.table import Table

    from planner import format_bytes, rank_ranges

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("stage", "ranks", "compute", "communication", "idle", "in flight", "peak memory", "of"):
        table.add_column(name, justify="left" if name in ("stage", "ranks") else "right", no_wrap=True)
    lines: dict[tuple[str, ...], list[int]] = {}
    for lane in timeline.lanes:
        shares = [s / (timeline.step_s or 1.0) for s in (lane.compute_s, lane.communication_s, lane.idle_s)]
        figures = (
            ",".join(str(stage) for stage in lane.stages),
            *(f"{share:.1%}" for share in shares),
            str(lane.in_flight),
            format_bytes(lane.memory.peak_bytes) + ("" if lane.fits else " !"),
            format_bytes(lane.capacity_bytes),
        )
        lines.setdefault(figures, []).extend(lane.ranks)
    for figures, ranks in lines.items():
        table.add_row(figures[0], rank_ranges(ranks), *figures[1:])
    return table


def _print_comparison(console: Console, timeline: Timeline) -> None:
    from planner import format_fraction, format_seconds

    found = timeline.comparison
    console.print()
    if not all(lane.fits for lane in timeline.lanes):
        console.print("[red]memory exceeds a device where marked with ![/red]")
    gap = found.predicted_s - found.simulated_s
    if not found.effects:
        console.print(f"the plan predicts the same: {format_seconds(found.predicted_s, 4)}")
        return
    side = "more" if gap >= 0 else "less"
    console.print(
        f"the plan predicts {format_seconds(found.predicted_s, 4)}: {format_seconds(abs(gap))} {side} "
        f"({format_fraction(abs(found.difference))})"
    )
    for effect in found.effects:
        sign = "+" if effect.seconds >= 0 else "-"
        console.print(f"  {sign}{format_seconds(abs(effect.seconds))}  {effect.name}: {effect.meaning}")

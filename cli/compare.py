"""`shardplan compare`: what every named system would do with a model on a cluster, in one table."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import click

from ._options import dims_option, model_argument, parse_dims

SAMPLES_A_DEVICE = 8
"""Global batch where none is given, a device."""
LINKS = "busiest port of each level, out / in"
PLAIN_WIDTH = 200
"""Columns when the output is not a terminal."""


@click.command("compare")
@model_argument
@click.option("--hardware", "-H", required=True, help="Hardware profile: a name or a YAML file.")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes, instead of the profile's own.")
@click.option("--devices", type=click.IntRange(min=1), help="Use at most this many devices.")
@click.option(
    "--global-batch", "-b", type=click.IntRange(min=1), help="Samples per optimizer step. [default: 8 a device]"
)
@click.option(
    "--systems", help="Only these systems, separated by commas; byteps:cpu_machines=4 sets an option. [default: all]"
)
@click.option(
    "--semantics",
    type=click.Choice(["sync", "any"]),
    default="sync",
    show_default=True,
    help="sync: asynchronous systems are listed apart; any: they are ranked with the others.",
)
@click.option("--precision", default="bf16", show_default=True, help="Number formats, as in `plan`.")
@click.option("--optimizer", default="adam", show_default=True, help="adam, adamw, lamb, momentum, sgd, adafactor.")
@dims_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "markdown", "csv"]),
    default="text",
    show_default=True,
    help="What to print.",
)
@click.option("--plot", type=click.Path(dir_okay=False), help="Write a picture (SVG): time against memory.")
@click.option(
    "--write-plans",
    "plans_folder",
    type=click.Path(file_okay=False),
    help="Write what each system decides as a plan file into this folder.",
)
@click.option("--output", "-o", type=click.Path(dir_okay=False), help="Write the table here instead of printing it.")
def command(
    model: str,
    hardware: str,
    nodes: int | None,
    devices: int | None,
    global_batch: int | None,
    systems: str | None,
    semantics: str,
    precision: str,
    optimizer: str,
    dims: tuple[str, ...],
    form: str,
    plot: str | None,
    plans_folder: str | None,
    output: str | None,
) -> None:
    """Compare what GPipe, PipeDream, Chimera, ... would do with MODEL on a cluster, and `auto`, the best of all.

    \b
    Examples:
      shardplan compare gnmt-8 --hardware v100-pcie-4 --precision fp32 --global-batch 512
      shardplan compare bert-48 -H dgx-1v --nodes 4 -b 256 --systems gpipe,1f1b,chimera,auto --format markdown
      shardplan compare gpt2-xl -H dgx-a100 -b 64 --semantics any --plot systems.svg
      shardplan compare bert-large -H dgx-1v --nodes 4 --systems data-parallel,byteps,byteps:cpu_machines=n
    """
    import planner

    graph = planner.load_graph(model, dims=parse_dims(dims))
    cluster = planner.load_cluster(hardware, nodes=nodes)
    batch = global_batch or SAMPLES_A_DEVICE * (devices or cluster.device_count)
    job = planner.Job(global_batch=batch, precision=precision, optimizer=optimizer, devices=devices or 0)
    chosen = _names(systems)
    plans: dict[str, Any] = {}
    refused: dict[str, str] = {}
    provenance = planner.default_provenance(model, hardware, sys.argv[1:])
    found = planner.compare_systems(
        planner.Pricer(graph, cluster, job),
        cluster,
        job,
        systems=chosen,
        semantics=semantics,
        keep=planner.plan_keeper(plans, refused, provenance) if plans_folder else None,
    )
    if plot:
        planner.write_whole(plot, planner.comparison_svg(found))
    if plans_folder:
        _write_plans(plans_folder, plans, refused)
    text = _text(found, form)
    if output:
        planner.write_whole(output, text)
    else:
        click.echo(text, nl=False)


def _write_plans(folder: str, plans: dict[str, Any], refused: dict[str, str]) -> None:
    """One file a system; what has none is said."""
    import planner

    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise planner.OutputError(f"cannot make the folder: {error.strerror}", where=folder) from error
    for name, plan in plans.items():
        planner.write_plan(plan, os.path.join(folder, f"{re.sub(r'[^a-z0-9-]+', '-', name)}.plan.json"))
    click.echo(f"wrote {len(plans)} plan{'s' if len(plans) != 1 else ''} to {folder}", err=True)
    for name, reason in refused.items():
        click.echo(f"no plan file for {name}: {reason}", err=True)


def _text(found: Any, form: str) -> str:  # noqa: ANN401
    import planner

    if form == "json":
        return json.dumps(planner.comparison_document(found), indent=2) + "\n"
    if form == "csv":
        return planner.comparison_csv(found)
    if form == "markdown":
        return planner.comparison_markdown(found)
    return _rendered(found)


def _rendered(found: Any) -> str:  # noqa: ANN401
    """The table for people."""
    import io

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    import planner

    terminal = sys.stdout.isatty()
    text = io.StringIO()
    console = Console(file=text, highlight=False, width=None if terminal else PLAIN_WIDTH, force_terminal=terminal)
    console.print(f"[bold]{found.model}[/bold] on [bold]{found.hardware}[/bold], global batch {found.global_batch}")
    for title, rows in planner.comparison_groups(found):
        console.print()
        failed = not rows[0].feasible
        table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
        names = ("system", "reason") if failed else planner.comparison_columns()
        for i, name in enumerate(names):
            last = i == len(names) - 1
            table.add_column(name, no_wrap=not last, overflow="fold", justify="left" if i < 2 or last else "right")
        for row in rows:
            table.add_row(
                *((planner.comparison_cells(row)[0], row.reason) if failed else planner.comparison_cells(row))
            )
        console.print(table)
    links = planner.comparison_links(found)
    if links:
        console.print()
        table = Table(box=None, pad_edge=False, header_style="bold", title=LINKS, title_justify="left")
        for i, name in enumerate(links[0]):
            table.add_column(name, no_wrap=True, justify="right" if i else "left")
        for cells in links[1:]:
            table.add_row(*cells)
        console.print(table)
    console.print()
    for note in (*planner.comparison_marks(found), *found.notes):
        console.print(f"[dim]{escape(note)}[/dim]", soft_wrap=True)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _names(systems: str | None) -> tuple[str, ...]:
    """Names separated by commas; a piece like `inside=pcie` is a further option of the name before it."""
    found: list[str] = []
    for piece in (systems or "").split(","):
        name = piece.strip()
        if found and "=" in name and ":" not in name:
            found[-1] += f",{name}"
        elif name:
            found.append(name)
    return tuple(found)

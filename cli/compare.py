"""`shardplan compare`: what every named system would do with a model on a cluster, in one table."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import click

from ._options import dims_option, model_argument, parse_dims

SAMPLES_A_DEVICE = 8
"""Global batch where none is given, a device."""
LINKS = "busiest port of each level, out / in"
PLAIN_WIDTH = 200
"""Columns when the output is not a terminal."""
WIDE = 150
"""Columns from which on a table is not dealt to two."""
FIRST = ("system", "iteration", "samples/s", "peak memory", "devices")
REST = ("bubble", "sent", "versions", "staleness")
"""What the first and the second of two tables show; the plan stands in the second."""


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
@click.option("--precision", help="Number formats, as in `plan`. [default: the best that all devices compute in]")
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
    precision: str | None,
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
    job = planner.Job(global_batch=batch, precision=precision or "", optimizer=optimizer, devices=devices or 0)
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
    terminal = sys.stdout.isatty() and not output
    remark = "" if precision else planner.costs.precision_remark(found.precision, cluster.devices)
    text = _text(found, form, shutil.get_terminal_size().columns if terminal else None, remark)
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


def _text(found: Any, form: str, width: int | None, remark: str) -> str:  # noqa: ANN401
    import planner

    if form == "json":
        return json.dumps(planner.comparison_document(found), indent=2) + "\n"
    if form == "csv":
        return planner.comparison_csv(found)
    if form == "markdown":
        return planner.comparison_markdown(found)
    return _rendered(found, width, remark)


def _rendered(found: Any, width: int | None, remark: str = "") -> str:  # noqa: ANN401
    """The table for people: `width` columns of a terminal, or None for plain text of any width.

    Where the columns of a table do not stand beside each other, they are dealt to two tables.
    """
    import io

    from rich.console import Console
    from rich.markup import escape

    import planner

    text = io.StringIO()
    console = Console(file=text, highlight=False, width=width or PLAIN_WIDTH, force_terminal=width is not None)
    model, hardware = escape(found.model), escape(found.hardware)
    console.print(
        f"[bold]{model}[/bold] on [bold]{hardware}[/bold], global batch {found.global_batch}, {found.precision}"
        + (f" ({escape(remark)})" if remark else ""),
        soft_wrap=True,
    )
    columns = planner.comparison_columns()
    for title, rows in planner.comparison_groups(found):
        console.print(f"\n[italic]{escape(title)}[/italic]")
        cells = [planner.comparison_cells(row) for row in rows]
        if not rows[0].feasible:
            reasons = [(own[0], row.reason) for own, row in zip(cells, rows, strict=True)]
            console.print(_table([("system", "reason"), *reasons]))
            continue
        for names in (columns,) if console.width >= WIDE else (FIRST, (columns[0], *REST, columns[-1])):
            at = [columns.index(name) for name in names]
            console.print(_table([names, *(tuple(own[i] for i in at) for own in cells)], names[-1] == columns[-1]))
            if names == FIRST:
                console.print()
    links = planner.comparison_links(found)
    if links:
        console.print(f"\n[italic]{LINKS}[/italic]")
        console.print(_table(links, words=False))
    console.print()
    for note in (*planner.comparison_marks(found), *found.notes):
        console.print(f"[dim]{escape(note)}[/dim]", soft_wrap=True)
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _table(lines: Sequence[Sequence[str]], words: bool = True) -> Any:  # noqa: ANN401
    """Lines under the first as headings; figures to the right, and the last column to the left where it has words."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(lines[0]):
        last = words and i == len(lines[0]) - 1
        left = last or name in ("system", "semantics")
        table.add_column(name, no_wrap=not last, overflow="fold", justify="left" if left else "right")
    for line in lines[1:]:
        table.add_row(*(escape(cell) for cell in line))
    return table


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

"""`shardplan compare`: compare published systems and training frameworks in one table."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

import click

import planner

from . import _options
from ._report import progress_line, show


@click.command("compare")
@_options.model_argument
@_options.machine_options()
@_options.batch_option
@click.option(
    "--systems",
    help="Compare only these systems or training frameworks, separated by commas; byteps:cpu_machines=4 sets an option "
    "of a system. [default: all]",
)
@_options.flag(
    "--backends",
    "priced",
    help="Also show what the limits of training frameworks (of --for) cost: the iteration time with each limit lifted. "
    "Takes a search per limit.",
)
@_options.for_option("Training framework whose limits --backends lifts; repeatable. [default: the usual ones]")
@_options.choice(
    "--semantics",
    of=("sync", "any"),
    help="sync: list asynchronous systems separately; any: rank them with the others.",
)
@click.option("--precision", help="Number formats, as in `plan`. [default: the best that all devices support]")
@_options.optimizer_option
@_options.headroom_option
@_options.dims_option
@_options.costs_option
@_options.price_option
@_options.format_option("text", "json", "markdown", "csv")
@_options.file_to_write("--plot", help="Write an SVG chart of time against memory.")
@click.option(
    "--write-plans",
    "plans_folder",
    type=click.Path(file_okay=False),
    help="Write the plan of each system into this folder.",
)
@_options.file_to_write("--output", "-o", help="Write the table here instead of printing it.")
def command(
    model: str,
    priced: bool,
    backends: tuple[str, ...],
    form: str,
    plot: str | None,
    plans_folder: str | None,
    output: str | None,
    **options: Any,  # noqa: ANN401
) -> None:
    """Compare the plans of GPipe, PipeDream, Megatron, FSDP, ... and of `auto`, shardplan's search, for MODEL.

    \b
    Examples:
      shardplan compare gnmt-8 --hardware v100-pcie-4 --precision fp32 --global-batch 512
      shardplan compare bert-48 -H dgx-1v --nodes 4 -b 256 --systems gpipe,1f1b,chimera,auto --format markdown
      shardplan compare llama3-8b -H dgx-h100 -b 64 --systems megatron,fsdp --backends
      shardplan compare gpt2-xl -H dgx-a100 -b 64 --semantics any --plot systems.svg
      shardplan compare bert-large -H dgx-1v --nodes 4 --systems data-parallel,byteps,byteps:cpu_machines=n
    """
    if backends and not priced:
        raise click.UsageError("--for needs --backends, whose frameworks it names")
    with progress_line(form == "json", counted=False, doing="reading the model and asking every system"):
        graph = _options.load_graph(model, options["dims"], options["costs"])
        cluster = _options.load_hardware(options)
        job = _options.job_of(options, cluster.device_count)
        comparison = planner.compare_systems(
            planner.Pricer(graph, cluster, job),
            cluster,
            job,
            systems=_names(options["systems"]),
            semantics=options["semantics"],
            freed=(backends or planner.systems.usual_backends()) if priced else (),
        )
    comparison = dataclasses.replace(comparison, price=options["price"])
    if plot:
        planner.files.write_whole(plot, planner.report.comparison_svg(comparison))
    if plans_folder:
        provenance = planner.default_provenance(model, options["hardware"])
        _write_plans(plans_folder, *planner.systems.plans_of(comparison, provenance))
    remark = "" if options["precision"] else planner.costs.precision_remark(comparison.precision, cluster.devices)
    show(planner.comparison_report(comparison, remark), planner.report.comparison_document(comparison), form, output)


def _write_plans(folder: str, plans: dict[str, Any], refused: dict[str, str]) -> None:
    """Write one file per system; systems without a plan file are reported on standard error."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise planner.OutputError(f"cannot make the folder: {error.strerror}", where=folder) from error
    for name, plan in plans.items():
        planner.write_plan(plan, os.path.join(folder, f"{re.sub(r'[^a-z0-9-]+', '-', name)}.plan.json"))
    click.echo(f"wrote {planner.units.plural(len(plans), 'plan')} to {folder}", err=True)
    for name, reason in refused.items():
        click.echo(f"no plan file for {name}: {reason}", err=True)


def _names(systems: str | None) -> tuple[str, ...]:
    """Names separated by commas; a part like `inside=pcie` is another option of the name before it."""
    names: list[str] = []
    for piece in (systems or "").split(","):
        name = piece.strip()
        if names and "=" in name and ":" not in name:
            names[-1] += f",{name}"
        elif name:
            names.append(name)
    return tuple(names)

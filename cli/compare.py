"""Commands that make many plans: `shardplan compare` puts published systems and training frameworks in one table,
`shardplan sweep` plans for every combination of values of devices, batch, options and hardware figures.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from typing import Any

import click

import planner

from . import _inputs, _options
from ._report import progress_line, say, show


@_options.command("compare")
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
@_options.precision_option
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
def command(given: _options.Options) -> None:
    """Compare the plans of GPipe, PipeDream, Megatron, FSDP, ... and of `auto`, shardplan's search, for MODEL.

    \b
    Examples:
      shardplan compare gnmt-8 --hardware v100-pcie-4 --precision fp32 --global-batch 512
      shardplan compare bert-48 -H dgx-1v --nodes 4 -b 256 --systems gpipe,1f1b,chimera,auto --format markdown
      shardplan compare llama3-8b -H dgx-h100 -b 64 --systems megatron,fsdp --backends
      shardplan compare gpt2-xl -H dgx-a100 -b 64 --semantics any --plot systems.svg
      shardplan compare bert-large -H dgx-1v --nodes 4 --systems data-parallel,byteps,byteps:cpu_machines=n
    """
    if given.backends and not given.priced:
        raise click.UsageError("--for needs --backends, whose frameworks it names")
    with progress_line(given.form == "json", counted=False, doing="reading the model and asking every system"):
        graph = _options.load_graph(given)
        cluster = _options.load_hardware(given)
        job = _options.job_of(given, cluster.device_count, backends=())
        comparison = planner.compare_systems(
            planner.Pricer(graph, cluster, job),
            cluster,
            job,
            systems=_names(given.systems),
            semantics=given.semantics,
            freed=(given.backends or planner.systems.usual_backends()) if given.priced else (),
        )
    comparison = dataclasses.replace(comparison, price=given.price)
    if given.plot:
        planner.files.write_whole(given.plot, planner.report.comparison_svg(comparison))
    if given.plans_folder:
        provenance = _inputs.provenance_of(given)
        _write_plans(given.plans_folder, *planner.systems.plans_of(comparison, provenance))
    remark = "" if given.precision else planner.costs.precision_remark(comparison.precision, cluster.devices)
    document = planner.report.comparison_document(comparison)
    show(planner.comparison_report(comparison, remark), document, given.form, given.output)


def _write_plans(folder: str, plans: dict[str, Any], refused: dict[str, str]) -> None:
    """Write one file per system; systems without a plan file are reported on standard error."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise planner.OutputError(f"cannot make the folder: {error.strerror}", where=folder) from error
    for name, plan in plans.items():
        planner.write_plan(plan, os.path.join(folder, f"{re.sub(r'[^a-z0-9-]+', '-', name)}.plan.json"))
    say(f"wrote {planner.units.plural(len(plans), 'plan')} to {folder}", err=True)
    for name, reason in refused.items():
        say(f"no plan file for {name}: {reason}", err=True)


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


NOTHING_FITS = 6
"""Exit code if no point has a plan."""


FIXED = (
    "nodes", "devices", "batch", "seq", "precision", "optimizer", "schedule", "recompute", "for", "tp", "cp", "ep",
    "pp", "dp", "micro-batch", "zero", "max-stages", "overlap", "headroom", "stack",
)  # fmt: skip
"""Options of `plan` that apply to all points; --global-batch and -b are also `batch`."""


_FILES = {"stack": _options.STACK}
"""Types of those of these options that may name a file."""


def _fixed_options(command: Any) -> Any:  # noqa: ANN401
    """Options of `plan` that apply to all points, and --dim and --set."""
    for name in reversed(FIXED):
        flags = ("--global-batch", "-b", "--batch") if name == "batch" else (f"--{name}",)
        help_text = "For all points; this and the following options are as in `plan`." if name == FIXED[0] else ""
        kind = _FILES.get(name, click.STRING)
        command = click.option(*flags, _parameter(name), type=kind, help=help_text, metavar="VALUE")(command)
    for flag, parameter, metavar in (("--dim", "dims", "NAME=SIZE"), ("--set", "changes", "FIELD=VALUE")):
        help_text = "For all points, as in `plan`."
        command = click.option(flag, parameter, multiple=True, metavar=metavar, help=help_text)(command)
    return command


def _parameter(name: str) -> str:
    return f"fixed_{name}".replace("-", "_")


def _fixed(given: _options.Options) -> dict[str, tuple[str, ...]]:
    """Values that apply to all points, by name."""
    values = {name: getattr(given, _parameter(name)) for name in FIXED}
    values = {name: value for name, value in values.items() if value is not None}
    for texts, prefix in ((given.dims, "dim."), (given.changes, "")):
        for text in texts:
            name, _, value = text.partition("=")
            if not value or (not prefix and "." not in name):
                raise planner.UsageError(
                    f"{text!r} is no NAME=VALUE", hint="write --dim seq=4096, --set network.bandwidth=1Tbit/s"
                )
            values["seq" if text.startswith("seq=") else prefix + name] = value
    return {name: (value,) for name, value in values.items()}


@_options.command("sweep")
@_options.model_argument
@_options.hardware_option(required=True)
@click.option(
    "--over", "axes", multiple=True, required=True, metavar="NAME=VALUE[,VALUE..]",
    help="Values to combine; repeatable: all combinations are planned. NAME: devices, nodes, batch, seq, dim.NAME, "
    "precision, optimizer, schedule, recompute, for, tp, cp, ep, pp, dp, micro-batch, zero, max-stages, overlap, "
    "headroom, stack, model, hardware, or a figure of the hardware: network.bandwidth=100Gbit/s,200Gbit/s.",
)  # fmt: skip
@_fixed_options
@_options.price_option
@click.option(
    "--store",
    type=_options.FilePath("store", dir_okay=False),
    help="SQLite file for results, from which a stopped sweep continues.",
)
@_options.count("--jobs", "-j", "workers", help="Number of processes. [default: the number of cores]")
@click.option("--on", default="", metavar="tcp://HOST:PORT", help="Plan on the workers of this dask scheduler.")
@_options.format_option("text", "csv", "json", "markdown")
@_options.file_to_write("--svg", "picture", help="Write an SVG chart of throughput against price.")
@_options.file_to_write("--output", "-o", help="Write the table here instead of printing it.")
def sweep(given: _options.Options) -> int:
    """Plan MODEL for all combinations of some values, and mark the Pareto-optimal ones in throughput, price and memory.

    Options of `plan` apply to all points. A point without a plan has the reason in its row.

    \b
    Examples:
      shardplan sweep llama3-8b -H dgx-h100 -b 512 --over devices=8,16,32,64
      shardplan sweep llama3-8b -H dgx-h100 --nodes 4 --over seq=2048,8192 --over tp=1,2,4,8 --format csv -o tp.csv
      shardplan sweep llama3-70b -H dgx-h100 --over nodes=8,16 --over network.bandwidth=100Gbit/s,200Gbit/s,400Gbit/s
      shardplan sweep gpt2-xl -H dgx-a100 --over hardware=dgx-a100,dgx-h100 --over batch=64,128 --store s.sqlite -j 4
      shardplan sweep llama3-70b -H dgx-h100 --over nodes=4,8,16 --price 2.5 --svg sweep.svg --on tcp://head:8786
    """
    axes = planner.ask.read_axes(given.axes)
    fixed = {"model": (given.model,), "hardware": (given.hardware,), **_fixed(given)}
    twice = next((name for name in fixed if name in axes and name not in ("model", "hardware")), None)
    if twice:
        raise planner.UsageError(f"{twice} is given for all points and with --over", hint="give it once")
    points = planner.ask.points_of({**{name: v for name, v in fixed.items() if name not in axes}, **axes})
    kept = planner.ask.Store(given.store) if given.store else None
    with progress_line(not sys.stderr.isatty(), counted=True, doing="planning") as draw:

        def tell(done: int, total: int, left_s: float) -> None:
            if draw:
                draw(completed=done, total=total, found=f"about {planner.units.format_seconds(left_s)} left")

        if draw:
            draw(completed=0, total=len(points), found="")
        rows: Any = planner.sweep(
            points, price=given.price, store=kept, workers=given.workers or 0, on=given.on, progress=tell
        )
    if kept:
        kept.close()
    if given.picture:
        planner.files.write_whole(given.picture, planner.report.sweep_svg(rows))
    show(planner.report.sweep_report(rows), form=given.form, output=given.output)
    return 0 if any(row.headline for row in rows) else NOTHING_FITS

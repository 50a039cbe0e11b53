"""`shardplan calibrate`: fit a software stack to measured iterations."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

import planner

from . import _options
from ._report import progress_line, show


@click.command("calibrate")
@_options.model_argument
@_options.machine_options()
@click.option("--runs", required=True, metavar="FILE", help="CSV of measured runs; - is standard input.")
@click.option(
    "--precision", help="Number formats of the runs, as in `plan`. [default: the best that all devices support]"
)
@_options.optimizer_option
@_options.dims_option
@_options.file_to_write("--output", "-o", help="Write the fitted stack (YAML) here.")
@_options.format_option("text", "json")
def command(model: str, runs: str, output: str | None, form: str, **options: Any) -> None:  # noqa: ANN401
    """Fit a software stack to measured iteration times of MODEL on a cluster, from 5 to 20 runs.

    FILE has a header line and a line per run. Columns are the options of `predict` (tp, pp, dp, interleave,
    micro_batch, schedule, zero, recompute), global_batch, seconds (per iteration) and optionally memory_gib. The result
    is a stack file for the option --stack of other commands.

    \b
    Example of FILE:
      tp,pp,dp,micro_batch,zero,global_batch,seconds,memory_gib
      1,1,8,4,1,64,0.412,31.2
      2,2,2,2,0,64,0.498,17.9
      8,1,1,8,0,64,0.530,9.1

    \b
    Examples:
      shardplan calibrate gpt2-xl -H dgx-a100 --runs runs.csv -o ours.yaml
      shardplan plan gpt2-xl -H dgx-a100 --stack ours.yaml
    """
    text = _options.read_file(runs).decode("utf-8", errors="replace")
    measured = planner.calibration.parse_runs(text, _options.shown_name(runs))
    graph = planner.load_graph(model, dims=_options.parse_dims(options["dims"]))
    base = planner.load_stack(options["stack"])
    job = _options.job_of(options, 1, global_batch=1)

    def cluster_of(own: Any) -> Any:  # noqa: ANN401
        return _options.load_hardware(options, stack=own)

    with progress_line(form == "json", counted=True, doing="fitting") as draw:

        def show_progress(done: int, total: int) -> None:
            if draw:
                draw(completed=done, total=total, found="clusters priced")

        calibration = planner.calibrate(graph, cluster_of, base, job, measured, progress=show_progress)
    data = {
        **dataclasses.asdict(calibration),
        "errors": {w: calibration.error(w) for w in ("before_s", "after_s", "left_out_s")},
    }
    show(planner.report.calibration_report(calibration), data, form)
    if output:
        text = planner.calibration.calibrated_stack(calibration, Path(output).stem, graph.name, options["hardware"])
        planner.files.write_whole(output, text)
        if form == "text":
            click.echo(f"\nstack written to {output}; use it in other commands with --stack {output}")
    elif form == "text":
        click.echo("\nnothing written; add -o FILE to write the stack")

"""`shardplan calibrate`: a few measured iterations to a stack of one's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from . import _options
from ._progress import progress_line
from ._report import show


@click.command("calibrate")
@_options.model_argument
@_options.machine_options()
@click.option("--runs", required=True, metavar="FILE", help="CSV of measured runs; - is standard input.")
@click.option("--precision", help="Number formats of the runs, as in `plan`. [default: the best of all devices]")
@_options.optimizer_option
@_options.dims_option
@click.option("--output", "-o", type=click.Path(dir_okay=False), help="Write the fitted stack (YAML) here.")
@_options.format_option("text", "json")
def command(model: str, runs: str, output: str | None, form: str, **options: Any) -> None:  # noqa: ANN401
    """Fit the software's figures to measured iterations of MODEL on a cluster: 5 to 20 runs of your own.

    FILE has a header line and a line a run: the options of `predict` as columns (tp, pp, dp, interleave, micro_batch,
    schedule, zero, recompute), global_batch, seconds an iteration and, if known, memory_gib. What is written is a stack
    that every command takes as --stack.

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
    import planner

    text = _options.read_file(runs).decode("utf-8", errors="replace")
    measured = planner.calibration.parse_runs(text, _options.shown_name(runs))
    graph = planner.load_graph(model, dims=_options.parse_dims(options["dims"]))
    base = planner.load_stack(options["stack"])
    job = planner.Job(**_options.job_values({**options, "global_batch": 1}, 1))

    def cluster_of(own: Any) -> Any:  # noqa: ANN401
        return _options.load_hardware(options, stack=own)

    with progress_line(form == "json", counted=True, doing="fitting") as draw:

        def told(done: int, total: int) -> None:
            if draw:
                draw(completed=done, total=total, found="clusters priced")

        found = planner.calibrate(graph, cluster_of, base, job, measured, progress=told)
    data = {**dataclasses.asdict(found), "errors": {w: found.error(w) for w in ("before_s", "after_s", "left_out_s")}}
    show(planner.report.calibration_report(found), data, form)
    if output:
        text = planner.calibration.calibrated_stack(found, Path(output).stem, graph.name, options["hardware"])
        planner.files.write_whole(output, text)
        if form == "text":
            click.echo(f"\nstack written to {output}; give it to the other commands as --stack {output}")
    elif form == "text":
        click.echo("\nnothing written; add -o FILE to keep the stack")

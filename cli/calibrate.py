"""`shardplan calibrate`: fit a stack to measured iterations."""

from __future__ import annotations

import os
from pathlib import Path

import click

from . import _options
from ._report import show


@click.command("calibrate")
@_options.model_argument
@_options.hardware_option
@_options.nodes_option
@_options.stack_option
@_options.dims_option
@click.option("--runs", required=True, metavar="FILE", help="CSV of measured iterations; - is standard input.")
@click.option("--precision", help="Number formats, as in `plan`. [default: the best that the devices have]")
@_options.optimizer_option
@_options.attention_option
@click.option("--output", "-o", type=click.Path(dir_okay=False), help="Write the fitted stack here, for --stack.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def command(
    model: str,
    hardware: str,
    nodes: int | None,
    stack: str,
    dims: tuple[str, ...],
    runs: str,
    precision: str | None,
    optimizer: str,
    attention: str,
    output: str | None,
    force: bool,
) -> None:
    """Fit up to six figures of a stack to 5 to 20 measured iterations of MODEL, and say how far off it was and is.

    FILE has a header and a line a run: `global_batch,tp,pp,dp,micro_batch,zero,recompute,seconds`, columns as the
    options of `predict` (also `interleave`, `schedule`); `peak_gb` where the memory is known. Runs of different shapes
    tell figures apart: some bound by launches (small micro-batches), some by products, some by links.

    \b
    Examples:
      shardplan calibrate gpt2-xl -H dgx-a100 --runs runs.csv
      shardplan calibrate model.onnx -H mine.yaml --stack fsdp-2023 --runs runs.csv -o mine.stack.yaml
      shardplan plan model.onnx -H mine.yaml --stack mine.stack.yaml
    """
    import planner

    if output and os.path.exists(output) and not force:
        raise planner.UsageError("the file exists", where=output, hint="choose another name, or give --force")
    text = _options.read_file(runs).decode("utf-8", errors="replace")
    measured = planner.read_measured_runs(text, name=_options.shown_name(runs))
    graph = planner.load_graph(model, dims=_options.parse_dims(dims))
    job = planner.Job(1, precision=precision or "", optimizer=optimizer, fused_attention=attention == "fused")
    base = stack or planner.hardware.DEFAULT_STACK
    found = planner.calibrate(graph, hardware, job, measured, nodes=nodes, stack=planner.load_stack(base))
    show(planner.calibration_report(found))
    if output:
        planner.write_whole(output, planner.calibrated_yaml(found, base, Path(runs).name))
        click.echo(f"\nwrote {output}; use it with: --stack {output}")

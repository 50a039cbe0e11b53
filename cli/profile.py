"""`shardplan profile`: what a model costs on a device, and where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import _options
from ._report import show

_ANY = frozenset({"model", "dims", "micro_batch", "form", "top"})
_KEPT = frozenset({"attention", "no_dropout"})
DEFAULT_TOP = 12


@click.command("profile")
@_options.model_argument
@click.option("--device", "-d", help="Device to price for (`shardplan hardware list`), such as h100-sxm-80gb.")
@click.option("--precision", help="Training precision, as in `plan`. [default: the best that the device computes in]")
@_options.dims_option
@click.option("--micro-batch", type=click.IntRange(min=1), help="Samples per execution. [default: the model's own]")
@click.option("--measure", is_flag=True, help="Run each operator on this machine's CPU (onnxruntime) instead.")
@click.option("--cache", type=click.Path(file_okay=False), help="Folder of kept measurements.")
@_options.stack_option
@_options.attention_option
@click.option("--no-dropout", is_flag=True, help="Treat dropout nodes as absent.")
@click.option("--assume-dropout", is_flag=True, help="Count dropout masks where transformers have them.")
@_options.format_option("table", "json", "csv")
@click.option("--top", type=click.IntRange(min=1), default=DEFAULT_TOP, show_default=True, help="Rows of each table.")
@_options.strict_option
@click.pass_context
def command(ctx: click.Context, /, model: str, form: str, top: int, **options: Any) -> None:  # noqa: ANN401
    """Price MODEL (an ONNX file or a bundled model's name): totals, costliest layers and operators, coverage.

    `--format csv` lists every node; `json` holds the whole report.

    \b
    Examples:
      shardplan profile model.onnx --device h100-sxm-80gb
      shardplan profile llama3-8b --device a100-sxm-80gb --dim seq=4096 --micro-batch 2
      shardplan profile model.onnx --measure --format json
    """
    import planner

    graph = planner.load_graph(model, dims=_options.parse_dims(options["dims"]))
    priced = _price(ctx, graph, options)
    _options.refuse_others(
        ctx, set(ctx.params) - ({"top"} if form != "table" else set()), f"--format {form}, which has all rows"
    )
    report = planner.profile_report(graph, priced, most_rows=top, remark=_remark(priced.precision, options))
    data = planner.cost_report(graph, priced).document() if form == "json" else None
    if data is not None and options["measure"]:
        data["times"] = planner.costs.times_document(graph, priced)
    show(report, data, "text" if form == "table" else form)


def _price(ctx: click.Context, graph: Any, options: dict[str, Any]) -> Any:  # noqa: ANN401
    """Prices from the source that the options name; options of other sources are refused."""
    import planner

    attention = {"fused_attention": options["attention"] == "fused", "dropout": not options["no_dropout"]}
    if options["measure"]:
        if options["device"]:
            raise planner.UsageError("--measure and --device exclude each other", hint="leave one out")
        _options.refuse_others(
            ctx, {*_ANY, *_KEPT, "measure", "cache"}, "--measure, which runs the file's operators as they are"
        )
        cache = Path(options["cache"]) if options["cache"] else None
        return planner.costs.measure(
            graph, micro_batch=options["micro_batch"], cache_folder=cache, progress=_say_progress, **attention
        )
    if planner.costs.is_priced(graph):
        _options.refuse_others(ctx, _ANY, "a model that carries measured times of its own")
        return planner.costs.imported_profile(graph, micro_batch=options["micro_batch"])
    if not options["device"]:
        raise planner.UsageError("no device to price for", hint="give --device NAME, or --measure")
    _options.refuse_others(ctx, set(ctx.params) - {"cache"}, "prices by the roofline: it is for --measure")
    return planner.profile(
        graph,
        planner.load_device(options["device"], stack=options["stack"]),
        precision=options["precision"] or "",
        micro_batch=options["micro_batch"],
        assume_dropout=options["assume_dropout"],
        strict_ops=options["strict_ops"],
        **attention,
    )


def _remark(precision: str, options: dict[str, Any]) -> str:
    """Why the precision was chosen where none was asked for."""
    import planner

    if options["precision"] or not options["device"]:
        return ""
    return planner.costs.precision_remark(precision, [planner.load_device(options["device"], stack=options["stack"])])


def _say_progress(done: int, total: int, operator: str) -> None:
    import sys

    if sys.stderr.isatty():
        end = "\r" if done + 1 < total else "\r\x1b[K"
        click.echo(f"measuring {done + 1}/{total} {operator:<24}", nl=False, err=True)
        click.echo(end, nl=False, err=True)

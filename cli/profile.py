"""`shardplan profile`: what a model costs on a device, and where."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._options import dims_option, model_argument, parse_dims, refuse_others

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_ANY = frozenset({"model", "dims", "micro_batch", "form", "top"})
_KEPT = frozenset({"attention", "no_dropout"})
DEFAULT_TOP = 12
PIPED_WIDTH = 110
_CSV_COLUMNS = (
    "key", "op", "module", "forward_s", "backward_s", "weight_grad_s", "forward_flops", "backward_flops",
    "moved_bytes", "output_bytes", "saved_bytes", "origin",
)  # fmt: skip


@click.command("profile")
@model_argument
@click.option("--device", "-d", help="Device to price for (`shardplan hardware list`), such as h100-sxm-80gb.")
@click.option("--precision", help="Training precision, as in `plan`. [default: the best that the device computes in]")
@dims_option
@click.option("--micro-batch", type=click.IntRange(min=1), help="Samples per execution. [default: the model's own]")
@click.option("--measure", is_flag=True, help="Run each operator on this machine's CPU (onnxruntime) instead.")
@click.option("--cache", type=click.Path(file_okay=False), help="Folder of kept measurements.")
@click.option(
    "--attention",
    type=click.Choice(["fused", "eager"]),
    default="fused",
    show_default=True,
    help="Whether attention keeps its score matrix.",
)
@click.option("--no-dropout", is_flag=True, help="Treat dropout nodes as absent.")
@click.option("--assume-dropout", is_flag=True, help="Count dropout masks where transformers have them.")
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option("--top", type=click.IntRange(min=1), default=DEFAULT_TOP, show_default=True, help="Rows of each table.")
@click.option("--strict-ops", is_flag=True, help="Refuse models with operators that have no pricing rule.")
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

    graph = planner.load_graph(model, dims=parse_dims(options["dims"]))
    priced = _price(ctx, graph, options)
    refuse_others(
        ctx, set(ctx.params) - ({"top"} if form != "table" else set()), f"--format {form}, which has all rows"
    )
    if form == "csv":
        click.echo(_csv(graph, priced), nl=False)
        return
    report = planner.cost_report(graph, priced)
    if form == "json":
        click.echo(json.dumps(report.document(), indent=2))
    else:
        _print(report, top, _remark(report.precision, options))


def _price(ctx: click.Context, graph: Any, options: dict[str, Any]) -> Any:  # noqa: ANN401
    """Prices from the source that the options name; options of other sources are refused."""
    import planner

    attention = {"fused_attention": options["attention"] == "fused", "dropout": not options["no_dropout"]}
    if options["measure"]:
        if options["device"]:
            raise planner.UsageError("--measure and --device exclude each other", hint="leave one out")
        refuse_others(
            ctx, {*_ANY, *_KEPT, "measure", "cache"}, "--measure, which runs the file's operators as they are"
        )
        cache = Path(options["cache"]) if options["cache"] else None
        return planner.costs.measure(
            graph, micro_batch=options["micro_batch"], cache_folder=cache, progress=_say_progress, **attention
        )
    if planner.costs.is_priced(graph):
        refuse_others(ctx, _ANY, "a model that carries measured times of its own")
        return planner.costs.imported_profile(graph, micro_batch=options["micro_batch"])
    if not options["device"]:
        raise planner.UsageError("no device to price for", hint="give --device NAME, or --measure")
    refuse_others(ctx, set(ctx.params) - {"cache"}, "prices by the roofline: it is for --measure")
    return planner.profile(
        graph,
        planner.load_device(options["device"]),
        precision=options["precision"] or "",
        micro_batch=options["micro_batch"],
        assume_dropout=options["assume_dropout"],
        strict_ops=options["strict_ops"],
        **attention,
    )


def _remark(precision: str, options: dict[str, Any]) -> str:
    """Why the precision was chosen where none was asked for; a space and brackets around it."""
    import planner

    if options["precision"] or not options["device"]:
        return ""
    remark = planner.costs.precision_remark(precision, [planner.load_device(options["device"])])
    return f" ({remark})" if remark else ""


def _say_progress(done: int, total: int, operator: str) -> None:
    import sys

    if sys.stderr.isatty():
        end = "\r" if done + 1 < total else "\r\x1b[K"
        click.echo(f"measuring {done + 1}/{total} {operator:<24}", nl=False, err=True)
        click.echo(end, nl=False, err=True)


def _csv(graph: Any, priced: Any) -> str:  # noqa: ANN401
    """Every node with its figures; saved bytes are the node's own, storages shared with others included."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for i, node in enumerate(graph.nodes):
        figures = (priced.forward_s, priced.backward_s, priced.weight_grad_s, priced.forward_flops)
        sizes = (priced.backward_flops, priced.moved_bytes, priced.output_bytes)
        row = [f"{float(column[i]):.9g}" for column in (*figures, *sizes)]
        kept = sum(item.byte_count for item in priced.saved[i])
        writer.writerow([node.key, node.op, node.module, *row, kept, priced.origin[i].value])
    return stream.getvalue()


def _print(report: Any, top: int, remark: str) -> None:  # noqa: ANN401
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPED_WIDTH)
    _print_totals(console, report, remark)
    whole = report.whole.total_s
    console.print(_table("layer", report.layers, top, whole))
    console.print()
    console.print(_table("operator", report.operators, top, whole))
    _print_coverage(console, report)


def _print_totals(console: Console, report: Any, remark: str) -> None:  # noqa: ANN401
    from rich.markup import escape

    import planner

    whole = report.whole
    console.print(
        f"[bold]{escape(report.model)}[/bold] on {escape(report.device)}, {report.precision}{escape(remark)}, "
        f"micro-batch {report.micro_batch} ({report.source})"
    )
    console.print(f"  parameters  {whole.parameters:,}")
    work = f"{planner.format_flops(whole.forward_flops)} forward, {planner.format_flops(whole.backward_flops)} backward"
    console.print(f"  work        {work}")
    times = f"{planner.format_seconds(whole.forward_s)} forward, {planner.format_seconds(whole.backward_s)} backward"
    rate = f" = {planner.format_flop_rate(report.flop_per_s)}" if report.flop_per_s else ""
    console.print(f"  time        {times}{rate}")
    console.print(f"  kept        {planner.format_bytes(whole.saved_bytes)} of activations for backward\n")


def _table(what: str, groups: Any, top: int, whole_s: float) -> Table:  # noqa: ANN401
    from rich.markup import escape
    from rich.table import Table

    import planner

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(what, no_wrap=True, overflow="ellipsis", min_width=22)
    for name in ("", "share", "forward", "backward", "work", "kept", "parameters"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups[:top]:
        count = group.nodes if what == "operator" else group.count
        work = group.forward_flops + group.backward_flops
        table.add_row(
            f"{escape(group.name)}{' (fallback)' if group.fallback_nodes else ''}",
            f"x{count}" if count > 1 else "",
            f"{group.total_s / whole_s:.1%}" if whole_s else "",
            planner.format_seconds(group.forward_s),
            planner.format_seconds(group.backward_s),
            planner.format_flops(work) if work else "-",
            planner.format_bytes(group.saved_bytes) if group.saved_bytes else "-",
            _short_count(group.parameters),
        )
    rest = groups[top:]
    if rest:
        share = sum(g.total_s for g in rest) / whole_s if whole_s else 0.0
        table.add_row(f"{len(rest)} more", "", f"{share:.1%}")
    return table


def _short_count(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if count >= size / 10:
            return f"{count / size:.3g} {unit}"
    return f"{count:,}" if count else "-"


def _print_coverage(console: Console, report: Any) -> None:  # noqa: ANN401
    from rich.markup import escape

    found = report.coverage
    priced = f"{found.rule} by rule"
    if found.fallback:
        names = ", ".join(f"{op} x{count}" for op, count in found.fallback.items())
        priced += f", {sum(found.fallback.values())} by fallback ({names})"
    console.print(
        f"\n[bold]coverage[/bold]  {found.total} nodes: {priced}, {found.plumbing} plumbing, "
        f"{found.folded} folded, {found.dead} dead"
    )
    for note in report.notes:
        where = f" [dim]({escape(note.where)})[/dim]" if note.where else ""
        console.print(f"  {note.level.value}: {escape(note.message)}{where}", soft_wrap=True)

"""`shardplan models`: list the bundled models, write one as an ONNX file."""

from __future__ import annotations

from pathlib import Path

import click

from ._options import format_option
from ._report import show_rows


@click.group("models")
def command() -> None:
    """List and build bundled models.

    \b
    Examples:
      shardplan models list --family llama
      shardplan models build llama3-70b -o llama3-70b.onnx --seq 4096
    """


@command.command("list")
@click.option("--family", metavar="NAME", help="Only models of this family.")
@format_option("table", "json")
def list_models(family: str | None, form: str) -> None:
    """List the bundled models: name, family, parameters, layers, usual sequence length, source.

    \b
    Examples:
      shardplan models list --family moe
      shardplan models list --format json
    """
    from planner import UsageError, bundled_families, bundled_info, bundled_names, did_you_mean, models_report

    families = bundled_families()
    if family is not None and family not in families:
        raise UsageError(f"no family of models is called {family!r}", hint=did_you_mean(family, families))
    found = [bundled_info(name) for name in bundled_names()]
    found = [info for info in found if family in (None, info.family)]
    show_rows(models_report(found), form)


@command.command("build")
@click.argument("name")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="ONNX file to write."
)
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Samples in one forward pass.")
@click.option("--seq", type=click.IntRange(min=1), help="Sequence length; the model's usual one when absent.")
def build_model(name: str, output: Path, batch: int, seq: int | None) -> None:
    """Write a bundled model as an ONNX file: graph and shapes, weights without data.

    \b
    Example:
      shardplan models build megatron-1t -o megatron-1t.onnx --batch 2 --seq 2048
    """
    from planner import build_bundled, bundled_info, write_whole

    info = bundled_info(name)
    data = build_bundled(name, batch=batch, seq=seq).SerializeToString(deterministic=True)
    write_whole(output, data)
    length = "" if info.seq is None else f", sequence {seq or info.seq}"
    click.echo(f"wrote {output}: {name}, batch {batch}{length}, {len(data) / 1e3:,.0f} kB without weights")

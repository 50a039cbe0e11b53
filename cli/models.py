"""`shardplan models`: list the bundled models, write one as an ONNX file."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click


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
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def list_models(family: str | None, form: str) -> None:
    """List the bundled models: name, family, parameters, layers, usual sequence length, source.

    \b
    Examples:
      shardplan models list --family moe
      shardplan models list --format json
    """
    from planner import UsageError, bundled_families, bundled_info, bundled_names, did_you_mean

    families = bundled_families()
    if family is not None and family not in families:
        raise UsageError(f"no family of models is called {family!r}", hint=did_you_mean(family, families))
    found = [bundled_info(name) for name in bundled_names()]
    found = [info for info in found if family in (None, info.family)]
    if form == "json":
        click.echo(json.dumps([asdict(info) for info in found], indent=2))
        return
    _print_table(found)


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


def _print_table(found: list[Any]) -> None:
    """One line a model; cut at the width of a terminal, whole when the output goes elsewhere."""
    titles = ("name", "family", "parameters", "layers", "seq", "source")
    rows = [
        (info.name, info.family, _short(info.parameters), str(info.layers), str(info.seq or "-"), info.source)
        for info in found
    ]
    widths = [max(len(text) for text in column) for column in zip(titles, *rows, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in (titles, *rows):
        cells = [
            text.rjust(width) if title in ("parameters", "layers", "seq") else text.ljust(width)
            for title, text, width in zip(titles, row, widths, strict=True)
        ]
        line = "  ".join(cells).rstrip()
        if limit is not None and len(line) > limit:
            line = line[: limit - 1] + "…"
        click.echo(click.style(line, bold=True) if row is titles else line)


def _short(count: int) -> str:
    """A number of parameters as people say it: 124M, 70.6B, 1.01T."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)

"""`shardplan models`: list the bundled models, and build models as ONNX files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

import planner

from ._options import count, dims_option, format_option, parse_dims
from ._report import show_rows


@click.group("models")
def command() -> None:
    """List and build bundled models.

    \b
    Examples:
      shardplan models list --family llama
      shardplan models build llama3-70b -o llama3-70b.onnx --seq 4096
      shardplan models build --family llama --layers 40 --hidden 5120 --heads 40 --ffn 13824 --vocab 32000 -o mine.onnx
    """


@command.command("list")
@click.option("--family", metavar="NAME", help="List only this family, with the options of its builders.")
@format_option("table", "json")
def list_models(family: str | None, form: str) -> None:
    """List the bundled models: name, family, parameters, layers, default sequence length, source.

    With --family, also list the size options of `models build`.

    \b
    Examples:
      shardplan models list --family moe
      shardplan models list --format json
    """
    types = planner.bundled.bundled_options()
    families = {*planner.bundled.bundled_families(), *(listed for listed, _ in types.values())}
    if family is not None and family not in families:
        raise planner.UsageError(
            f"no family of models is called {family!r}", hint=planner.registry.did_you_mean(family, families)
        )
    models = [planner.bundled_info(name) for name in planner.bundled_names()]
    models = [info for info in models if family in (None, info.family)]
    show_rows(planner.report.models_report(models), form)
    if family is None or form != "table":
        return
    for model_type, (listed, options) in types.items():
        if listed == family:
            click.echo(f"\noptions of {model_type}: {' '.join(f'--{name}' for name in options)}")


@command.command("build", context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
@click.option("--family", metavar="NAME", help="Build a model of this family or model_type with your own sizes.")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="ONNX file to write."
)
@count("--batch", default=1, show_default=True, help="Samples in one forward pass.")
@count("--seq", help="Sequence length. [default: the model's]")
@click.argument("sizes", nargs=-1, type=click.UNPROCESSED, metavar="[--SIZE VALUE]...")
def build_model(
    name: str | None, family: str | None, output: Path, batch: int, seq: int | None, sizes: tuple[str, ...]
) -> None:
    """Write a model as an ONNX file with graph and shapes, but without weight data.

    NAME is a bundled model; further options change its sizes (`--layers 16`), see `models list --family`. With --family
    you give all sizes.

    \b
    Examples:
      shardplan models build megatron-1t -o megatron-1t.onnx --batch 2 --seq 2048
      shardplan models build llama3-8b --layers 16 -o half.onnx
      shardplan models build --family llama --layers 40 --hidden 5120 --heads 40 --ffn 13824 --vocab 32000 -o mine.onnx
    """
    if family is not None and name is not None:
        sizes, name = (name, *sizes), None
    if (base := family or name) is None:
        raise planner.UsageError(
            "no model is named", hint="give the NAME of a bundled model, or --family and its sizes"
        )
    choices = _choices(sizes)
    notes: tuple[str, ...] = ()
    if family is None and not choices:
        info = planner.bundled_info(base)
        model = planner.build_bundled(base, batch=batch, seq=seq)
        length = "" if info.seq is None else f", sequence {seq or info.seq}"
    else:
        config = planner.bundled.bundled_config(base, choices)
        model, notes = planner.build_configured(config, name=output.stem, batch=batch, seq=seq)
        length = "" if seq is None else f", sequence {seq}"
    data = model.SerializeToString(deterministic=True)
    planner.files.write_whole(output, data)
    click.echo(f"wrote {output}: {base}, batch {batch}{length}, {len(data) / 1e3:,.0f} kB without weights")
    for note in notes:
        click.echo(f"note: {note}")


@command.command("rebatch")
@click.argument("model", metavar="MODEL", type=click.Path(dir_okay=False))
@count("--batch", required=True, help="Samples in one forward pass.")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path, dir_okay=False), help="ONNX file to write."
)
@dims_option
def rebatch_model(model: str, batch: int, output: Path, dims: tuple[str, ...]) -> None:
    """Convert an ONNX file that was exported at a fixed batch to another batch.

    Constants that contain the batch (targets of Reshape and Expand) get the values that plans for that micro-batch list
    in `model.rebatch`. The new file must be in the same folder if weights are stored in files beside the model.

    \b
    Examples:
      shardplan models rebatch model.onnx --batch 4 -o model-4.onnx
      shardplan models rebatch model.onnx --batch 4 --dim seq=128 -o model-4.onnx
    """
    rebatched = planner.importers.rebatched_file(model, batch, dims=parse_dims(dims))
    if rebatched.external and output.resolve().parent != Path(model).resolve().parent:
        raise planner.UsageError(
            f"the weights in {rebatched.external[0]} lie beside {model}, not beside {output}",
            hint="write the file into the same folder",
        )
    planner.files.write_whole(output, rebatched.model.SerializeToString(deterministic=True))
    click.echo(
        f"wrote {output}: batch {batch}, {planner.units.plural(rebatched.operands, 'operand')} with other values"
    )
    if rebatched.repeated:
        shown = ", ".join(rebatched.repeated[:3]) + (", ..." if len(rebatched.repeated) > 3 else "")
        constants = planner.units.plural(len(rebatched.repeated), "constant")
        click.echo(f"note: the first entry is taken for all samples in {constants}: {shown}")


def _choices(words: Sequence[str]) -> dict[str, str]:
    """Read `--layers 40 --hidden=5120` into values by option.

    Raises:
        UsageError: a word is no option, or an option has no value.
    """
    choices, remaining = {}, list(words)
    while remaining:
        word = remaining.pop(0)
        option, joined, value = word.partition("=")
        if not option.startswith("--"):
            raise planner.UsageError(f"{word!r} is not an option", hint="sizes are given as --layers 40")
        if not joined and (not remaining or remaining[0].startswith("--")):
            raise planner.UsageError(f"{option} lacks its value", hint=f"give {option} VALUE")
        choices[option.removeprefix("--")] = value if joined else remaining.pop(0)
    return choices

"""`shardplan export`: write a plan as configuration files of a training framework."""

from __future__ import annotations

import json
from pathlib import Path

import click

import planner

from ._options import dims_option, format_option, load_graph
from .run import model_of_plan


@click.command("export")
@click.argument("plan_file", metavar="PLAN")
@click.option(
    "--to",
    "name",
    required=True,
    metavar="NAME",
    help="Target framework: megatron, torchtitan, deepspeed, torch, jax, transformers, galvatron or onnx.",
)
@click.option(
    "-o",
    "--output",
    "folder",
    required=True,
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Folder for the files; created if missing, existing files are replaced.",
)
@click.option(
    "--model",
    "-m",
    help="The plan's model file or bundled model, to check that the ranks divide its attention heads; onnx writes a "
    "copy of it.",
)
@dims_option
@format_option("text", "json")
def command(plan_file: str, name: str, folder: str, model: str | None, dims: tuple[str, ...], form: str) -> None:
    """Write PLAN as launch script and configuration of a training framework.

    EXPORT.md in the same folder lists how each part of the plan was mapped, and what could not be mapped. A plan that
    the framework cannot express is refused with all reasons and what avoids them; the exit code is 7 then.

    \b
    Examples:
      shardplan export model.plan.json --to megatron -o megatron
      shardplan export model.plan.json --to torchtitan -o titan --model model.onnx
    """
    plan = planner.read_plan(plan_file)
    if dims and not model:
        raise click.UsageError("--dim needs --model")
    graph = load_graph(model, dims, None) if model else None
    exported = planner.export.export(plan, name, graph, model_of_plan(plan, model) if model else None)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise planner.OutputError(
            f"cannot make the folder: {error.strerror or error}", where=folder, hint="name another with -o"
        ) from error
    paths = [Path(folder, file) for file in exported.files]
    for path, text in zip(paths, exported.files.values(), strict=True):
        planner.files.write_whole(str(path), text)
    if form == "json":
        files = [str(path) for path in paths]
        click.echo(json.dumps({"files": files, "mapped": exported.mapped, "left_out": exported.left_out}, indent=2))
        return
    for path in paths:
        click.echo(f"wrote {path}")
    click.echo(
        f"{planner.units.plural(len(exported.left_out), 'thing')} not mapped: see {Path(folder, planner.export.PAGE)}"
    )

"""`shardplan migrate`: convert a plan file of an older version to this version."""

from __future__ import annotations

import os

import click

import planner

from ._options import read_file, shown_name


@click.command("migrate")
@click.argument("old")
@click.option("--output", "-o", metavar="NEW", help="File to write; - is standard output. [default: replace OLD]")
def command(old: str, output: str | None) -> None:
    """Convert the plan file OLD to this version; `-` reads standard input.

    Decisions and predictions do not change. A file of this version is written as it is. A plan with a wrong digest
    keeps a wrong digest, so that `check` still detects that it was edited.

    \b
    Examples:
      shardplan migrate old.plan.json -o new.plan.json
      shardplan migrate - < old.plan.json > new.plan.json
    """
    plan = planner.load_plan(read_file(old), name=shown_name(old))
    if not output and old != "-" and not os.path.exists(old):
        raise planner.UsageError(f"{old} cannot be written over", hint="name the new file with -o, or - with it")
    target = output or old
    if target == "-":
        click.echo(planner.dump_plan(plan), nl=False)
        return
    planner.write_plan(plan, target)
    click.echo(f"plan written to {target}")

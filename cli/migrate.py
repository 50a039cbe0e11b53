"""`shardplan migrate`: a plan file of an older version as one of this version."""

from __future__ import annotations

import os

import click

from ._options import read_file, shown_name


@click.command("migrate")
@click.argument("old")
@click.option("--output", "-o", metavar="NEW", help="Where to write it; - is standard output. [default: over OLD]")
def command(old: str, output: str | None) -> None:
    """Write the plan file OLD as one of this version; `-` reads standard input.

    Decisions and predictions stay as they are. A file of this version is written as it is. A plan whose digest is wrong
    keeps a wrong one, so that `check` still finds what was changed in it.

    \b
    Examples:
      shardplan migrate old.plan.json -o new.plan.json
      shardplan migrate - < old.plan.json > new.plan.json
    """
    import planner

    plan = planner.load_plan(read_file(old), name=shown_name(old))
    if not output and old != "-" and not os.path.exists(old):
        raise planner.UsageError(f"{old} cannot be written over", hint="name the new file with -o, or - with it")
    target = output or old
    if target == "-":
        click.echo(planner.dump_plan(plan), nl=False)
        return
    planner.write_plan(plan, target)
    click.echo(f"plan written to {target}")

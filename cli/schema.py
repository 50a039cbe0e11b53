"""`shardplan schema`: the JSON Schema of a file format."""

from __future__ import annotations

import json

import click


@click.command("schema")
@click.argument("subject", type=click.Choice(["plan", "hardware"]))
def command(subject: str) -> None:
    """Print the JSON Schema of plan files or of hardware profiles.

    \b
    Examples:
      shardplan schema plan > plan.schema.json
      shardplan schema hardware > hardware.schema.json
    """
    import planner

    schema = planner.plan_schema() if subject == "plan" else planner.profile_json_schema()
    click.echo(json.dumps(schema, indent=1, ensure_ascii=False))

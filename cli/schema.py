"""`shardplan schema`: print the JSON Schema of a file format."""

from __future__ import annotations

import json

import click

import planner


@click.command("schema")
@click.argument("subject", type=click.Choice(["plan", "configuration", "partition", "hardware"]))
def command(subject: str) -> None:
    """Print the JSON Schema of plan files, configuration files, partition plans or hardware profiles.

    \b
    Examples:
      shardplan schema plan > plan.schema.json
      shardplan schema hardware > hardware.schema.json
    """
    schemas = {
        "plan": planner.plans.plan_schema,
        "configuration": planner.plans.configuration_schema,
        "partition": planner.partitions.partition_schema,
        "hardware": planner.hardware.profile_json_schema,
    }
    click.echo(json.dumps(schemas[subject](), indent=1, ensure_ascii=False))

"""`shardplan check`: is a plan whole, and is it for this model and this hardware?"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from . import _partition
from ._options import dims_option, parse_dims

FOUND = 7


@click.command("check")
@click.argument("plan_file", metavar="PLAN")
@click.option("--model", metavar="MODEL", help="ONNX file or bundled model that the plan is for.")
@dims_option
@click.option("--hardware", "-H", metavar="NAME", help="Hardware profile (name or YAML file) that the plan is for.")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes, instead of the profile's own.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    plan_file: str, model: str | None, dims: tuple[str, ...], hardware: str | None, nodes: int | None, form: str
) -> int:
    """Check PLAN: schema, digest, stages, boundaries, ties, schedule, memory; exits with 7 when something is wrong.

    With --model also that every operator is in one stage, that boundaries are the graph's cut and where gradients flow;
    with --hardware also that it is the same machine and that memory suffices.

    \b
    Examples:
      shardplan check model.plan.json
      shardplan check model.plan.json --model model.onnx --dim seq=2048 --hardware dgx-a100 --nodes 2
      shardplan check gnmt.partition.json --model gnmt_training.json
    """
    import planner

    if planner.is_partition_plan(plan_file):
        given = {"--dim": dims, "--hardware": hardware, "--nodes": nodes}
        return _partition.check(plan_file, model, form, [flag for flag, value in given.items() if value])
    sizes = parse_dims(dims)
    if sizes and not model:
        raise click.UsageError("--dim needs --model")
    if nodes and not hardware:
        raise click.UsageError("--nodes needs --hardware")
    plan = planner.read_plan(plan_file)
    graph = planner.load_graph(model, dims=sizes) if model else None
    if graph is not None and graph.fingerprint == plan.model.fingerprint:
        graph = planner.rebatch(graph, plan.micro_batches.size)
    cluster = planner.load_cluster(hardware, nodes=nodes) if hardware else None
    findings = planner.validate_plan(plan, graph, cluster)
    checked = {"plan": plan_file, "model": model, "hardware": hardware}
    if form == "json":
        _print_json(checked, findings)
    else:
        _print_text(plan, checked, findings)
    return FOUND if findings else 0


def _print_json(checked: dict[str, str | None], findings: list[Any]) -> None:
    document = {**checked, "ok": not findings, "findings": [dataclasses.asdict(f) for f in findings]}
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))


def _print_text(plan: Any, checked: dict[str, str | None], findings: list[Any]) -> None:  # noqa: ANN401
    name = checked["plan"] or ""
    for finding in findings:
        click.echo(str(finding.problem(name)))
    if findings:
        click.echo(f"{name}: {len(findings)} finding{'s' if len(findings) > 1 else ''}")
        return
    against = [f"{what} {checked[what]}" for what in ("model", "hardware") if checked[what]]
    left = [what for what in ("model", "hardware") if not checked[what]]
    counts = {"stage": len(plan.stages), "rank": plan.world_size, "operator": plan.model.operators}
    shape = ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())
    click.echo(f"{name}: ok ({shape})" + (f", checked against {' and '.join(against)}" if against else ""))
    if left:
        click.echo(f"not checked against {' or '.join(left)}: name it with {' and '.join('--' + w for w in left)}")

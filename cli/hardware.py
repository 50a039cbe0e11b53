"""`shardplan hardware`: list, show, lint and start hardware profiles."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from ._options import Nodes, format_option, refuse_others
from ._progress import say_progress
from ._report import show, show_rows


@click.group("hardware")
def command() -> None:
    """List, show, lint and write hardware profiles.

    \b
    Examples:
      shardplan hardware list
      shardplan hardware show dgx-a100 --nodes 2
      shardplan hardware init --from dgx-a100 -o mine.yaml
      shardplan hardware lint mine.yaml
    """


@command.command("list", short_help="List bundled clusters or devices.")
@click.option("--devices", is_flag=True, help="List devices instead of clusters.")
@click.option("--stacks", is_flag=True, help="List stacks: the software that trains.")
@format_option("table", "json")
def list_profiles(devices: bool, stacks: bool, form: str) -> None:
    """List the bundled clusters, devices, or stacks of software.

    \b
    Examples:
      shardplan hardware list
      shardplan hardware list --devices --format json
      shardplan hardware list --stacks
    """
    import planner

    if stacks and devices:
        raise click.UsageError("--devices and --stacks are two lists: ask for one")
    listed = planner.stacks_report if stacks else planner.devices_report if devices else planner.clusters_report
    show_rows(listed(), form)


@command.command("show", short_help="Show levels, figures and sources.")
@click.argument("name")
@click.option("--nodes", type=Nodes(), help="Number of nodes, or 4x64; the profile's own when absent.")
@click.option("--resolved", is_flag=True, help="Devices written out and defaults filled in (YAML unless --format).")
@click.option("--format", "form", type=click.Choice(["table", "yaml", "json"]), help="json is always resolved.")
def show_profile(name: str, nodes: int | str | None, resolved: bool, form: str | None) -> None:
    """Show a bundled cluster or device, or the profile in a file: its levels, figures and sources.

    \b
    Examples:
      shardplan hardware show dgx-a100 --nodes 2
      shardplan hardware show h100-sxm-80gb
      shardplan hardware show mine.yaml --resolved --format json
    """
    import planner

    if name in planner.hardware.stack_names() and not form:
        form = "yaml"
    if form == "json":
        click.echo(json.dumps(planner.hardware.resolved_profile(name, nodes), indent=2))
    elif form == "yaml" and not resolved and nodes is None:
        click.echo(planner.hardware.profile_text(name), nl=False)
    elif form == "yaml" or (resolved and form is None):
        click.echo(planner.hardware.profile_yaml(planner.hardware.resolved_profile(name, nodes)), nl=False)
    else:
        show(planner.cluster_report(planner.load_cluster(name, nodes=nodes)))


@command.command("lint", short_help="Check profile files.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.pass_context
def lint_profiles(ctx: click.Context, files: tuple[Path, ...]) -> None:
    """Check profile files; prints every finding with its place and a hint, exit code 4 when there is one.

    \b
    Examples:
      shardplan hardware lint mine.yaml
      shardplan hardware lint profiles/*.yaml
    """
    import planner

    count = 0
    for file in files:
        try:
            problems = planner.hardware.lint(file)
        except planner.HardwareError as error:
            problems = [error.problem]
        for problem in problems:
            click.echo(str(problem))
            if problem.excerpt:
                click.echo(problem.excerpt)
        count += len(problems)
    errors = planner.plural(count, "error") if count else "no errors"
    click.echo(f"{planner.plural(len(files), 'file')} checked: {errors}")
    ctx.exit(4 if count else 0)


@command.command("init", short_help="Write a commented profile to edit.")
@click.option("--from", "base", default="dgx-a100", show_default=True, help="Profile to start from, a name or a file.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; standard output when absent.")
@click.option("--measure", is_flag=True, help="Measure this machine's processor instead, as a device of its own.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.pass_context
def init_profile(ctx: click.Context, base: str, output: Path | None, measure: bool, force: bool) -> None:
    """Write a commented profile to make your own from; as written it lints clean.

    With --measure it is a device: matrix products, copies and single calls in fp32 on this machine's processor. A stack
    without launches of its own (`launch`) leaves the measured one. Other accelerators, and links, are not measured.

    \b
    Examples:
      shardplan hardware init -o mine.yaml
      shardplan hardware init --from ethernet-25g -o lab.yaml
      shardplan hardware init --measure -o laptop.yaml
    """
    import planner

    if output is not None and os.path.exists(output) and not force:
        raise planner.UsageError("the file exists", where=str(output), hint="choose another name, or give --force")
    if measure:
        refuse_others(ctx, {"measure", "output", "force"}, "--measure")
        found = planner.hardware.measure_machine(say_progress)
        text = planner.hardware.measured_profile_text(found, output.stem if output else "this-machine")
    else:
        text = planner.hardware.profile_template(base, output.stem if output else f"my-{Path(base).stem}")
    if output is None:
        click.echo(text, nl=False)
        return
    planner.write_whole(output, text)
    click.echo(f"wrote {output}; check it with: shardplan hardware lint {output}")


@command.command("schema", short_help="Print the JSON Schema for editors.")
def print_schema() -> None:
    """Print the JSON Schema of profile files, which editors use for completion and checks.

    \b
    Editors that know the YAML language server read it from the first line of a profile:
      # yaml-language-server: $schema=hardware.schema.json

    \b
    Example:
      shardplan hardware schema > hardware.schema.json
    """
    import planner

    click.echo(json.dumps(planner.hardware.profile_json_schema(), indent=2))

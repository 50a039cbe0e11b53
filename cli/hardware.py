"""`shardplan hardware`: list, show, lint and start hardware profiles."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._options import NODES, complete, format_option, read_file, refuse_others
from ._progress import say_progress
from ._report import show, show_rows

if TYPE_CHECKING:
    import planner

LINK_WORDS = "NAME:BANDWIDTH of a port in one direction[,ports=N][,size=N][,latency=TIME][,efficiency=PART]."


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
    listed = (
        planner.report.stacks_report
        if stacks
        else planner.report.devices_report
        if devices
        else planner.report.clusters_report
    )
    show_rows(listed(), form)


@command.command("show", short_help="Show levels, figures and sources.")
@click.argument("name", shell_complete=complete("hardware"))
@click.option("--nodes", type=NODES, help="Number of nodes, or 4x64; the profile's own when absent.")
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
        show(planner.report.cluster_report(planner.load_cluster(name, nodes=nodes)))


@command.command("lint", short_help="Check profile files.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@format_option("text", "json", "github")
@click.option("--strict", is_flag=True, help="Exit with 4 on warnings, too.")
@click.pass_context
def lint_profiles(ctx: click.Context, files: tuple[Path, ...], form: str, strict: bool) -> None:
    """Check profile files; prints every finding with its place and a hint, exit code 4 when there is one.

    Figures that can be read and are not plausible (a unit that slipped, an outer level faster than an inner one) are
    warnings.

    \b
    Examples:
      shardplan hardware lint mine.yaml
      shardplan hardware lint profiles/*.yaml --format github --strict
    """
    import planner

    found: list[tuple[str, Any]] = []
    for file in files:
        try:
            found += [("error", problem) for problem in planner.hardware.lint(file)]
            found += [("warning", problem) for problem in planner.hardware.warnings(file)]
        except planner.HardwareError as error:
            found.append(("error", error.problem))
    errors = sum(severity == "error" for severity, _ in found)
    if form == "json":
        rows = [{"severity": s, "message": p.message, "where": p.where, "hint": p.hint} for s, p in found]
        click.echo(json.dumps({"files": len(files), "errors": errors, "findings": rows}, indent=2, ensure_ascii=False))
    for severity, problem in found if form != "json" else ():
        if form == "github":
            click.echo(planner.report.annotation(severity, problem))
            continue
        click.echo(f"{'warning: ' if severity == 'warning' else ''}{problem}")
        if problem.excerpt:
            click.echo(problem.excerpt)
    if form == "text":
        said = planner.units.plural(errors, "error") if errors else "no errors"
        warned = f", {planner.units.plural(len(found) - errors, 'warning')}" if len(found) > errors else ""
        click.echo(f"{planner.units.plural(len(files), 'file')} checked: {said}{warned}")
    ctx.exit(4 if errors or (strict and found) else 0)


@command.command("init", short_help="Write a commented profile to edit.")
@click.option("--from", "base", default="dgx-a100", show_default=True, help="Profile to start from, a name or a file.")
@click.option("--device", shell_complete=complete("devices"), help="Instead: a cluster of this bundled device.")
@click.option("--per-node", type=click.IntRange(min=1), default=8, show_default=True, help="Devices of a node.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, show_default=True, help="Nodes of the cluster.")
@click.option("--inside", multiple=True, metavar="LINK", help=f"Links inside a node, innermost first: {LINK_WORDS}")
@click.option("--between", multiple=True, metavar="LINK", help="Links between nodes: a card and how many a node has.")
@click.option("--ask", is_flag=True, help="Ask for these figures instead.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; standard output when absent.")
@click.option("--measure", is_flag=True, help="Measure this machine's processor instead, as a device of its own.")
@click.option(
    "--ranks", type=click.IntRange(min=2),
    help="With --measure, a node of so many ranks instead: what they take to exchange over gloo, and what a rank "
    "computes with its share of the cores. With --device over NCCL on so many GPUs. Needs torch.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@click.pass_context
def init_profile(
    ctx: click.Context,
    base: str,
    device: str | None,
    per_node: int,
    nodes: int,
    inside: tuple[str, ...],
    between: tuple[str, ...],
    ask: bool,
    output: Path | None,
    measure: bool,
    ranks: int | None,
    force: bool,
) -> None:
    """Write a commented profile to make your own from; as written it lints clean.

    It is another profile's text (--from), or a cluster of a few figures: --device with its links, or --ask. Latency and
    efficiency that are not given are those usual for the kind of link, and the profile says so.

    With --measure it is a device: matrix products, copies and single calls in fp32 on this machine's processor. A stack
    without launches of its own (`launch`) leaves the measured one. With --ranks, too, it is a node: messages and
    collectives of five sizes among processes of this machine.

    \b
    Examples:
      shardplan hardware init -o mine.yaml
      shardplan hardware init --from ethernet-25g -o lab.yaml
      shardplan hardware init --device h100-sxm-80gb --per-node 8 --nodes 4 --inside nvlink:450GB/s
        --between infiniband:400Gbit/s,ports=8 -o lab.yaml
      shardplan hardware init --ask -o lab.yaml
      shardplan hardware init --measure -o laptop.yaml
      shardplan hardware init --measure --ranks 2 -o laptop-of-2.yaml
      shardplan hardware init --measure --ranks 8 --device h100-sxm-80gb -o node.yaml
    """
    import planner

    _refuse_existing(output, force)
    stem = output.stem if output else ""
    few = {"device", "per_node", "nodes", "inside", "between"}
    if ranks:
        refuse_others(ctx, {"measure", "ranks", "device", "output", "force"}, "--measure --ranks")
        if not measure:
            raise planner.UsageError("--ranks are measured", hint="give --measure with it")
        text = planner.hardware.sketch_text(_measured_node(stem or "this-machine", device, ranks))
    elif measure:
        refuse_others(ctx, {"measure", "output", "force"}, "--measure")
        found = planner.hardware.measure_machine(say_progress)
        text = planner.hardware.measured_profile_text(found, stem or "this-machine")
    elif ask or device:
        refuse_others(ctx, {"output", "force", *({"ask"} if ask else few)}, "--ask" if ask else "--device")
        figures = _asked() if ask else (str(device), per_node, nodes, inside, between)
        text = planner.hardware.sketch_text(_sketch(stem or "my-cluster", *figures))
    else:
        refuse_others(ctx, {"base", "output", "force"}, "--from", "give --device with it")
        text = planner.hardware.profile_template(base, stem or f"my-{Path(base).stem}")
    _write(output, text)


def _measured_node(name: str, device: str | None, ranks: int) -> planner.hardware.ClusterSketch:
    """Ranks of this machine with what they take to exchange, on its GPUs where it is said which they are."""
    import planner

    found = planner.runtime.measure_links(ranks, on_gpus=device is not None)
    own = {} if found.machine is None else {f"{name}-rank": planner.hardware.measured_device(found.machine, ranks)}
    return planner.hardware.ClusterSketch(name, device or f"{name}-rank", (found.sketch(),), device_types=own)


def _refuse_existing(output: Path | None, force: bool) -> None:
    import planner

    if output is not None and os.path.exists(output) and not force:
        raise planner.UsageError("the file exists", where=str(output), hint="choose another name, or give --force")


def _write(output: Path | None, text: str) -> None:
    import planner

    if output is None or str(output) == "-":
        click.echo(text, nl=False)
        return
    planner.files.write_whole(output, text)
    click.echo(f"wrote {output}; check it with: shardplan hardware lint {output}")


def _sketch(
    name: str, device: str, per_node: int, nodes: int, inside: Sequence[str], between: Sequence[str]
) -> planner.hardware.ClusterSketch:
    """A cluster of a few figures.

    Raises:
        UsageError: links are missing, or do not join what there is.
    """
    import planner

    own = planner.hardware
    links = [own.read_link(text, where="--inside") for text in inside]
    outer = [own.read_link(text, where="--between") for text in between]
    if per_node > 1 and not links:
        raise planner.UsageError(f"{per_node} devices a node, and no link joins them", hint="give --inside")
    if nodes > 1 and not outer:
        raise planner.UsageError(f"{nodes} nodes, and no link joins them", hint="give --between")
    joined = own.sized(links, per_node, where="--inside") if links else ()
    return own.ClusterSketch(name, device, joined, tuple(outer), nodes)


def _asked() -> tuple[str, int, int, tuple[str, ...], tuple[str, ...]]:
    """The figures of a cluster, asked for one by one on standard error."""
    import planner

    known = planner.device_names()
    device = click.prompt("device (`shardplan hardware list --devices`)", type=click.Choice(known), err=True,
                          show_choices=False)  # fmt: skip
    per_node = click.prompt("devices of a node", type=click.IntRange(min=1), default=8, err=True)
    nodes = click.prompt("nodes", type=click.IntRange(min=1), default=1, err=True)
    inside: tuple[str, ...] = ()
    between: tuple[str, ...] = ()
    if per_node > 1:
        kind = click.prompt("link inside a node (nvlink, xgmi, pcie)", default="nvlink", err=True)
        rate = click.prompt("its bandwidth, a device and one direction (450GB/s)", err=True)
        inside = (f"{kind}:{rate}",)
    if nodes > 1:
        kind = click.prompt("link between nodes (infiniband, roce, ethernet)", default="infiniband", err=True)
        rate = click.prompt("bandwidth of one card (400Gbit/s)", err=True)
        cards = click.prompt("cards of a node", type=click.IntRange(min=1), default=1, err=True)
        between = (f"{kind}:{rate},ports={cards}",)
    return device, per_node, nodes, inside, between


@command.command("import", short_help="Write a profile from what another tool says.")
@click.argument("source", metavar="FILE")
@click.option("--device", shell_complete=complete("devices"), help="Bundled device, where the tool does not say it.")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes; with topologies.")
@click.option("--between", multiple=True, metavar="LINK", help="Links between nodes, as of init; with topologies.")
@click.option("--into", metavar="PROFILE", help="Profile that measured collectives are put into; with nccl-tests.")
@click.option("--level", help="Level of it that they were measured on.")
@click.option("--collective", default="", help="Which one was measured, where the text does not name its test.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; standard output when absent.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def import_profile(
    source: str,
    device: str | None,
    nodes: int | None,
    between: tuple[str, ...],
    into: str | None,
    level: str | None,
    collective: str,
    output: Path | None,
    force: bool,
) -> None:
    """Write a profile from what another tool prints or reads; FILE may be `-`, for pasted text.

    The text is that of `nvidia-smi topo -m`, of nccl-tests, a system of Calculon or a network of ASTRA-sim, told apart
    by their content. What it does not say is taken as usual, and the profile says so.

    \b
    Examples:
      shardplan hardware import topo.txt --device a100-sxm-80gb -o node.yaml
      nvidia-smi topo -m | shardplan hardware import - --device a100-sxm-80gb -o node.yaml
      shardplan hardware import topo.txt --device h100-sxm-80gb --nodes 4 --between infiniband:400Gbit/s,ports=8
      shardplan hardware import all_reduce.log --into node.yaml --level nvlink -o measured.yaml
      shardplan hardware import systems/a100_80g.json -o calculon.yaml
      shardplan hardware import network.yml --device a100-sxm-80gb
    """
    import planner

    _refuse_existing(output, force)
    text = read_file(source).decode("utf-8", errors="replace")
    own, name = planner.hardware, output.stem if output else "imported"
    kind = own.kind_of(text)
    if not kind:
        known = "nvidia-smi topo -m, nccl-tests, a Calculon system or an ASTRA-sim network"
        raise planner.HardwareError("whose text it is, is not seen", where=source, hint=f"paste all of it: {known}")
    if kind == "nccl":
        if not (into and level):
            raise planner.UsageError("measured collectives need a profile", hint="give --into PROFILE --level NAME")
        measured, row = own.from_nccl_tests(text, collective=collective)
        _write(output, own.with_measured(into, level, {measured: row}, name))
        return
    if kind != "calculon" and not device:
        raise planner.UsageError("the text does not say which device it is", hint="give --device NAME")
    if kind == "topology":
        found = own.from_topology(text, name=name, device=str(device))
        outer = tuple(own.read_link(link, where="--between") for link in between)
        found = dataclasses.replace(found, between=outer, nodes=nodes or 1)
    else:
        found = own.from_calculon(text, name=name) if kind == "calculon" else own.from_astra(
            text, name=name, device=str(device)
        )  # fmt: skip
    _write(output, own.sketch_text(found))


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

"""`shardplan hardware`: list, show, check, create and import hardware profiles."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import click

import planner

from . import _options
from ._options import NODES, Options, complete, count, flag, format_option, read_file, refuse_others, shown_name
from ._report import say, say_document, say_progress, show

LINK_WORDS = (
    "NAME:BANDWIDTH per port and direction, optionally followed by ,ports=N ,size=N ,latency=TIME ,efficiency=PART "
    ",oversubscription=RATIO."
)


@click.group("hardware")
def command() -> None:
    """List, show, check, create and import hardware profiles.

    \b
    Examples:
      shardplan hardware list
      shardplan hardware show dgx-a100 --nodes 2
      shardplan hardware init --from dgx-a100 -o mine.yaml
      shardplan hardware lint mine.yaml
    """


@_options.command("list", command, short_help="List bundled clusters or devices.")
@flag("--devices", help="List devices instead of clusters.")
@flag("--stacks", help="List software stacks instead of clusters.")
@format_option("table", "json")
def list_profiles(given: Options) -> None:
    """List the bundled clusters, devices or software stacks.

    \b
    Examples:
      shardplan hardware list
      shardplan hardware list --devices --format json
      shardplan hardware list --stacks
    """
    if given.stacks and given.devices:
        raise click.UsageError("--devices and --stacks cannot be combined")
    report = planner.report
    listed = report.devices_report if given.devices else report.clusters_report
    show(report.stacks_report() if given.stacks else listed(), form=given.form)


@_options.command("show", command, short_help="Show levels, figures and sources.")
@click.argument("name", type=_options.HARDWARE, shell_complete=complete("hardware"))
@click.option(
    "--nodes", type=NODES, help="Number of nodes, or 4x64 for 64 devices of each of 4 nodes. [default: the profile's]"
)
@flag("--resolved", help="Write devices and defaults out in full (as YAML unless --format).")
@click.option(
    "--format", "form", type=click.Choice(["table", "yaml", "json"]), help="Output format; json is always resolved."
)
def show_profile(given: Options) -> None:
    """Show a bundled cluster or device, or the profile in a file: its levels, figures and sources.

    \b
    Examples:
      shardplan hardware show dgx-a100 --nodes 2
      shardplan hardware show h100-sxm-80gb
      shardplan hardware show mine.yaml --resolved --format json
    """
    name, nodes, resolved, form = given.name, given.nodes, given.resolved, given.form
    if name in planner.hardware.stack_names() and not form:
        form = "yaml"
    if form == "json":
        say_document(json.dumps(planner.hardware.resolved_profile(name, nodes), indent=2) + "\n")
    elif form == "yaml" and not resolved and nodes is None:
        click.echo(planner.hardware.profile_text(name), nl=False)
    elif form == "yaml" or (resolved and form is None):
        click.echo(planner.hardware.profile_yaml(planner.hardware.resolved_profile(name, nodes)), nl=False)
    else:
        profile = planner.hardware.resolved_profile(name, nodes)
        show(planner.report.cluster_report(planner.load_cluster(name, nodes=nodes), profile))


@_options.command("lint", command, short_help="Check profile files.")
@click.argument("files", nargs=-1, required=True, type=_options.FilePath("hardware", path_type=Path))
@format_option("text", "json", "github")
@flag("--strict", help="Also exit with 4 on warnings.")
def lint_profiles(given: Options) -> int:
    """Check profile files: print every finding with its position and a hint. Exits with 4 if there is an error.

    Implausible figures (a wrong unit, an outer level that is faster than an inner one) are warnings.

    \b
    Examples:
      shardplan hardware lint mine.yaml
      shardplan hardware lint profiles/*.yaml --format github --strict
    """
    findings: list[tuple[str, Any]] = []
    form, files = given.form, planner.units.plural(len(given.files), "file")
    for file in given.files:
        try:
            findings += [("error", problem) for problem in planner.hardware.lint(file)]
            findings += [("warning", problem) for problem in planner.hardware.warnings(file)]
        except planner.HardwareError as error:
            findings.append(("error", error.problem))
    errors = sum(severity == "error" for severity, _ in findings)
    if form == "json":
        rows = [{"severity": s, "message": p.message, "where": p.where, "hint": p.hint} for s, p in findings]
        document = {"files": len(given.files), "errors": errors, "findings": rows}
        say_document(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    for severity, problem in findings if form != "json" else ():
        if form == "github":
            click.echo(planner.report.annotation(severity, problem))
            continue
        say(f"{'warning: ' if severity == 'warning' else ''}{problem}")
        if problem.excerpt:
            click.echo(problem.excerpt)
    if form == "text":
        verdict = planner.units.plural(errors, "error") if errors else "no errors"
        warning_count = f", {planner.units.plural(len(findings) - errors, 'warning')}" if len(findings) > errors else ""
        click.echo(f"{files} checked: {verdict}{warning_count}")
    return 4 if errors or (given.strict and findings) else 0


@_options.command("init", command, short_help="Create a commented profile to edit.")
@click.option(
    "--from",
    "base",
    type=_options.HARDWARE,
    default="dgx-a100",
    show_default=True,
    help="Copy this profile: a name or a file.",
)
@click.option("--device", shell_complete=complete("devices"), help="Describe a cluster of this bundled device instead.")
@count("--per-node", default=8, show_default=True, help="Devices per node.")
@count("--nodes", default=1, show_default=True, help="Number of nodes.")
@click.option("--inside", multiple=True, metavar="LINK", help=f"Links inside a node, innermost first: {LINK_WORDS}")
@click.option(
    "--between",
    multiple=True,
    metavar="LINK",
    help="Links between nodes, likewise; ports is the number of network cards per node.",
)
@flag("--ask", help="Ask for these figures interactively.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write. [default: standard output]")
@flag("--measure", help="Measure this machine's processor and write it as a device.")
@click.option(
    "--ranks", type=click.IntRange(min=2),
    help="With --measure, measure a node of this many ranks: collectives over gloo, and the speed of a rank with its "
    "share of the cores; with --device, collectives over NCCL on this many GPUs. Needs torch.",
)  # fmt: skip
@flag("--force", help="Replace the file if it exists.")
def init_profile(given: Options) -> None:
    """Create a commented hardware profile that you can edit.

    The profile is a copy of another one (--from), or describes a cluster by a few figures: --device with its links, or
    --ask. Latency and efficiency that you do not give get usual values for the kind of link, and comments say so.

    With --measure the profile is a device: matrix products, copies and single calls in fp32 on this machine's processor
    are measured. The measured launch time is used with stacks that define no `launch`. With --measure --ranks it is a
    node: messages and collectives of five sizes among processes of this machine are measured.

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
    _refuse_existing(given)
    stem = given.output.stem if given.output else ""
    sketch_options = {"device", "per_node", "nodes", "inside", "between"}
    if given.ranks:
        refuse_others({"measure", "ranks", "device", "output", "force"}, "--measure --ranks")
        if not given.measure:
            raise planner.UsageError("--ranks needs --measure", hint="give both")
        text = planner.hardware.sketch_text(_measured_node(stem or "this-machine", given.device, given.ranks))
    elif given.measure:
        refuse_others({"measure", "output", "force"}, "--measure")
        measurement = planner.hardware.measure_machine(say_progress)
        text = planner.hardware.measured_profile_text(measurement, stem or "this-machine")
    elif given.ask or given.device:
        takes, mode = ({"ask"}, "--ask") if given.ask else (sketch_options, "--device")
        refuse_others({"output", "force", *takes}, mode)
        text = planner.hardware.sketch_text(_sketch(stem or "my-cluster", _asked() if given.ask else given))
    else:
        refuse_others({"base", "output", "force"}, "--from", "give --device with it")
        text = planner.hardware.profile_template(given.base, stem or f"my-{Path(given.base).stem}")
    _write(given.output, text)


def _measured_node(name: str, device: str | None, ranks: int) -> planner.hardware.ClusterSketch:
    """A node of ranks of this machine with measured links; on its GPUs if their device type is given."""
    measurement = planner.runtime.measure_links(ranks, on_gpus=device is not None)
    machine = measurement.machine
    device_types = {} if machine is None else {f"{name}-rank": planner.hardware.measured_device(machine, ranks)}
    return planner.hardware.ClusterSketch(
        name, device or f"{name}-rank", (measurement.sketch(),), device_types=device_types
    )


def _refuse_existing(given: Options) -> None:
    if given.output is not None and os.path.exists(given.output) and not given.force:
        raise planner.UsageError(
            "the file exists", where=str(given.output), hint="choose another name, or give --force"
        )


def _write(output: Path | None, text: str) -> None:
    planner.files.write_whole(output or "-", text)
    if output and str(output) != "-":
        say(f"wrote {output}; check it with: shardplan hardware lint {planner.escaping.shell(str(output))}")


def _sketch(name: str, given: Options) -> planner.hardware.ClusterSketch:
    """A cluster described by a few figures.

    Raises:
        UsageError: links are missing, or do not connect all devices.
    """
    hardware = planner.hardware
    links = [hardware.read_link(text, where="--inside") for text in given.inside]
    outer = [hardware.read_link(text, where="--between") for text in given.between]
    if given.per_node > 1 and not links:
        raise planner.UsageError(f"no link connects the {given.per_node} devices of a node", hint="give --inside")
    if given.nodes > 1 and not outer:
        raise planner.UsageError(f"no link connects the {given.nodes} nodes", hint="give --between")
    joined = hardware.sized(links, given.per_node, where="--inside") if links else ()
    return hardware.ClusterSketch(name, given.device, joined, tuple(outer), given.nodes)


def _asked() -> Options:
    """Ask for the figures of a cluster one by one, on standard error."""
    known = planner.device_names()
    device = click.prompt("device (`shardplan hardware list --devices`)", type=click.Choice(known), err=True,
                          show_choices=False)  # fmt: skip
    per_node = click.prompt("devices per node", type=click.IntRange(min=1), default=8, err=True)
    nodes = click.prompt("nodes", type=click.IntRange(min=1), default=1, err=True)
    asked = Options(device=device, per_node=per_node, nodes=nodes, inside=(), between=())
    if per_node > 1:
        kind = click.prompt("link inside a node (nvlink, xgmi, pcie)", default="nvlink", err=True)
        rate = click.prompt("its bandwidth per device and direction (450GB/s)", err=True)
        asked.inside = (f"{kind}:{rate}",)
    if nodes > 1:
        kind = click.prompt("link between nodes (infiniband, roce, ethernet)", default="infiniband", err=True)
        rate = click.prompt("bandwidth of one network card (400Gbit/s)", err=True)
        cards = click.prompt("network cards per node", type=click.IntRange(min=1), default=1, err=True)
        asked.between = (f"{kind}:{rate},ports={cards}",)
    return asked


@_options.command("import", command, short_help="Create a profile from the output of another tool.")
@click.argument("source", type=_options.FileText("machine"), metavar="FILE")
@click.option(
    "--device",
    shell_complete=complete("devices"),
    help="Device type, if the text does not name it: bundled, or for topologies also the file of a device.",
)
@count("--nodes", help="Number of nodes; for topologies.")
@click.option("--between", multiple=True, metavar="LINK", help="Links between nodes, as for init; for topologies.")
@click.option(
    "--into", type=_options.HARDWARE, metavar="PROFILE", help="Profile to add measured collectives to; for nccl-tests."
)
@click.option("--level", help="Level of the profile that was measured.")
@click.option("--collective", default="", help="Collective that was measured, if the text does not name it.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write. [default: standard output]")
@flag("--force", help="Replace the file if it exists.")
def import_profile(given: Options) -> None:
    """Create a hardware profile from a text of another tool; FILE may be `-` for standard input.

    The text is the output of `nvidia-smi topo -m`, `rocm-smi --showtopo` or nccl-tests, a Calculon system or an
    ASTRA-sim network; the format is detected. Missing figures get usual values whose source is `assumed`; what of a
    topology is not taken is said on standard error and in comments.

    \b
    Examples:
      shardplan hardware import topo.txt --device a100-sxm-80gb -o node.yaml
      nvidia-smi topo -m | shardplan hardware import - --device a100-sxm-80gb -o node.yaml
      shardplan hardware import topo.txt --device h100-sxm-80gb --nodes 4 --between infiniband:400Gbit/s,ports=8
      rocm-smi --showtopo | shardplan hardware import - --device mi300x-192gb -o node.yaml
      shardplan hardware import all_reduce.log --into node.yaml --level nvlink -o measured.yaml
      shardplan hardware import systems/a100_80g.json -o calculon.yaml
      shardplan hardware import network.yml --device a100-sxm-80gb
    """
    _refuse_existing(given)
    where = shown_name(given.source)
    door = planner.foreign_files.Door(where, planner.HardwareError, "give the text as the tool wrote it")
    text = door.text(read_file(given.source, "name the file with the text of the tool"))
    hardware, name, device = planner.hardware, given.output.stem if given.output else "imported", given.device
    kind = hardware.kind_of(text)
    if not kind:
        known = "nvidia-smi topo -m, rocm-smi --showtopo, nccl-tests, a Calculon system or an ASTRA-sim network"
        raise planner.HardwareError(
            "the format of the text is unknown", where=given.source, hint=f"give the complete text of {known}"
        )
    if kind == "nccl":
        if not (given.into and given.level):
            raise planner.UsageError("measured collectives need a profile", hint="give --into PROFILE --level NAME")
        measured, row = hardware.from_nccl_tests(text, collective=given.collective, where=where)
        _write(given.output, hardware.with_measured(given.into, given.level, {measured: row}, name))
        return
    if kind != "calculon" and not device:
        raise planner.UsageError("the text does not say which device it is", hint="give --device NAME")
    if kind == "topology":
        sketch = hardware.from_topology(text, name=name, device=device, where=where)
        outer = tuple(hardware.read_link(link, where="--between") for link in given.between)
        sketch = dataclasses.replace(sketch, between=outer, nodes=given.nodes or 1)
    elif kind == "calculon":
        sketch = hardware.from_calculon(text, name=name, where=where)
    else:
        sketch = hardware.from_astra(text, name=name, device=device, where=where)
    _write(given.output, hardware.sketch_text(sketch))
    for note in sketch.notes:
        say(f"not taken: {note}", err=True)


@command.command("schema", short_help="Print the JSON Schema for editors.")
def print_schema() -> None:
    """Print the JSON Schema of profile files, for completion and checks in editors.

    \b
    Editors with the YAML language server find it by the first line of a profile:
      # yaml-language-server: $schema=hardware.schema.json

    \b
    Example:
      shardplan hardware schema > hardware.schema.json
    """
    click.echo(json.dumps(planner.hardware.profile_json_schema(), indent=2))

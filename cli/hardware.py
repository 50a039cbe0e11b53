"""`shardplan hardware`: list, show, lint and start hardware profiles."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from planner import Cluster, Device, Level


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
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
def list_profiles(devices: bool, form: str) -> None:
    """List the bundled clusters, or devices.

    \b
    Examples:
      shardplan hardware list
      shardplan hardware list --devices --format json
    """
    rows = _device_rows() if devices else _cluster_rows()
    if form == "json":
        click.echo(json.dumps(rows, indent=2))
        return
    from planner import format_bytes, format_flop_rate, format_rate

    show = {"memory_bytes": format_bytes, "memory_byte_per_s": format_rate, "peak_flop_per_s": format_flop_rate}
    titles = {"memory_bytes": "memory", "memory_byte_per_s": "bandwidth", "peak_flop_per_s": "16-bit peak"}
    columns = [column for column in rows[0] if column not in ("levels", "achievable")]
    cells = [[str(show[c](row[c]) if c in show else row[c]) for c in columns] for row in rows]
    _print_table([titles.get(c, c) for c in columns], cells)


def _cluster_rows() -> list[dict[str, Any]]:
    from planner import cluster_names, load_cluster

    rows = []
    for name in cluster_names():
        cluster = load_cluster(name)
        rows.append(
            {
                "name": name,
                "nodes": cluster.device_count // cluster.node_size,
                "devices": cluster.device_count,
                "type": ", ".join(device.name for device in cluster.devices),
                "levels": [level.name for level in cluster.levels],
                "about": cluster.about,
            }
        )
    return rows


def _device_rows() -> list[dict[str, Any]]:
    from planner import device_names, load_device

    rows = []
    for name in device_names():
        device = load_device(name)
        rows.append(
            {
                "name": name,
                "memory_bytes": device.memory_bytes,
                "memory_byte_per_s": device.memory_byte_per_s,
                "peak_flop_per_s": _peak(device)[1],
                "achievable": device.matrix_efficiency.fractions[-1],
                "about": device.about,
            }
        )
    return rows


def _peak(device: Device) -> tuple[str, float]:
    """The number format of 16 bits that the device has, else its first, and the peak."""
    kinds = device.matrix_flop_per_s
    kind = next((k for k in ("bf16", "fp16") if k in kinds), next(iter(kinds)))
    return kind, kinds[kind]


@command.command("show", short_help="Show levels, figures and sources.")
@click.argument("name")
@click.option("--nodes", type=click.IntRange(min=1), help="Number of nodes; the profile's own when absent.")
@click.option("--resolved", is_flag=True, help="Devices written out and defaults filled in (YAML unless --format).")
@click.option("--format", "form", type=click.Choice(["table", "yaml", "json"]), help="json is always resolved.")
def show_profile(name: str, nodes: int | None, resolved: bool, form: str | None) -> None:
    """Show a bundled cluster or device, or the profile in a file: its levels, figures and sources.

    \b
    Examples:
      shardplan hardware show dgx-a100 --nodes 2
      shardplan hardware show h100-sxm-80gb
      shardplan hardware show mine.yaml --resolved --format json
    """
    import planner

    cluster = planner.load_cluster(name, nodes=nodes)
    if form == "json":
        click.echo(json.dumps(planner.hardware.resolved_profile(name, nodes), indent=2))
    elif form == "yaml" and not resolved and nodes is None:
        click.echo(planner.hardware.profile_text(name), nl=False)
    elif form == "yaml" or (resolved and form is None):
        click.echo(planner.hardware.profile_yaml(planner.hardware.resolved_profile(name, nodes)), nl=False)
    else:
        _show(cluster)


def _show(cluster: Cluster) -> None:
    from rich.markup import escape
    from rich.tree import Tree

    console = _console()
    console.print(f"[bold]{escape(cluster.name)}[/bold]  {escape(cluster.about)}", soft_wrap=True)
    console.print(f"{_many(cluster.device_count, 'device')}, fingerprint {cluster.fingerprint[:16]}\n")
    branch = root = Tree("", hide_root=True, guide_style="dim")
    sizes = (1, *cluster.group_sizes())
    for i in reversed(range(len(cluster.levels))):
        branch = branch.add(_level_line(cluster.levels[i], sizes[i], cluster.node_size))
    for device, count in _device_counts(cluster):
        branch.add(_device_line(device, count))
    console.print(root)
    citations: dict[str, int] = {}
    for level in cluster.levels:
        sources = {key: cluster.sources.get(f"{level.name}.{key}", "") for key, _ in _level_figures(level)}
        _print_figures(level.name, _level_figures(level), sources, citations)
    for device in cluster.devices:
        _print_figures(device.name, _device_figures(device), device.sources, citations)
    console.print()
    for text, number in citations.items():
        console.print(f"[{number}] {text}", soft_wrap=True, markup=False)


def _print_figures(
    title: str, figures: list[tuple[str, str]], sources: Mapping[str, str], citations: dict[str, int]
) -> None:
    """One table of figures; citations are numbered through all tables, notes stay beside the figure."""
    rows = []
    for key, value in figures:
        citation, _, note = sources.get(key, "").partition("; ")
        number = f"[{citations.setdefault(citation, len(citations) + 1)}]" if citation else ""
        rows.append([key, value, number, note])
    _print_table([title, "value", "source", "note"], rows)


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _device_counts(cluster: Cluster) -> list[tuple[Device, int]]:
    types = cluster.device_types.tolist()
    return [(device, types.count(i)) for i, device in enumerate(cluster.devices)]


def _level_line(level: Level, child: int, node_size: int) -> str:
    from rich.markup import escape

    from planner import format_fraction, format_rate, format_seconds

    unit = "device" if child == 1 else "node" if child == node_size else f"group of {child}"
    plural = unit.replace("group", "groups") if " " in unit else f"{unit}s"
    rate = f"{format_rate(level.byte_per_s, 4)} a {unit}"
    if level.device_byte_per_s < level.byte_per_s:
        rate += f", {format_rate(level.device_byte_per_s, 4)} a device"
    if level.peer_byte_per_s is not None:
        rate += f", {format_rate(level.peer_byte_per_s, 4)} to one peer"
    return (
        f"[bold]{escape(level.name)}[/bold] joins {level.size} {plural}: {rate} (one direction), "
        f"{format_seconds(level.latency_s)}, {format_fraction(level.efficiency)} achievable"
    )


def _device_line(device: Device, count: int) -> str:
    from rich.markup import escape

    from planner import format_bytes, format_flop_rate, format_fraction, format_rate

    kind, peak = _peak(device)
    return (
        f"{count} x [bold]{escape(device.name)}[/bold]: {format_bytes(device.memory_bytes)} "
        f"({format_bytes(device.usable_bytes)} plannable), {format_rate(device.memory_byte_per_s)}, "
        f"{kind} {format_flop_rate(peak)}, {format_fraction(device.matrix_efficiency.fractions[-1])} achievable"
    )


def _level_figures(level: Level) -> list[tuple[str, str]]:
    from planner import format_fraction, format_rate, format_seconds

    rows = [("port", f"{format_rate(level.byte_per_s, 4)} one direction")]
    if level.peer_byte_per_s is not None:
        rows.append(("peer", f"{format_rate(level.peer_byte_per_s, 4)} one direction"))
    rows.append(("latency", format_seconds(level.latency_s, 4)))
    rows.append(("efficiency", format_fraction(level.efficiency, 4)))
    if level.fits:
        ranks = sorted({fit.ranks for fit in level.fits})
        kinds = ", ".join(dict.fromkeys(str(fit.collective) for fit in level.fits))
        rows.append(
            ("measured", f"{kinds} of {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"{kinds} of {ranks[0]}")
        )
    return rows


def _device_figures(device: Device) -> list[tuple[str, str]]:
    from planner import format_bytes, format_flop_rate, format_flops, format_rate, format_seconds

    rows = [
        ("memory", format_bytes(device.memory_bytes, 4)),
        ("reserve", format_bytes(device.reserve_bytes, 4)),
        ("memory_bandwidth", format_rate(device.memory_byte_per_s, 4)),
    ]
    rows += [(f"matrix.{kind}", format_flop_rate(peak, 4)) for kind, peak in device.matrix_flop_per_s.items()]
    matrix, memory = device.matrix_efficiency, device.memory_efficiency
    rows += [
        ("vector", format_flop_rate(device.vector_flop_per_s, 4)),
        ("matrix_efficiency", _curve([format_flops(size) for size in matrix.sizes], matrix.fractions)),
        ("memory_efficiency", _curve([format_bytes(size) for size in memory.sizes], memory.fractions)),
        ("launch", format_seconds(device.launch_s, 4)),
    ]
    rows += [("handover", format_seconds(device.handover_s, 4))] if device.handover_s else []
    return rows + ([("price", f"{device.price_per_hour:.4g} $/h")] if device.price_per_hour else [])


def _curve(sizes: list[str], fractions: tuple[float, ...]) -> str:
    from planner import format_fraction

    first, last = format_fraction(fractions[0]), format_fraction(fractions[-1])
    return f"{last} at any size" if len(sizes) == 1 else f"{first} at {sizes[0]} to {last} at {sizes[-1]}"


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
    click.echo(f"{_many(len(files), 'file')} checked: {_many(count, 'error') if count else 'no errors'}")
    ctx.exit(4 if count else 0)


@command.command("init", short_help="Write a commented profile to edit.")
@click.option("--from", "base", default="dgx-a100", show_default=True, help="Profile to start from, a name or a file.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write; standard output when absent.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def init_profile(base: str, output: Path | None, force: bool) -> None:
    """Write a commented profile to make your own from; as written it lints clean.

    \b
    Examples:
      shardplan hardware init -o mine.yaml
      shardplan hardware init --from ethernet-25g -o lab.yaml
    """
    import planner

    text = planner.hardware.profile_template(base, output.stem if output else f"my-{Path(base).stem}")
    if output is None:
        click.echo(text, nl=False)
        return
    if os.path.exists(output) and not force:
        raise planner.UsageError("the file exists", where=str(output), hint="choose another name, or give --force")
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


def _console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200, highlight=False)


def _print_table(titles: list[str], rows: list[list[str]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for i, title in enumerate(titles):
        table.add_column(escape(title), overflow="fold", no_wrap=i < 2 and len(titles) > 2)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console = _console()
    console.print()
    console.print(table)

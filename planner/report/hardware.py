"""A hardware profile: its levels, its devices, and every figure with its source."""

from __future__ import annotations

from collections.abc import Mapping

from planner.hardware import Cluster, Device, Level
from planner.report.tables import Form, Line, Report, Section, table
from planner.units import (
    format_bytes,
    format_flop_rate,
    format_flops,
    format_fraction,
    format_rate,
    format_seconds,
    plural,
)

Figures = list[tuple[str, str]]


def cluster_report(cluster: Cluster) -> Report:
    """A cluster with its levels, outermost first, its devices, and the source of every figure."""
    numbers: dict[str, int] = {}
    sections = [
        Section(lines=(f"{plural(cluster.device_count, 'device')}, fingerprint {cluster.fingerprint[:16]}",)),
        Section(drawing=_tree(cluster)),
    ]
    for device, levels in zip(cluster.devices, cluster.unlike or (cluster.levels,), strict=False):
        for level in levels:
            title = f"{level.name} of {device.name}" if cluster.unlike else level.name
            figures = _level_figures(level)
            own = {key: cluster.sources.get(f"{level.name}.{key}", "") for key, _ in figures}
            sources = {key: cluster.sources.get(f"{title}.{key}", text) for key, text in own.items()}
            sections.append(_figures(title, figures, sources, numbers))
    sections += [_figures(d.name, _device_figures(d), d.sources, numbers) for d in cluster.devices]
    sections.append(Section(lines=tuple(f"[{number}] {text}" for text, number in numbers.items())))
    return Report(f"{cluster.name}  {cluster.about}", tuple(sections))


def _tree(cluster: Cluster) -> tuple[Line, ...]:
    """Levels from the outermost to the innermost, and the devices that it joins."""
    sizes, types = (1, *cluster.group_sizes()), cluster.device_types.tolist()
    names = [_level_line(level, sizes[i], cluster.node_size) for i, level in enumerate(cluster.levels)][::-1]
    lines = [(f"{'    ' * (depth - 1)}└── {text}" if depth else text) for depth, text in enumerate(names)]
    branch = "    " * (len(names) - 1) + "└── " if names else ""
    lines += [f"{branch}{_device_line(device, types.count(i))}" for i, device in enumerate(cluster.devices)]
    return tuple(((line, ""),) for line in lines)


def _figures(title: str, figures: Figures, sources: Mapping[str, str], numbers: dict[str, int]) -> Section:
    """A table of figures; citations are numbered through all tables, notes stay beside the figure."""
    rows = []
    for key, value in figures:
        citation, _, note = sources.get(key, "").partition("; ")
        number = f"[{numbers.setdefault(citation, len(numbers) + 1)}]" if citation else ""
        rows.append((key, value, number, note))
    columns = {title: Form.NAME, "value": Form.TEXT, "source": Form.NAME, "note": Form.TEXT}
    return Section(table=table(columns, rows))


def half_peak(device: Device) -> tuple[str, float]:
    """The number format of 16 bits that a device has, else its first, and its peak in FLOP/s."""
    kinds = device.matrix_flop_per_s
    kind = next((k for k in ("bf16", "fp16") if k in kinds), next(iter(kinds)))
    return kind, kinds[kind]


def _level_line(level: Level, child: int, node_size: int) -> str:
    unit = "device" if child == 1 else "node" if child == node_size else f"group of {child}"
    several = unit.replace("group", "groups") if " " in unit else f"{unit}s"
    rate = f"{format_rate(level.byte_per_s, 4)} a {unit}"
    if level.device_byte_per_s < level.byte_per_s:
        rate += f", {format_rate(level.device_byte_per_s, 4)} a device"
    if level.peer_byte_per_s is not None:
        rate += f", {format_rate(level.peer_byte_per_s, 4)} to one peer"
    return (
        f"{level.name} joins {level.size} {several}: {rate} (one direction), "
        f"{format_seconds(level.latency_s)}, {format_fraction(level.efficiency)} achievable"
    )


def _device_line(device: Device, count: int) -> str:
    kind, peak = half_peak(device)
    return (
        f"{count} x {device.name}: {format_bytes(device.memory_bytes)} "
        f"({format_bytes(device.usable_bytes)} plannable), {format_rate(device.memory_byte_per_s)}, "
        f"{kind} {format_flop_rate(peak)}, {format_fraction(device.matrix_efficiency.fractions[-1])} achievable"
    )


def _level_figures(level: Level) -> Figures:
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


def _device_figures(device: Device) -> Figures:
    rows = [
        ("memory", format_bytes(device.memory_bytes, 4)),
        ("reserve", format_bytes(device.reserve_bytes, 4)),
        ("neighbour_buffers", format_bytes(device.neighbour_bytes, 4)),
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
    first, last = format_fraction(fractions[0]), format_fraction(fractions[-1])
    return f"{last} at any size" if len(sizes) == 1 else f"{first} at {sizes[0]} to {last} at {sizes[-1]}"

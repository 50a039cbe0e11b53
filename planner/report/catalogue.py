"""Reports of what is bundled: clusters, devices, stacks and models; a hardware profile with all its sources.

The rows for tools have more columns than the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from planner import hardware
from planner.report.tables import Cell, Form, Line, Report, Section, data_table, table
from planner.units import (
    format_bytes,
    format_flop_rate,
    format_fraction,
    format_rate,
    format_seconds,
    plural,
)

TREE_WIDTH = 80
"""Line width of a cluster's tree, in characters."""


Columns = Mapping[str, tuple[str, Form, Callable[[Any], Cell]]]
"""By key of the rows for tools: heading in the table ("" for a column of the rows alone), form, and value."""
_CLUSTER: Columns = {
    "name": ("name", Form.NAME, lambda cluster: cluster.name),
    "nodes": ("nodes", Form.NUMBER, lambda cluster: cluster.device_count // cluster.node_size),
    "devices": ("devices", Form.NUMBER, lambda cluster: cluster.device_count),
    "type": ("type", Form.TEXT, lambda cluster: ", ".join(device.name for device in cluster.devices)),
    "levels": ("", Form.TEXT, lambda cluster: tuple(level.name for level in cluster.levels)),
    "about": ("about", Form.TEXT, lambda cluster: cluster.about),
}
_DEVICE: Columns = {
    "name": ("name", Form.NAME, lambda device: device.name),
    "memory_bytes": ("memory", Form.BYTES, lambda device: device.memory_bytes),
    "memory_byte_per_s": ("bandwidth", Form.BYTE_RATE, lambda device: device.memory_byte_per_s),
    "peak_flop_per_s": ("16-bit peak", Form.FLOP_RATE, lambda device: half_peak(device)[1]),
    "achievable": ("", Form.TEXT, lambda device: device.matrix_efficiency.fractions[-1]),
    "about": ("about", Form.TEXT, lambda device: device.about),
}
_STACK: Columns = {
    "name": ("name", Form.NAME, lambda stack: stack.name),
    "launch_s": ("launch", Form.SECONDS, lambda stack: stack.launch_s),
    "handover_s": ("handover", Form.SECONDS, lambda stack: stack.handover_s),
    "overlap": ("overlap", Form.SHARE, lambda stack: stack.overlap),
    "about": ("about", Form.TEXT, lambda stack: stack.about),
}


def clusters_report() -> Report:
    """The bundled clusters."""
    return _listed(map(hardware.load_cluster, hardware.cluster_names()), _CLUSTER)


def devices_report() -> Report:
    """The bundled devices."""
    return _listed(map(hardware.load_device, hardware.device_names()), _DEVICE)


def stacks_report() -> Report:
    """The bundled stacks of software."""
    return _listed(map(hardware.load_stack, hardware.stack_names()), _STACK)


def _listed(profiles: Iterable[object], columns: Columns) -> Report:
    """Profiles as rows for tools, and as a table of the columns that have a heading."""
    rows = [{key: value(profile) for key, (_, _, value) in columns.items()} for profile in profiles]
    headed = {key: (heading, form) for key, (heading, form, _) in columns.items() if heading}
    shown = table(dict(headed.values()), (tuple(row[key] for key in headed) for row in rows))
    return Report("", (Section(table=shown),), data_table(rows, rows[0]))


def models_report(models: Sequence[Any]) -> Report:
    """The bundled models, given as `planner.bundled_info`: family, parameters, layers, sequence length, source."""
    columns = {
        "name": Form.NAME, "family": Form.NAME, "parameters": Form.COUNT, "layers": Form.NUMBER, "seq": Form.FIGURE,
        "source": Form.TEXT,
    }  # fmt: skip
    rows = ((m.name, m.family, m.parameters, m.layers, m.seq, m.source) for m in models)
    data = [asdict(model) for model in models]
    return Report("", (Section(table=table(columns, rows)),), data_table(data, data[0] if data else ()))


def cluster_report(cluster: hardware.Cluster, profile: Mapping[str, Any]) -> Report:
    """A cluster: its levels from the outermost on, its devices, and the source of every figure.

    Args:
        cluster: the cluster.
        profile: its resolved profile (`planner.hardware.resolved_profile`).
    """
    numbers: dict[str, int] = {}
    order = ", ".join(map(str, cluster.device_order))
    placed = f"; ranks of a node on its devices {order}" if order else ""
    sections = [
        Section(lines=(f"{plural(cluster.device_count, 'device')}, fingerprint {cluster.fingerprint[:16]}{placed}",)),
        Section(drawing=_tree(cluster)),
    ]
    parts = {level["level"]: level for place in ("node", "network") for level in profile.get(place, ())}
    parts[cluster.name] = {key: value for key, value in profile.items() if key != "device_types"}
    for title, part in (parts | profile.get("device_types", {})).items():
        rows = [(key, text, *_cited(item, profile, numbers)) for key, text, item in _figures(part)]
        columns = {title: Form.NAME, "value": Form.TEXT, "source": Form.NAME, "note": Form.TEXT}
        sections += [Section(table=table(columns, rows))] if rows else []
    stack = f"the software adds its own: `shardplan hardware show {cluster.stack.name}`"
    sections.append(Section(lines=(stack, *(f"[{number}] {text}" for text, number in numbers.items()))))
    return Report(f"{cluster.name}  {cluster.about}", tuple(sections))


def _figures(part: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The figures in a part of a profile: name, text, and the entry with its source."""
    for key, item in part.items():
        if not isinstance(item, Mapping):
            continue
        if "value" in item:
            several = f"{item['count']} x " if "count" in item else ""
            yield head + key, f"{several}{item['value']} {item.get('direction', '')}".rstrip(), item
        elif "points" in item:
            (size, part_of), *_, (largest, most) = [*item["points"].items()] * 2
            yield head + key, f"{part_of} at {size} to {most} at {largest}", item
        elif key == "measured":
            measured = {kind: rows for kind, rows in item.items() if isinstance(rows, list)}
            texts = (f"{kind} of {rows[0]['ranks']} to {rows[-1]['ranks']}" for kind, rows in measured.items())
            yield head + key, ", ".join(texts), item
        else:
            yield from _figures(item, f"{head}{key}.")


def _cited(item: Mapping[str, Any], profile: Mapping[str, Any], numbers: dict[str, int]) -> tuple[str, str]:
    """The number of a figure's citation, which is counted through all tables, and what else is said of the figure."""
    source = item.get("source", "")
    citation = profile.get("sources", {}).get(source, source)
    number = f"[{numbers.setdefault(citation, len(numbers) + 1)}]" if citation else ""
    notes = ("" if item.get("verified", True) else "not verified", item.get("note", ""))
    return number, "; ".join(note for note in notes if note)


def _tree(cluster: hardware.Cluster) -> tuple[Line, ...]:
    """The tree of levels, outermost first, with the devices at its end."""
    sizes, types = (1, *cluster.group_sizes()), cluster.device_types.tolist()
    names = [_level_line(level, sizes[i], cluster.node_size) for i, level in enumerate(cluster.levels)][::-1]
    inside = len(names) - 1
    lines = [line for depth, text in enumerate(names) for line in _branch(depth - 1, text)]
    for i, device in enumerate(cluster.devices):
        lines += _branch(inside, _device_line(device, types.count(i)))
    return tuple(((line, ""),) for line in lines)


def _branch(depth: int, text: str) -> list[str]:
    """A node of the tree, wrapped at `TREE_WIDTH`; the root has depth -1 and no branch mark."""
    mark = "    " * depth + "└── " if depth >= 0 else ""
    return [f"{' ' * len(mark) if i else mark}{line}" for i, line in enumerate(wrap(text, TREE_WIDTH - len(mark)))]


def half_peak(device: hardware.Device) -> tuple[str, float]:
    """A 16-bit format of a device and its peak in FLOP/s; the device's first format if it has none of 16 bits."""
    kinds = device.matrix_flop_per_s
    kind = next((k for k in ("bf16", "fp16") if k in kinds), next(iter(kinds)))
    return kind, kinds[kind]


def _level_line(level: hardware.Level, child: int, node_size: int) -> str:
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


def _device_line(device: hardware.Device, count: int) -> str:
    kind, peak = half_peak(device)
    return (
        f"{count} x {device.name}: {format_bytes(device.memory_bytes)} "
        f"({format_bytes(device.usable_bytes)} plannable), {format_rate(device.memory_byte_per_s)}, "
        f"{kind} {format_flop_rate(peak)}, {format_fraction(device.matrix_efficiency.fractions[-1])} achievable"
    )

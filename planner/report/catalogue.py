"""What comes with the program: lists of clusters, devices and models; their rows for tools say more than the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from planner.hardware import cluster_names, device_names, load_cluster, load_device, load_stack, stack_names
from planner.report.hardware import half_peak
from planner.report.tables import Cell, Form, Report, Section, data_table, table


def clusters_report() -> Report:
    """The bundled clusters."""
    rows: list[dict[str, Cell]] = []
    for name in cluster_names():
        cluster = load_cluster(name)
        rows.append(
            {
                "name": name,
                "nodes": cluster.device_count // cluster.node_size,
                "devices": cluster.device_count,
                "type": ", ".join(device.name for device in cluster.devices),
                "levels": tuple(level.name for level in cluster.levels),
                "about": cluster.about,
            }
        )
    columns = {
        "name": Form.NAME, "nodes": Form.NUMBER, "devices": Form.NUMBER, "type": Form.TEXT, "about": Form.TEXT,
    }  # fmt: skip
    shown = table(columns, (tuple(row[name] for name in columns) for row in rows))
    return Report("", (Section(table=shown),), data_table(rows, rows[0]))


def devices_report() -> Report:
    """The bundled devices."""
    rows: list[dict[str, Cell]] = []
    for name in device_names():
        device = load_device(name)
        rows.append(
            {
                "name": name,
                "memory_bytes": device.memory_bytes,
                "memory_byte_per_s": device.memory_byte_per_s,
                "peak_flop_per_s": half_peak(device)[1],
                "achievable": device.matrix_efficiency.fractions[-1],
                "about": device.about,
            }
        )
    columns = {
        "name": Form.NAME, "memory": Form.BYTES, "bandwidth": Form.BYTE_RATE, "16-bit peak": Form.FLOP_RATE,
        "about": Form.TEXT,
    }  # fmt: skip
    names = ("name", "memory_bytes", "memory_byte_per_s", "peak_flop_per_s", "about")
    shown = table(columns, (tuple(row[name] for name in names) for row in rows))
    return Report("", (Section(table=shown),), data_table(rows, rows[0]))


def stacks_report() -> Report:
    """The bundled stacks of software."""
    rows: list[dict[str, Cell]] = []
    for stack in map(load_stack, stack_names()):
        rows.append(
            {
                "name": stack.name,
                "launch_s": stack.launch_s,
                "handover_s": stack.handover_s,
                "overlap": stack.overlap,
                "about": stack.about,
            }
        )
    columns = {
        "name": Form.NAME, "launch": Form.SECONDS, "handover": Form.SECONDS, "overlap": Form.SHARE, "about": Form.TEXT,
    }  # fmt: skip
    shown = table(columns, (tuple(row.values()) for row in rows))
    return Report("", (Section(table=shown),), data_table(rows, rows[0]))


def models_report(models: Sequence[Any]) -> Report:
    """Bundled models (`planner.bundled_info` of each): family, parameters, layers, usual sequence length, source."""
    columns = {
        "name": Form.NAME, "family": Form.NAME, "parameters": Form.COUNT, "layers": Form.NUMBER, "seq": Form.FIGURE,
        "source": Form.TEXT,
    }  # fmt: skip
    rows = ((m.name, m.family, m.parameters, m.layers, m.seq, m.source) for m in models)
    data = [asdict(model) for model in models]
    return Report("", (Section(table=table(columns, rows)),), data_table(data, data[0]))

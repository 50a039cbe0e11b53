"""A comparison as data and as text: JSON, CSV, Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from planner.systems.compare import Comparison
from planner.systems.types import Semantics, SystemRow
from planner.units import format_bytes, format_seconds

COLUMNS = (
    "system", "semantics", "iteration", "samples/s", "peak memory", "bubble", "sent", "versions", "staleness",
    "devices", "plan, or the reason why not",
)  # fmt: skip
"""Headings of the table for people."""

MARK, OTHER_UPDATE = "*", "+"
"""Behind the name of a system that changes the training semantics, and of one whose updates differ from the others'."""

LEGEND = (
    "iteration: time of the global batch: the makespan where a pipeline drains, its steady pace where it does not",
    "peak memory: of the fullest device, the runtime's reserve included",
    "bubble: share of the used devices' total time in which they compute nothing, transfers and exchanges included",
    "sent: what leaves devices in an iteration; busiest port: the same through the fullest port of a level, out / in",
)
"""What the columns mean."""


def comparison_columns() -> tuple[str, ...]:
    """Headings of the table for people."""
    return COLUMNS


def comparison_cells(row: SystemRow) -> tuple[str, ...]:
    """One row as texts, in the order of `COLUMNS`."""
    mark = (MARK if row.semantics is Semantics.ASYNC else "") + (OTHER_UPDATE if row.alters else "")
    if not row.feasible:
        return (row.system + mark, row.semantics.value, *["-"] * 8, f"no: {row.reason}")
    memory = row.memory
    return (
        row.system + mark,
        row.semantics.value,
        format_seconds(row.iteration_s),
        f"{row.throughput:,.4g}",
        "-" if memory is None else f"{format_bytes(memory.total)} of {format_bytes(row.capacity_bytes)}",
        f"{row.bubble:.1%}",
        format_bytes(row.sent_bytes),
        str(row.weight_versions),
        str(row.staleness),
        f"{row.devices} of {row.available}",
        row.plan,
    )


def comparison_marks(comparison: Comparison) -> list[str]:
    """What the marks behind the names mean, and then the columns."""
    found = []
    if any(row.semantics is Semantics.ASYNC for row in comparison.rows):
        found.append(
            f"{MARK} asynchronous: gradients are computed with old weights; how many more samples that takes is unknown"
        )
    found += [f"{OTHER_UPDATE} {row.system}: {row.alters}" for row in comparison.rows if row.alters]
    return [*found, *LEGEND]


def comparison_links(comparison: Comparison) -> list[tuple[str, ...]]:
    """A heading and one line a system: bytes through the busiest port of each level, out and in."""
    rows = [row for row in comparison.rows if row.feasible and row.links]
    levels = list(dict.fromkeys(link.level for row in rows for link in row.links))
    found = [("system", *levels)]
    for row in rows:
        own = {link.level: f"{format_bytes(link.out_bytes)} / {format_bytes(link.in_bytes)}" for link in row.links}
        found.append((row.system, *(own.get(level, "-") for level in levels)))
    return found if rows else []


def comparison_groups(comparison: Comparison) -> list[tuple[str, tuple[SystemRow, ...]]]:
    """Rows by heading: what is ranked, what changes the semantics, what does not fit."""
    feasible = [r for r in comparison.rows if r.feasible]
    apart = comparison.semantics == "sync"
    ranked = tuple(r for r in feasible if not apart or r.semantics is Semantics.SYNC)
    other = tuple(r for r in feasible if r not in ranked)
    failed = tuple(r for r in comparison.rows if not r.feasible)
    titled = (
        ("ranked", ranked),
        ("asynchronous: these change the training semantics and are not ranked with the others", other),
        ("not possible", failed),
    )
    return [(title, rows) for title, rows in titled if rows]


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain JSON data; seconds, bytes, fractions."""
    return {
        "format": "shardplan-comparison",
        "version": 1,
        "model": comparison.model,
        "hardware": comparison.hardware,
        "global_batch": comparison.global_batch,
        "precision": comparison.precision,
        "semantics": comparison.semantics,
        "notes": list(comparison.notes),
        "rows": [_document(row) for row in comparison.rows],
    }


def _document(row: SystemRow) -> dict[str, Any]:
    found: dict[str, Any] = {
        "system": row.system,
        "title": row.title,
        "semantics": row.semantics.value,
        "feasible": row.feasible,
    }
    if row.feasible:
        found |= {
            "plan": row.plan,
            "iteration_s": row.iteration_s,
            "samples_per_s": row.throughput,
            "bubble_fraction": row.bubble,
            "sent_bytes": row.sent_bytes,
            "weight_versions": row.weight_versions,
            "staleness_updates": row.staleness,
            "devices_used": row.devices,
            "devices_available": row.available,
            "micro_batch": row.micro_batch,
            "memory": None if row.memory is None else _memory(row),
            "links": [
                {
                    "level": link.level,
                    "busiest_port_out_bytes": link.out_bytes,
                    "busiest_port_in_bytes": link.in_bytes,
                    "all_ports_bytes": link.total_bytes,
                }
                for link in row.links
            ],
            "alters": row.alters,
        }
    else:
        found["reason"] = row.reason
    return found | {"backend": dict(row.tells), "notes": list(row.notes)}


def _memory(row: SystemRow) -> dict[str, float]:
    memory = row.memory
    if memory is None:
        return {}
    return {
        "weights_bytes": memory.weights,
        "gradients_bytes": memory.gradients,
        "optimizer_bytes": memory.optimizer,
        "activations_bytes": memory.activations,
        "workspace_bytes": memory.workspace,
        "reserve_bytes": memory.reserve,
        "total_bytes": memory.total,
        "capacity_bytes": row.capacity_bytes,
    }


def comparison_csv(comparison: Comparison) -> str:
    """One line a system with a heading; empty cells where nothing fits."""
    names = (
        "system", "semantics", "feasible", "iteration_s", "samples_per_s", "peak_memory_bytes", "capacity_bytes",
        "bubble_fraction", "sent_bytes", "weight_versions", "staleness_updates", "devices_used", "devices_available",
        "plan", "reason", "alters",
    )  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in comparison.rows:
        document = _document(row)
        memory = document.get("memory") or {}
        document |= {
            "peak_memory_bytes": memory.get("total_bytes", ""),
            "capacity_bytes": memory.get("capacity_bytes", ""),
        }
        writer.writerow([document.get(name, "") for name in names])
    return text.getvalue()


def comparison_markdown(comparison: Comparison) -> str:
    """A table with the rows that change the semantics, and those that do not fit, below."""
    batch = f"global batch {comparison.global_batch}, {comparison.precision}"
    lines = [f"{comparison.model} on {comparison.hardware}, {batch}"]
    for title, rows in comparison_groups(comparison):
        lines += ["", f"**{title}**", "", *_table(rows)]
    links = comparison_links(comparison)
    if links:
        lines += ["", "**bytes through the busiest port of each level, out / in**", ""]
        lines += ["| " + " | ".join(cells) + " |" for cells in links]
        lines.insert(len(lines) - len(links) + 1, "|" + "---|" * len(links[0]))
    return "\n".join([*lines, *(f"\n{note}" for note in (*comparison_marks(comparison), *comparison.notes))]) + "\n"


def _table(rows: Sequence[SystemRow]) -> list[str]:
    head = "| " + " | ".join(COLUMNS) + " |"
    rule = "|" + "---|" * len(COLUMNS)
    return [
        head,
        rule,
        *("| " + " | ".join(c.replace("|", "\\|") for c in comparison_cells(row)) + " |" for row in rows),
    ]

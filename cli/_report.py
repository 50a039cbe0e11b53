"""Reports on the terminal: rich tables for people, plain text for pipes, markdown and JSON for tools."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import click


def show(report: Any, data: Any, form: str) -> None:  # noqa: ANN401
    """Print a report as text or markdown, or the data that it was made from as JSON."""
    import planner

    if form == "json":
        click.echo(json.dumps(data, indent=2, ensure_ascii=False, default=_plain))
    elif form == "markdown":
        click.echo(planner.report_to_markdown(report), nl=False)
    elif sys.stdout.isatty():
        _show_rich(report)
    else:
        click.echo(planner.report_to_text(report), nl=False)


def _plain(value: Any) -> Any:  # noqa: ANN401
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def _show_rich(report: Any) -> None:  # noqa: ANN401
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(report.title, style="bold"))
    for section in report.sections:
        console.print()
        if section.heading:
            console.print(Text(section.heading, style="bold cyan"))
        indent = (0, 0, 0, 2 if section.heading else 0)
        for line in section.lines:
            console.print(Padding(Text(line), indent))
        for item in section.items:
            console.print(Padding(Text(f"• {item}"), indent))
        if section.table:
            console.print(Padding(_rich_table(section.table, console.width), indent))


def _rich_table(table: Any, width: int) -> Any:  # noqa: ANN401
    """A table whose numbers are never broken; bars (columns without a header) go first where room is short."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    widths = [max((len(row[c]) for row in table.rows), default=0) for c in range(len(table.headers))]
    narrow = sum(max(w, len(h)) + 2 for w, h in zip(widths, table.headers, strict=True)) > width
    kept = [c for c, header in enumerate(table.headers) if header or not narrow]
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for c in kept:
        right = c in table.right
        shown.add_column(table.headers[c], justify="right" if right else "left", min_width=widths[c] if right else None)
    for row in table.rows:
        shown.add_row(*(Text(row[c]) for c in kept))
    return shown

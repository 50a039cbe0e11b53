"""Print reports: styled on a terminal, as plain text into pipes, as Markdown, CSV or JSON for tools."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

import planner

FOUND = 7
"""Exit code if a plan has findings."""
PIPED_WIDTH = 200
"""Line width of tables if the output is no terminal."""
STYLES = {
    "title": "bold",
    "heading": "bold cyan",
    "header": "bold",
    "forward": "black on bright_blue",
    "recompute": "black on yellow",
    "backward": "black on green",
    "weight gradient": "black on cyan",
    "communication inside a group": "black on bright_yellow",
    "communication": "black on bright_red",
    "synchronisation": "black on magenta",
    "update": "black on white",
    "idle": "bright_black",
}
"""Looks on a terminal by the name of a style."""


def terminal_width() -> int | None:
    """Columns of the terminal; None if the output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def show(report: Any, data: Any = None, form: str = "text", output: str | None = None) -> None:  # noqa: ANN401
    """Print a report or write it to a file; in JSON form, `data` instead."""
    width = terminal_width()
    if output:
        planner.files.write_whole(output, written(report, data, form))
    elif form == "text" and width:
        _show_styled(report, width)
    else:
        click.echo(written(report, data, form), nl=False)


def written(report: Any, data: Any = None, form: str = "text") -> str:  # noqa: ANN401
    """A report as text, Markdown or CSV, or its data as JSON."""
    if form == "json":
        return json.dumps(data, indent=2, ensure_ascii=False, default=_plain) + "\n"
    if form == "text":
        return planner.report_to_text(report, table_width=PIPED_WIDTH)
    return planner.report_to_markdown(report) if form == "markdown" else planner.report_to_csv(report)


def show_rows(report: Any, form: str) -> None:  # noqa: ANN401
    """Print a list as a table, or its rows as JSON."""
    if form == "json":
        click.echo(json.dumps(planner.report_to_rows(report), indent=2))
    else:
        show(report)


def say_where(output: str | None) -> None:
    """Print where the plan was written, or that it was not."""
    click.echo(f"\nplan written to {output}" if output else "\nnothing written; add -o FILE to keep the plan")


def say_checked(
    form: str,
    names: Mapping[str, str | None],
    findings: Sequence[Any],
    ok: str,
    remarks: Sequence[str],
    **further: Any,  # noqa: ANN401
) -> int:
    """Print the findings of a check, and return the exit code.

    Args:
        form: text or json.
        names: names of the plan file and of what it was checked against.
        findings: the findings.
        ok: the verdict if there are none.
        remarks: lines after the verdict.
        further: further keys of the JSON document.
    """
    if form == "json":
        document = {**names, "ok": not findings, "findings": findings, **further}
        click.echo(written(None, document, "json"), nl=False)
    else:
        for finding in findings:
            click.echo(str(finding.problem(names["plan"])))
        click.echo(f"{names['plan']}: {planner.units.plural(len(findings), 'finding') if findings else ok}")
        for remark in remarks:
            click.echo(remark)
    return FOUND if findings else 0


def _plain(value: Any) -> Any:  # noqa: ANN401
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def _show_styled(report: Any, width: int) -> None:  # noqa: ANN401
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width, highlight=False, soft_wrap=True)
    for line in planner.report.report_to_lines(report, width, width):
        console.print(Text.assemble(*((text, STYLES.get(style, "")) for text, style in line)))

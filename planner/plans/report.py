"""A report as headings, lines, tables and bars, and its forms as plain text and markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

BAR_WIDTH = 20


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells; `right` holds the numbers of the columns set flush right."""

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Section:
    """A heading ("" for none), lines of text, list items, and a table."""

    heading: str = ""
    lines: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A title and sections."""

    title: str
    sections: tuple[Section, ...]


def bar(fraction: float, width: int = BAR_WIDTH) -> str:
    """A bar filled to a fraction (0 to 1; more is shown as full), in halves of a character."""
    halves = round(min(max(fraction, 0.0), 1.0) * width * 2)
    text = "█" * (halves // 2) + ("▌" if halves % 2 else "")
    return text + "·" * (width - len(text))


def to_text(report: Report, width: int = 100) -> str:
    """The report as plain text."""
    parts = [report.title]
    for section in report.sections:
        parts.append("")
        if section.heading:
            parts.append(section.heading)
        indent = "  " if section.heading else ""
        for line in section.lines:
            parts += textwrap.wrap(line, width, initial_indent=indent, subsequent_indent=indent) or [""]
        for item in section.items:
            parts += textwrap.wrap(item, width, initial_indent=f"{indent}- ", subsequent_indent=f"{indent}  ")
        if section.table:
            parts += [indent + line for line in text_table(section.table)]
    return "\n".join(parts) + "\n"


def text_table(table: Table) -> list[str]:
    """Lines of a table with columns as wide as their widest cell."""
    rows = [table.headers, *table.rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(table.headers))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if column in table.right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return [line(table.headers), "  ".join("-" * width for width in widths), *(line(row) for row in table.rows)]


def to_markdown(report: Report) -> str:
    """The report as markdown."""
    parts = [f"## {report.title}"]
    for section in report.sections:
        parts.append("")
        if section.heading:
            parts += [f"### {section.heading}", ""]
        if section.lines:
            parts.append("\n\n".join(section.lines))
        if section.lines and (section.items or section.table):
            parts.append("")
        parts += [f"- {item}" for item in section.items]
        if section.items and section.table:
            parts.append("")
        if section.table:
            parts += _markdown_table(section.table)
    return "\n".join(parts).rstrip() + "\n"


def _markdown_table(table: Table) -> list[str]:
    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"

    rule = "|" + "|".join("---:" if column in table.right else "---" for column in range(len(table.headers))) + "|"
    return [line(table.headers), rule, *(line(row) for row in table.rows)]

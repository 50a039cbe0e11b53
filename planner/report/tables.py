"""The type of all reports: a title, and sections of text, drawings and typed tables.

A report does not depend on where it is shown: the functions below write it as terminal lines, text, Markdown, CSV or
plain rows.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any

from planner import escaping, units

BAR_WIDTH = 20

Line = tuple[tuple[str, str], ...]
"""A line of text as pieces, each with the name of its style ("" for none)."""


class Form(StrEnum):
    """Format of a column's cells, and how they may be shortened where width is short."""

    TEXT = "text"
    """Words, which may be wrapped."""
    NAME = "name"
    """A word or short phrase, never wrapped."""
    FIGURE = "figure"
    """A figure that is already formatted; like all kinds of figures below it is right-aligned and never wrapped."""
    NUMBER = "number"
    """A number without a unit."""
    COUNT = "count"
    """A large number in short: 124M, 70.6B, 1.01T."""
    SECONDS = "seconds"
    BYTES = "bytes"
    BYTE_RATE = "bytes a second"
    FLOPS = "floating-point operations"
    FLOP_RATE = "floating-point operations a second"
    SHARE = "share"
    """A fraction as percentage."""
    CHANGE = "change"
    """A relative difference as percentage with a sign."""
    BAR = "bar"
    """A fraction drawn as a bar; left out where width is short, since a column beside it has the figure."""

    @property
    def to_the_right(self) -> bool:
        """True if cells are right-aligned."""
        return self not in (Form.TEXT, Form.NAME, Form.BAR)


Cell = str | float | bool | tuple[str, ...] | None
"""A value in the unit of its column; None is shown as missing."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings.

    Attributes:
        columns: heading and form of each column; the first names the row.
        rows: a cell for each column.
    """

    columns: Mapping[str, Form]
    rows: tuple[tuple[Cell, ...], ...]

    def headings(self) -> list[str]:
        """The headings, each a visible line."""
        return list(map(escaping.visible, self.columns))

    def texts(self) -> list[list[str]]:
        """The formatted cells, by row, each a visible line."""
        return [[shown(cell, form) for cell, form in zip(row, self.columns.values(), strict=True)] for row in self.rows]


@dataclass(frozen=True, slots=True)
class Section:
    """A heading ("" for none), lines of text, list items, a drawing whose lines are never wrapped, and a table."""

    heading: str = ""
    lines: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    drawing: tuple[Line, ...] = ()
    table: Table | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """A report for people.

    Its texts are plain: names stand in them as they are, and the functions below escape them for their format.

    Attributes:
        title: its title; "" for none.
        sections: its sections in order.
        data: rows for tools, values in SI units; None if there are none.
    """

    title: str
    sections: tuple[Section, ...]
    data: Table | None = None


def table(columns: Mapping[str, Form], rows: Iterable[tuple[Cell, ...]]) -> Table:
    """A table of any iterable of rows."""
    return Table(columns, tuple(rows))


def data_table(rows: Iterable[Mapping[str, Any]], names: Iterable[str]) -> Table:
    """Rows for tools: the values of some keys, None where a row lacks one."""
    columns = dict.fromkeys(names, Form.TEXT)
    return Table(columns, tuple(tuple(row.get(name) for name in columns) for row in rows))


def bar(fraction: float, width: int = BAR_WIDTH) -> str:
    """A bar filled to a fraction (clipped to 0 to 1), in half characters."""
    halves = round(min(max(fraction, 0.0), 1.0) * width * 2)
    text = "█" * (halves // 2) + ("▌" if halves % 2 else "")
    return text + "·" * (width - len(text))


_FORMATS: Mapping[Form, Callable[[Any], str]] = {
    Form.NUMBER: lambda value: f"{value:,}" if isinstance(value, int) else units.format_number(value),
    Form.COUNT: units.short_count,
    Form.SECONDS: units.format_seconds,
    Form.BYTES: units.format_bytes,
    Form.BYTE_RATE: units.format_rate,
    Form.FLOPS: units.format_flops,
    Form.FLOP_RATE: units.format_flop_rate,
    Form.SHARE: "{:.1%}".format,
    Form.CHANGE: "{:+.1%}".format,
    Form.BAR: bar,
}


def shown(cell: Cell, form: Form) -> str:
    """A cell as a visible line, with its unit."""
    if cell is None:
        return "-"
    return escaping.visible(cell if isinstance(cell, str) else _FORMATS.get(form, str)(cell))


PROSE_WIDTH = 100
"""Default line width of prose, in characters."""
GAP = "  "
"""Text between two columns."""
NARROWEST_TEXT = 18
"""Smallest width to which columns of words, and words in columns of figures, are narrowed."""


def report_to_text(report: Report, width: int = PROSE_WIDTH, table_width: int | None = None) -> str:
    """The report as plain text; arguments as for `report_to_lines`."""
    lines = ("".join(text for text, _ in line).rstrip() for line in report_to_lines(report, width, table_width))
    return "".join(f"{escaping.terminal_line(line)}\n" for line in lines)


def report_to_lines(report: Report, width: int = PROSE_WIDTH, table_width: int | None = None) -> Iterator[Line]:
    """The report line by line, each piece with the name of its style: title, heading, header, or that of a drawing.

    Args:
        report: the report.
        width: line width of prose, in characters.
        table_width: line width of tables, None for no limit. A wider table first loses its bars, then wraps columns of
            words, and at last moves columns to further tables that repeat the first column. Figures are never cut.
    """
    title = escaping.visible(report.title)
    for line in _wrapped(title, table_width or len(title) + 1) if title else ():
        yield ((line, "title"),)
    for number, section in enumerate(report.sections):
        if number or report.title:
            yield ()
        yield from _section_lines(section, width, table_width)


def _section_lines(section: Section, width: int, table_width: int | None) -> Iterator[Line]:
    indent = "  " if section.heading else ""
    if section.heading:
        for line in _wrapped(section.heading, width):
            yield ((line, "heading"),)
    for text in section.lines:
        for line in _wrapped(text, width, indent, indent):
            yield ((line, ""),)
    for text in section.items:
        for line in _wrapped(text, width, f"{indent}- ", f"{indent}  "):
            yield ((line, ""),)
    for drawn in section.drawing:
        yield ((indent, ""), *((escaping.visible(text), style) for text, style in drawn))
    if section.table:
        for line, style in _table_lines(section.table, table_width and table_width - len(indent)):
            yield ((indent, ""), (line, style)) if line else ()


def _wrapped(text: str, width: int, first: str = "", later: str = "") -> list[str]:
    return textwrap.wrap(escaping.visible(text), width, initial_indent=first, subsequent_indent=later) or [""]


@dataclass(frozen=True, slots=True)
class _Strip:
    """A table column as text."""

    header: str
    form: Form
    cells: Sequence[str]

    @property
    def natural(self) -> int:
        """Width of the widest cell, in characters."""
        return max(len(self.header), *map(len, self.cells), 0)

    @property
    def narrowest(self) -> int:
        """Smallest possible width: figures and names are not wrapped, words in place of a figure are."""
        if self.form in (Form.TEXT, Form.NAME):
            return min(self.natural, NARROWEST_TEXT) if self.form is Form.TEXT else self.natural
        words = (min(len(cell), NARROWEST_TEXT) if cell[:1].isalpha() else len(cell) for cell in self.cells)
        return max(min(len(self.header), NARROWEST_TEXT), *words, 0)


def _table_lines(table: Table, room: int | None) -> Iterator[tuple[str, str]]:
    """Lines of a table with their styles; if its columns take several tables, with an empty line between them."""
    texts = table.texts()
    columns = enumerate(zip(table.headings(), table.columns.values(), strict=True))
    strips = [_Strip(name, form, [row[c] for row in texts]) for c, (name, form) in columns]
    for number, part in enumerate(_dealt(strips, room)):
        if number:
            yield "", ""
        widths = _widths(part, room)
        for at, row in enumerate(zip(*((strip.header, *strip.cells) for strip in part), strict=True)):
            broken = (
                textwrap.wrap(cell, width, break_on_hyphens=False) if len(cell) > width else [cell]
                for cell, width in zip(row, widths, strict=True)
            )
            for line in zip_longest(*broken, fillvalue=""):
                yield _joined(line, part, widths), "" if at else "header"


def _joined(cells: Sequence[str], strips: Sequence[_Strip], widths: Sequence[int]) -> str:
    set_ = (
        cell.rjust(width) if strip.form.to_the_right else cell.ljust(width)
        for cell, strip, width in zip(cells, strips, widths, strict=True)
    )
    return GAP.join(set_).rstrip()


def _dealt(strips: list[_Strip], room: int | None) -> list[list[_Strip]]:
    """Columns split into tables that fit, each with the first column; bars only if a single table has room."""
    if room is None or _total([strip.natural for strip in strips]) <= room:
        return [strips]
    first, *others = [strip for strip in strips if strip.form is not Form.BAR]
    tables = [[first]]
    for strip in others:
        if len(tables[-1]) > 1 and _total([s.narrowest for s in (*tables[-1], strip)]) > room:
            tables.append([first])
        tables[-1].append(strip)
    return tables


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _widths(strips: Sequence[_Strip], room: int | None) -> list[int]:
    """Width of each column, after narrowing the widest columns of words until all fit, if they can."""
    widths = [strip.natural for strip in strips]
    while room is not None and _total(widths) > room:
        excess = [width - strip.narrowest for strip, width in zip(strips, widths, strict=True)]
        widest = max(range(len(strips)), key=lambda c: (excess[c] > 0, widths[c]))
        if excess[widest] <= 0:
            break
        widths[widest] -= 1
    return widths


def report_to_markdown(report: Report) -> str:
    """The report as Markdown, in which its texts are text."""
    blocks = [f"## {escaping.markdown(report.title)}"] if report.title else []
    for section in report.sections:
        if section.heading:
            blocks.append(f"### {escaping.markdown(section.heading)}")
        blocks += map(escaping.markdown, section.lines)
        if section.items:
            blocks.append("\n".join(f"- {escaping.markdown(item)}" for item in section.items))
        if section.drawing:
            blocks.append(escaping.markdown_block(["".join(text for text, _ in line) for line in section.drawing]))
        if section.table:
            blocks.append(_markdown_table(section.table))
    return "\n\n".join(blocks) + "\n"


def _markdown_table(table: Table) -> str:
    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(map(escaping.markdown, row)) + " |"

    rule = "|" + "|".join("---:" if form.to_the_right else "---" for form in table.columns.values()) + "|"
    return "\n".join([line(table.headings()), rule, *map(line, table.texts())])


def report_to_csv(report: Report) -> str:
    """The report's rows for tools as CSV with a header; missing values are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if report.data:
        writer.writerows(map(escaping.csv_cell, row) for row in (tuple(report.data.columns), *report.data.rows))
    return text.getvalue()


def report_to_rows(report: Report) -> list[dict[str, Any]]:
    """The report's rows for tools as plain data."""
    return [dict(zip(report.data.columns, row, strict=True)) for row in report.data.rows] if report.data else []

"""The type of all reports: a title, and sections of text, drawings and typed tables.

A report does not depend on where it is shown; `planner.report.render` writes it as text, Markdown, CSV or plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.units import (
    format_bytes,
    format_flop_rate,
    format_flops,
    format_rate,
    format_seconds,
    short_count,
)

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
"""A value in the unit of its column; text is shown as it is, None as missing."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under headings.

    Attributes:
        columns: heading and form of each column; the first names the row.
        rows: a cell for each column.
    """

    columns: Mapping[str, Form]
    rows: tuple[tuple[Cell, ...], ...]

    def texts(self) -> list[list[str]]:
        """The formatted cells, by row."""
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
    Form.NUMBER: lambda value: f"{value:,}" if isinstance(value, int) else f"{value:,.4g}",
    Form.COUNT: short_count,
    Form.SECONDS: format_seconds,
    Form.BYTES: format_bytes,
    Form.BYTE_RATE: format_rate,
    Form.FLOPS: format_flops,
    Form.FLOP_RATE: format_flop_rate,
    Form.SHARE: "{:.1%}".format,
    Form.CHANGE: "{:+.1%}".format,
    Form.BAR: bar,
}


def shown(cell: Cell, form: Form) -> str:
    """A cell as text, with its unit."""
    if cell is None:
        return "-"
    return cell if isinstance(cell, str) else _FORMATS.get(form, str)(cell)

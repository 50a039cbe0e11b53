"""Reports as text of any width, Markdown, CSV and rows: no figure is ever cut."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.report import (
    Form,
    Report,
    Section,
    report_to_csv,
    report_to_lines,
    report_to_markdown,
    report_to_rows,
    report_to_text,
    table,
)

COLUMNS = {
    "name": Form.NAME, "time": Form.SECONDS, "memory": Form.BYTES, "share": Form.SHARE, "": Form.BAR,
    "what was decided": Form.TEXT,
}  # fmt: skip
ROWS = [
    ("first", 0.25, 16 * 2**30, 0.125, 0.125, "two stages of four ranks, micro-batches of eight samples"),
    ("second", None, 2 * 2**30, 1.0, 1.0, ""),
]
REPORT = Report("A title", (Section("A heading", table=table(COLUMNS, ROWS)),))


def test_cells_are_shown_in_the_unit_of_their_column() -> None:
    assert report_to_text(REPORT).splitlines()[2:] == [
        "A heading",
        "  name      time  memory   share                        what was decided",
        "  first   250 ms  16 GiB   12.5%  ██▌·················  "
        "two stages of four ranks, micro-batches of eight samples",
        "  second       -   2 GiB  100.0%  ████████████████████",
    ]


def test_where_room_is_short_bars_go_first_and_words_are_broken() -> None:
    assert report_to_text(REPORT, 60, 60).splitlines()[3:] == [
        "  name      time  memory   share  what was decided",
        "  first   250 ms  16 GiB   12.5%  two stages of four ranks,",
        "                                  micro-batches of eight",
        "                                  samples",
        "  second       -   2 GiB  100.0%",
    ]


def test_columns_that_do_not_stand_beside_each_other_are_dealt_to_several_tables() -> None:
    assert report_to_text(REPORT, 30, 30).splitlines()[3:] == [
        "  name      time  memory",
        "  first   250 ms  16 GiB",
        "  second       -   2 GiB",
        "",
        "  name     share",
        "  first    12.5%",
        "  second  100.0%",
        "",
        "  name    what was decided",
        "  first   two stages of four",
        "          ranks, micro-batches",
        "          of eight samples",
        "  second",
    ]


@given(st.lists(st.tuples(*[st.text("abc 1", max_size=30)] * 4), min_size=1, max_size=4), st.integers(46, 90))
def test_no_line_is_longer_than_the_room_and_no_word_is_lost(rows: list[tuple[str, ...]], width: int) -> None:
    columns = {"row": Form.NAME, "a figure": Form.FIGURE, "some words": Form.TEXT, "other words": Form.TEXT}
    numbered = [(f"r{n}", *row[:1], *row[2:]) for n, row in enumerate(rows)]
    text = report_to_text(Report("", (Section(table=table(columns, numbered)),)), width, width)
    assert all(len(line) <= width for line in text.splitlines())
    for row in numbered:
        for word in " ".join(row).split():
            assert word in text


def test_pieces_of_lines_carry_the_names_of_their_styles() -> None:
    drawn = ((("stage 0 ", ""), ("FF", "forward")),)
    lines = list(report_to_lines(Report("A title", (Section("A heading", ("Words.",), drawing=drawn),))))
    assert lines == [
        (("A title", "title"),),
        (),
        (("A heading", "heading"),),
        (("  Words.", ""),),
        (("  ", ""), ("stage 0 ", ""), ("FF", "forward")),
    ]


def test_markdown_has_all_columns_and_draws_in_code_blocks() -> None:
    drawn = ((("FFBB", "forward"),),)
    text = report_to_markdown(
        Report("A title", (Section(drawing=drawn), Section("Head", table=table({"a": Form.BYTES}, [(2**30,)]))))
    )
    assert text == "## A title\n\n```\nFFBB\n```\n\n### Head\n\n| a |\n|---:|\n| 1 GiB |\n"


@pytest.mark.parametrize(
    "data", [None, table({"name": Form.TEXT, "time_s": Form.SECONDS}, [("a,b", 0.25), ("c", None)])]
)
def test_rows_for_tools_keep_their_values(data: object) -> None:
    report = Report("A title", (), data)  # type: ignore[arg-type]
    rows = report_to_rows(report)
    assert rows == ([{"name": "a,b", "time_s": 0.25}, {"name": "c", "time_s": None}] if data else [])
    assert list(csv.reader(io.StringIO(report_to_csv(report)))) == (
        [["name", "time_s"], ["a,b", "0.25"], ["c", ""]] if data else []
    )

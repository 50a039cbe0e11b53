"""The page's table of jobs is what the exporters say."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.exported_jobs import JOBS, table
from planner import export

PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def test_rows_of_the_page_are_what_the_exporters_say() -> None:
    """Two rows of the table, one with refusals, planned anew; `python -m benchmarks.exported_jobs` writes the table."""
    page = PAGE.read_text().splitlines()
    rows = [line for line in table((JOBS[0], JOBS[3])) if line.startswith("| ")]
    assert [row for row in rows if row not in page] == []


def test_the_page_has_a_row_for_each_framework() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == list(export.names())

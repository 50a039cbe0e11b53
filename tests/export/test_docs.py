"""The page's table of jobs is what the exporters say. Run with `UPDATE_DOCS=1` to write it anew."""

from __future__ import annotations

import os
import re
from pathlib import Path

from planner import export
from tests.export.jobs import table

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
PART = re.compile(r"(<!-- generated: jobs -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def test_the_page_has_the_table_of_jobs() -> None:
    text, rows = PAGE.read_text(), "\n".join(table()) + "\n"
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(PART.sub(lambda found: found[1] + rows + found[3], text))
        return
    found = PART.search(text)
    assert found
    assert found[2] == rows, "run: UPDATE_DOCS=1 pytest tests/export/test_docs.py"


def test_the_page_has_a_row_for_each_framework() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == list(export.names())

"""A comparison of systems as text, CSV, Markdown, JSON and a picture."""

from __future__ import annotations

from planner.report.plot import comparison_svg
from planner.report.table import (
    COLUMNS,
    LEGEND,
    comparison_cells,
    comparison_columns,
    comparison_csv,
    comparison_document,
    comparison_groups,
    comparison_links,
    comparison_markdown,
    comparison_marks,
)

__all__ = [
    "COLUMNS",
    "LEGEND",
    "comparison_cells",
    "comparison_columns",
    "comparison_csv",
    "comparison_document",
    "comparison_groups",
    "comparison_links",
    "comparison_markdown",
    "comparison_marks",
    "comparison_svg",
]

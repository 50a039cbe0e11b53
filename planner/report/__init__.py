"""What people are shown: every answer as a report, and reports as text, Markdown, CSV and rows; pictures as SVG.

A module for each kind of answer makes a `Report` of it (title, sections, typed tables); the renderers know no answer.
`planner` exports the functions of both; what stands here is what they share, and light to import.
"""

from planner.report.render import to_csv, to_lines, to_markdown, to_rows, to_text
from planner.report.tables import Form, Report, Section, Table, bar, table

report_to_csv, report_to_lines, report_to_markdown = to_csv, to_lines, to_markdown
report_to_rows, report_to_text = to_rows, to_text

__all__ = [
    "Form",
    "Report",
    "Section",
    "Table",
    "bar",
    "report_to_csv",
    "report_to_lines",
    "report_to_markdown",
    "report_to_rows",
    "report_to_text",
    "table",
    "to_csv",
    "to_lines",
    "to_markdown",
    "to_rows",
    "to_text",
]

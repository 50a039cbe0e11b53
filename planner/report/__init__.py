"""What people are shown: every answer as a report, and reports as text, Markdown, CSV and rows; pictures as SVG.

A function for each kind of answer makes a `Report` of it (title, sections, typed tables); the renderers know no answer.
"""

from planner.report.catalogue import clusters_report, devices_report, models_report
from planner.report.comparison import MEANING, comparison_document, comparison_report
from planner.report.difference import diff_report
from planner.report.explanation import explanation_report
from planner.report.gantt import Gantt, draw_gantt
from planner.report.hardware import cluster_report
from planner.report.partitions import partition_diff_report, partition_report
from planner.report.plans import plan_report
from planner.report.plot import comparison_svg
from planner.report.profile import profile_report
from planner.report.render import to_csv, to_lines, to_markdown, to_rows, to_text
from planner.report.tables import Form, Report, Section, Table, bar, short_count, table
from planner.report.timeline import timeline_report
from planner.report.timeline_svg import draw_svg

report_to_csv, report_to_lines, report_to_markdown = to_csv, to_lines, to_markdown
report_to_rows, report_to_text = to_rows, to_text

__all__ = [
    "MEANING",
    "Form",
    "Gantt",
    "Report",
    "Section",
    "Table",
    "bar",
    "cluster_report",
    "clusters_report",
    "comparison_document",
    "comparison_report",
    "comparison_svg",
    "devices_report",
    "diff_report",
    "draw_gantt",
    "draw_svg",
    "explanation_report",
    "models_report",
    "partition_diff_report",
    "partition_report",
    "plan_report",
    "profile_report",
    "report_to_csv",
    "report_to_lines",
    "report_to_markdown",
    "report_to_rows",
    "report_to_text",
    "short_count",
    "table",
    "timeline_report",
    "to_csv",
    "to_lines",
    "to_markdown",
    "to_rows",
    "to_text",
]

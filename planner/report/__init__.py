"""Reports for people: every answer as a `Report`, reports as text, Markdown, CSV and rows, pictures as SVG.

One module per kind of answer makes a `Report` (title, sections, typed tables); the renderers do not depend on the kind.
Names are imported on first use; `planner` exports the functions that most people need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.interpreter import exported, exports_of

if TYPE_CHECKING:
    from planner.report.answers import prediction_report as prediction_report
    from planner.report.answers import sweep_report as sweep_report
    from planner.report.answers import sweep_svg as sweep_svg
    from planner.report.answers import target_report as target_report
    from planner.report.answers import why_not_report as why_not_report
    from planner.report.answers import worth_report as worth_report
    from planner.report.catalogue import cluster_report as cluster_report
    from planner.report.catalogue import clusters_report as clusters_report
    from planner.report.catalogue import devices_report as devices_report
    from planner.report.catalogue import models_report as models_report
    from planner.report.catalogue import stacks_report as stacks_report
    from planner.report.comparison import annotation as annotation
    from planner.report.comparison import comparison_document as comparison_document
    from planner.report.comparison import comparison_report as comparison_report
    from planner.report.comparison import comparison_svg as comparison_svg
    from planner.report.comparison import diff_annotations as diff_annotations
    from planner.report.comparison import diff_markdown as diff_markdown
    from planner.report.comparison import diff_report as diff_report
    from planner.report.comparison import diff_verdict as diff_verdict
    from planner.report.costs import calibration_report as calibration_report
    from planner.report.costs import measured_timeline as measured_timeline
    from planner.report.costs import profile_report as profile_report
    from planner.report.costs import run_document as run_document
    from planner.report.costs import run_report as run_report
    from planner.report.explanation import explanation_document as explanation_document
    from planner.report.explanation import explanation_report as explanation_report
    from planner.report.page import plan_page as plan_page
    from planner.report.plans import plan_report as plan_report
    from planner.report.review import PlanReview as PlanReview
    from planner.report.review import review_annotations as review_annotations
    from planner.report.review import review_document as review_document
    from planner.report.review import review_markdown as review_markdown
    from planner.report.review import review_text as review_text
    from planner.report.tables import Form as Form
    from planner.report.tables import Report as Report
    from planner.report.tables import Section as Section
    from planner.report.tables import Table as Table
    from planner.report.tables import bar as bar
    from planner.report.tables import report_to_csv as report_to_csv
    from planner.report.tables import report_to_lines as report_to_lines
    from planner.report.tables import report_to_markdown as report_to_markdown
    from planner.report.tables import report_to_rows as report_to_rows
    from planner.report.tables import report_to_text as report_to_text
    from planner.report.tables import table as table
    from planner.report.timeline import draw_gantt as draw_gantt
    from planner.report.timeline import timeline_report as timeline_report


def __getattr__(name: str) -> Any:  # noqa: ANN401
    return exported(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *exports_of(__name__)})

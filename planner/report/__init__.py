"""Reports for people: every answer as a `Report`, reports as text, Markdown, CSV and rows, pictures as SVG.

One module per kind of answer makes a `Report` (title, sections, typed tables); the renderers do not depend on the kind.
Names are imported on first use; `planner` exports the functions that most people need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.interpreter import exported, exports_of

if TYPE_CHECKING:
    from planner.report.answers import (
        prediction_report,
        sweep_report,
        sweep_svg,
        target_report,
        why_not_report,
        worth_report,
    )
    from planner.report.catalogue import cluster_report, clusters_report, devices_report, models_report, stacks_report
    from planner.report.comparison import (
        annotation,
        comparison_document,
        comparison_report,
        comparison_svg,
        diff_annotations,
        diff_markdown,
        diff_report,
        diff_verdict,
    )
    from planner.report.costs import calibration_report, measured_timeline, profile_report, run_document, run_report
    from planner.report.explanation import explanation_document, explanation_report
    from planner.report.page import plan_page
    from planner.report.plans import partition_diff_report, partition_report, plan_report
    from planner.report.tables import (
        Form,
        Report,
        Section,
        Table,
        bar,
        report_to_csv,
        report_to_lines,
        report_to_markdown,
        report_to_rows,
        report_to_text,
        table,
    )
    from planner.report.timeline import draw_gantt, timeline_report


def __getattr__(name: str) -> Any:  # noqa: ANN401
    return exported(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *exports_of(__name__)})

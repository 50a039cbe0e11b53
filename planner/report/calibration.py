"""A calibration: what was fitted, and how far predictions were off before and after."""

from __future__ import annotations

from collections.abc import Sequence

from planner.calibration import Calibration
from planner.report.tables import Form, Report, Section, table


def calibration_report(found: Calibration) -> Report:
    """Factors with their uncertainty, and errors before, after and left out."""
    rows = (
        (each.key, f"{each.before:.4g}", f"{each.after:.4g}", each.factor, each.deviation) for each in found.factors
    )
    columns = {
        "figure": Form.NAME, "before": Form.FIGURE, "after": Form.FIGURE, "factor": Form.NUMBER, "+-": Form.NUMBER,
    }  # fmt: skip
    errors = (
        ("before", *_summary(found.before)),
        ("after, fitted to these runs", *_summary(found.after)),
        ("each run predicted from the others", *_summary(found.left_out)),
    )
    sections = [
        Section(table=table(columns, rows)),
        Section(
            table=table({"measured / predicted": Form.NAME, "mean error": Form.SHARE, "worst": Form.SHARE}, errors)
        ),
    ]
    bounded = [each.key for each in found.factors if each.bounded]
    if bounded:
        said = "as far from 1 as it may be: check model, hardware, configuration and seconds of the runs"
        sections.append(Section(lines=(f"{', '.join(bounded)} {said}",)))
    if found.memory:
        mean = sum(found.memory) / len(found.memory)
        sections.append(Section(lines=(f"memory: measured {mean:.2f} times the predicted peak",)))
    return Report(f"{found.stack.name}: {len(found.before)} runs", tuple(sections))


def _summary(ratios: Sequence[float]) -> tuple[float, float]:
    """Mean and greatest error of predictions, from measured over predicted."""
    errors = [abs(1 / ratio - 1) for ratio in ratios]
    return sum(errors) / len(errors), max(errors)

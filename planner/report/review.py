"""All plans of a repository that a change touches, in one comment, in annotations or as text: each names its file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.check.attribution import Attribution
from planner.escaping import markdown_code, visible, workflow_command
from planner.plans.comparison import PlanComparison
from planner.report.comparison import MARKDOWN_BYTES, MARKER, diff_annotations, diff_markdown, diff_report, diff_verdict
from planner.report.tables import Report, report_to_text
from planner.units import plural


@dataclass(frozen=True, slots=True)
class PlanReview:
    """What a change does to one plan file.

    Attributes:
        file: its path, from the top of the repository.
        comparison: the comparison with the plan before; of a new plan with itself.
        failures: by gate why it fails, "" for a gate that holds.
        attribution: the difference by cause; None if it was not worked out.
    """

    file: str
    comparison: PlanComparison
    failures: Mapping[str, str]
    attribution: Attribution | None = None


def review_verdict(reviews: Sequence[PlanReview], unchanged: int) -> str:
    """The result for all plans in a line."""
    failed = sum(any(review.failures.values()) for review in reviews)
    counts = [
        *([f"{failed} of {plural(len(reviews), 'plan')} FAILED"] if failed else [plural(len(reviews), "plan")]),
        *([f"{unchanged} unchanged"] if unchanged else []),
    ]
    return ", ".join(counts) if reviews else f"{plural(unchanged, 'plan')}, no changes"


def review_text(reviews: Sequence[PlanReview], unchanged: int, *, every_value: bool = False) -> str:
    """The reports of all plans, each under its file; then the result in a line."""
    parts = []
    for review in reviews:
        report = diff_report(review.comparison, review.attribution, review.failures, every_value=every_value)
        titled = Report(f"{visible(review.file)}: {report.title}", report.sections)
        parts.append(report_to_text(titled))
    return "\n".join([*parts, f"{review_verdict(reviews, unchanged)}\n"])


def review_markdown(reviews: Sequence[PlanReview], unchanged: int) -> str:
    """The comment for a review: each plan under its file with its verdict and gates, at most `MARKDOWN_BYTES`."""
    text = f"{MARKER}\n\n**shardplan: {review_verdict(reviews, unchanged)}**\n"
    for at, review in enumerate(reviews):
        left = len(reviews) - at
        room = (MARKDOWN_BYTES - len(text.encode()) - 200) // left
        body = diff_markdown(review.comparison, review.attribution, review.failures, room=room)
        part = f"\n### {markdown_code(review.file)}\n\n{body.removeprefix(MARKER).lstrip()}"
        if len((text + part).encode()) > MARKDOWN_BYTES - 200:
            return f"{text}\n{plural(left, 'further plan')} left out here for its length.\n"
        text += part
    return text


def review_annotations(reviews: Sequence[PlanReview], unchanged: int) -> str:
    """Findings and failed gates of all plans as workflow commands of GitHub Actions."""
    lines = [diff_annotations(each.comparison, each.failures, file=each.file) for each in reviews]
    return "".join(lines) or f"{workflow_command('notice', review_verdict(reviews, unchanged), title='shardplan')}\n"


def review_document(reviews: Sequence[PlanReview], unchanged: int) -> dict[str, object]:
    """The reviews as data for JSON."""
    fields = ("causes", "decisions", "costs", "remarks", "changes")
    plans = [
        {
            "file": visible(each.file),
            "verdict": diff_verdict(each.comparison, each.failures),
            **{name: getattr(each.comparison, name) for name in fields},
            "attribution": each.attribution,
            "gates": each.failures,
        }
        for each in reviews
    ]
    return {"verdict": review_verdict(reviews, unchanged), "unchanged": unchanged, "plans": plans}

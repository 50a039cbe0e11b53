"""All plans of a repository that a change touches, in one comment, in annotations or as text: each names its file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.check.attribution import Attribution
from planner.plans.comparison import PlanComparison
from planner.report.comparison import MARKDOWN_BYTES, MARKER, diff_annotations, diff_markdown, diff_report, diff_verdict
from planner.report.tables import Report, report_to_text
from planner.units import plural

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


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
        titled = Report(f"{_printable(review.file)}: {report.title}", report.sections)
        parts.append(report_to_text(titled))
    return "\n".join([*parts, f"{review_verdict(reviews, unchanged)}\n"])


def review_markdown(reviews: Sequence[PlanReview], unchanged: int) -> str:
    """The comment for a review: each plan under its file with its verdict and gates, at most `MARKDOWN_BYTES`."""
    text = f"{MARKER}\n\n**shardplan: {review_verdict(reviews, unchanged)}**\n"
    for at, review in enumerate(reviews):
        left = len(reviews) - at
        room = (MARKDOWN_BYTES - len(text.encode()) - 200) // left
        body = diff_markdown(review.comparison, review.attribution, review.failures, room=room)
        part = f"\n### {_code(review.file)}\n\n{body.removeprefix(MARKER).lstrip()}"
        if len((text + part).encode()) > MARKDOWN_BYTES - 200:
            return f"{text}\n{plural(left, 'further plan')} left out here for its length.\n"
        text += part
    return text


def review_annotations(reviews: Sequence[PlanReview], unchanged: int) -> str:
    """Findings and failed gates of all plans as workflow commands of GitHub Actions."""
    lines = [diff_annotations(each.comparison, each.failures, file=_printable(each.file)) for each in reviews]
    return "".join(lines) or f"::notice title=shardplan::{review_verdict(reviews, unchanged)}\n"


def review_document(reviews: Sequence[PlanReview], unchanged: int) -> dict[str, object]:
    """The reviews as data for JSON."""
    fields = ("causes", "decisions", "costs", "remarks", "changes")
    plans = [
        {
            "file": _printable(each.file),
            "verdict": diff_verdict(each.comparison, each.failures),
            **{name: getattr(each.comparison, name) for name in fields},
            "attribution": each.attribution,
            "gates": each.failures,
        }
        for each in reviews
    ]
    return {"verdict": review_verdict(reviews, unchanged), "unchanged": unchanged, "plans": plans}


def _printable(name: str) -> str:
    """A file name without line ends and other control characters; bytes that are no UTF-8 as escapes."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def _code(name: str) -> str:
    """A file name as a code span of Markdown, whatever is in it."""
    text = _printable(name)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"

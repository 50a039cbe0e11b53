"""What is said of limits without a plan: which of them to lift."""

from __future__ import annotations

import pytest

from planner.solvers.diagnosis import conflict
from planner.space import Job


def _only_with_zero3(job: Job) -> float | None:
    """An attempt that has a plan of 2 s with ZeRO-3 alone."""
    return 2.0 if 3 in job.zero else None


@pytest.mark.parametrize(
    ("zero", "hint"), [((1,), "there are some without --zero 1 (2 s an iteration, say)"), ((0, 1, 2, 3), None)]
)
def test_lower_zero_stages_are_to_be_lifted_where_only_the_third_has_a_plan(
    zero: tuple[int, ...], hint: str | None
) -> None:
    error = conflict(Job(64, zero=zero, max_stages=1), _only_with_zero3)
    assert error is not None
    assert error.problem.hint == (hint or "there are some without --max-stages 1 (2 s an iteration, say)")

"""What is said of limits without a plan: which to lift, and ZeRO-3 where the job leaves it open."""

from __future__ import annotations

import pytest

from planner.solvers.diagnosis import conflict
from planner.space import Job


def _only_with_zero3(job: Job) -> float | None:
    """An attempt that has a plan of 2 s with ZeRO-3 alone."""
    return 2.0 if 3 in job.zero else None


@pytest.mark.parametrize(
    ("zero", "hint"), [((0, 1), "there are some with --zero 3 (2 s an iteration, say)"), ((1,), "")]
)
def test_zero3_is_a_remedy_where_the_user_left_it_open(zero: tuple[int, ...], hint: str) -> None:
    error = conflict(Job(64, zero=zero, max_stages=1), _only_with_zero3)
    assert ("" if error is None else error.problem.hint) == hint

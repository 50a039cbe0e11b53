"""Which of a user's limits exclude everything: each is lifted in turn, then two of them, until something fits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from planner.errors import InfeasibleError
from planner.space.asked import as_written, given, in_words, without
from planner.space.types import Job

Attempt = Callable[[Job], float | None]
"""Seconds of some plan of a job, None where there is none."""

_OWN = ("tensor_parallel", "meshes", "pipeline_stages", "data_parallel", "keep", "forbid", "uniform", "backends")
"""Limits that the diagnosis of memory knows nothing of."""


def limited(job: Job) -> bool:
    """Whether the user set one of the limits that a conflict is looked for in."""
    return bool(given(job, _OWN))


def conflict(job: Job, attempt: Attempt) -> InfeasibleError | None:
    """The error to raise where a job with limits has no plan; None where lifting two of them does not help.

    Args:
        job: with the limits.
        attempt: looks for a plan of a job with fewer of them.
    """
    asked = in_words(job)
    for count in (1, 2):
        lifted = []
        for names in itertools.combinations(given(job), count):
            seconds = attempt(without(job, names))
            if seconds is not None:
                words = " and ".join(as_written(job, name) for name in names)
                lifted.append(f"without {words} ({seconds:.3g} s an iteration, say)")
        if lifted:
            return InfeasibleError(f"no plan has all of {asked}", hint=f"there are some {' or '.join(lifted)}")
    return None

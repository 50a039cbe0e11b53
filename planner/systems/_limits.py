"""Limits of a job where a schedule is given: which can be kept, and the error about those that cannot."""

from __future__ import annotations

from planner.errors import UsageError
from planner.solvers.conflict import in_words
from planner.space.types import Job


def check_limits(job: Job, schedule: str) -> None:
    """Refuse what no plan for a given schedule can have, rather than leave it out.

    Stages for a given schedule are single devices without ZeRO, as many replicas of each as there are copies: there is
    nothing that `forbid` could rule out, and `uniform` holds.

    Raises:
        UsageError: a limit that excludes all such plans, or that is not considered.
    """
    broken = Job(
        job.global_batch,
        meshes=job.meshes,
        keep=job.keep,
        tensor_parallel=() if 1 in job.tensor_parallel else job.tensor_parallel,
        zero=(0, 1) if 0 in job.zero else job.zero,
    )
    words = [w for w in (in_words(broken), f"--overlap {job.overlap:g}" if job.overlap else "") if w]
    if words:
        raise UsageError(
            f"plans for the schedule {schedule!r} cannot have {', '.join(words)}",
            hint="leave it out, or let the search choose between 1f1b and gpipe",
        )

"""Micro-batch sizes that a job allows."""

from __future__ import annotations

import math

from planner.errors import JobError
from planner.solvers._wording import either
from planner.space.divisors import divisors
from planner.space.types import Job
from planner.sync import recipes


def micro_batch_sizes(job: Job) -> tuple[int, ...]:
    """Allowed micro-batch sizes that divide the global batch, ascending.

    Raises:
        JobError: there is none, or the job allows no schedule or ZeRO stage.
    """
    if job.global_batch < 1:
        raise JobError(f"a global batch of {job.global_batch} samples", hint="use at least one sample")
    if not job.schedules or not job.zero or not set(job.zero) <= recipes().keys():
        raise JobError(
            "no schedule or no ZeRO stage to choose from", hint="allow a schedule, and ZeRO stage 0, 1, 2 or 3"
        )
    sizes = divisors(job.global_batch)
    if not job.micro_batches:
        return sizes
    chosen = tuple(b for b in sizes if b in job.micro_batches)
    if not chosen:
        asked = max(1, *job.micro_batches)
        near = sorted(sorted(sizes, key=lambda b: (abs(math.log(b / asked)), b))[:6])
        raise JobError(
            f"no micro-batch size of {either(job.micro_batches)} divides the global batch of {job.global_batch}",
            hint=f"use a micro-batch size of {either(near)}, or another global batch",
        )
    return chosen

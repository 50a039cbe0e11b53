"""The planner's own search within the limits of a system: cuts, replicas, copies, micro-batches and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.errors import InfeasibleError
from planner.solvers import search
from planner.space.asked import allowed_ranks
from planner.space.timing import played_s
from planner.space.types import Job
from planner.systems.proposal import SOLVERS, Proposal
from planner.systems.setting import Setting
from planner.systems.types import System

MOST_JUDGED = 6
"""Decisions of the search that are judged."""


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """The fastest decisions of the search, with the first kind of recomputation with which one fits."""
    sizes = setting.job.micro_batches or (setting.sizes if setting.notes else ())
    sized = replace(setting.job, micro_batches=sizes)
    jobs = system.limits.jobs(sized, setting.devices, setting.blocks) if system.limits else iter((sized,))
    refused: InfeasibleError | None = None
    for job in jobs:
        try:
            yield from _found(setting, job)
            return
        except InfeasibleError as error:
            refused = refused or error
    if refused is not None:
        raise refused


def _found(setting: Setting, job: Job) -> Iterator[Proposal]:
    """The best decision of a job, and those that come close.

    Raises:
        InfeasibleError: nothing fits.
    """
    shared = None if allowed_ranks(job) == (1,) else setting.prices
    answer = search(setting.costs, setting.cluster, job, shardings=shared, simulated_s=played_s)
    trivial = (candidate for candidate in answer.trivial if candidate.evaluation.feasible)
    for candidate in (answer.best, *answer.runners_up, *trivial)[:MOST_JUDGED]:
        schedule = candidate.decision.schedule
        notes = () if schedule in job.schedules else (f"schedule {schedule}",)
        yield Proposal((candidate.decision,), notes=notes)


SOLVERS.register("joint", propose)

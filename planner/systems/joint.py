"""The planner's own search within the limits of a system: cuts, replicas, copies, micro-batches and recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.errors import InfeasibleError, JobError, ShardplanError
from planner.solvers import search
from planner.space.asked import allowed_ranks, in_words
from planner.space.pricer import Pricer
from planner.space.timing import played_s
from planner.space.types import Job
from planner.systems.backends import Backend, contradiction, within_limits
from planner.systems.setting import Setting
from planner.systems.types import Proposal, System

MOST_JUDGED = 6
"""Decisions of the search that are judged."""


def propose(setting: Setting, system: System) -> Iterator[Proposal]:
    """The fastest decisions of the search, with the first kind of recomputation with which one fits."""
    sizes = setting.job.micro_batches or (setting.sizes if setting.notes else ())
    asked = replace(setting.job, micro_batches=sizes)
    if system.framework is not None:
        yield from _for_framework(setting, system.framework, asked)
        return
    if system.limits is None:
        yield from _found(setting, asked)
        return
    jobs = list(system.limits.jobs(asked, setting.devices, setting.blocks))
    for job in () if _block_too_large(setting, jobs[0]) else jobs:
        try:
            yield from _found(setting, job)
            return
        except InfeasibleError:
            continue  # the next kind of recomputation may fit
    raise _explained(setting, jobs[0])


def _for_framework(setting: Setting, framework: Backend, asked: Job) -> Iterator[Proposal]:
    """The fastest decisions of the search within the limits of a framework.

    Raises:
        InfeasibleError: nothing fits.
        JobError: the framework cannot do what is asked.
    """
    problem = contradiction(asked, (framework,), setting.prices.graph)
    if problem is not None:
        raise JobError(problem.message, hint=problem.hint)
    job = within_limits(asked, (framework,))
    prices = Pricer(setting.prices.graph, setting.cluster, job, like=setting.prices)
    yield from _found(setting, job, prices)


def _block_too_large(setting: Setting, job: Job) -> bool:
    """True if one block's states exceed every device and the job neither shares blocks nor fixes the depth."""
    states_bytes = setting.costs(setting.sizes[0]).parameter_elements.max() * setting.element_bytes
    shares = job.zero != (0,) or allowed_ranks(job) != (1,)
    largest_bytes = max(device.usable_bytes for device in setting.cluster.devices)
    return not shares and len(job.pipeline_stages) != 1 and bool(states_bytes > largest_bytes)


def _explained(setting: Setting, job: Job) -> ShardplanError:
    """Why nothing fits within a system's limits: nothing does without them either, or what they are."""
    free = replace(job, pipeline_stages=(), data_parallel=(), uniform=False, tensor_parallel=())
    try:
        search(setting.costs, setting.cluster, free, any_plan=True)
    except (InfeasibleError, JobError) as error:
        return error
    return InfeasibleError(f"nothing fits with {in_words(job)}", hint="use more devices, or another system")


def _found(setting: Setting, job: Job, prices: Pricer | None = None) -> Iterator[Proposal]:
    """The best decision of a job, and those that come close, at other prices than the setting's where they are given.

    Raises:
        InfeasibleError: nothing fits.
    """
    shared = None if allowed_ranks(job) == (1,) else prices or setting.prices
    answer = search(setting.costs, setting.cluster, job, shardings=shared, simulated_s=played_s)
    trivial = (candidate for candidate in answer.trivial if candidate.evaluation.feasible)
    for candidate in (answer.best, *answer.runners_up, *trivial)[:MOST_JUDGED]:
        schedule = candidate.decision.schedule
        notes = () if schedule in job.schedules else (f"schedule {schedule}",)
        yield Proposal((candidate.decision,), notes=notes)

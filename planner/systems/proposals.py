"""Solvers that propose configurations: this planner's search within limits, data parallelism, sharding of operators.

A training framework is a system as well: the search within the limits of the framework.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.errors import InfeasibleError, JobError, ShardplanError, UsageError
from planner.solvers import search
from planner.solvers.layouts import LayoutTask, search_layouts
from planner.space import Configuration, StageChoice
from planner.space.job_options import LIMITS, PRICED, allowed_ranks, in_words
from planner.space.pricer import Pricer
from planner.space.timing import played_s
from planner.space.types import Job
from planner.systems.backends import Backend, able, within_limits
from planner.systems.types import Proposal, System, SystemSetting

MOST_EVALUATED = 6
"""Decisions of one search that are proposed."""


def by_search(setting: SystemSetting, system: System) -> Iterator[Proposal]:
    """Search within the limits of a system, with the first kind of recomputation of its limits with which a plan fits.

    Raises:
        InfeasibleError: nothing fits.
        JobError: the training framework cannot do what the job says.
    """
    sizes = setting.job.micro_batches or (setting.sizes if setting.notes else ())
    job = replace(setting.job, micro_batches=sizes)
    if system.framework is not None:
        framework_job = _framework_job(setting, system.framework, job)
        prices = Pricer(setting.prices.graph, setting.cluster, framework_job, like=setting.prices)
        yield from _search_proposals(setting, framework_job, prices)
        return
    if system.limits is None:
        yield from _search_proposals(setting, job, setting.prices)
        return
    jobs = list(system.limits.jobs(job, setting.devices, setting.blocks))
    for limited_job in () if _block_too_large(setting, jobs[0]) else jobs:
        try:
            yield from _search_proposals(setting, limited_job, setting.prices)
            return
        except InfeasibleError:
            continue  # the next kind of recomputation may fit
    raise _explained(setting, jobs[0])


def _framework_job(setting: SystemSetting, framework: Backend, job: Job) -> Job:
    """The job within the limits of a training framework.

    Raises:
        JobError: the framework cannot do what the job says.
    """
    _, problem = able(job, (framework,), setting.prices.graph)
    if problem is not None:
        raise JobError(problem.message, hint=problem.hint)
    return within_limits(job, (framework,))


def _block_too_large(setting: SystemSetting, job: Job) -> bool:
    """True if one block's states exceed every device and the job neither shares blocks nor fixes the depth."""
    states_bytes = setting.costs(setting.sizes[0]).parameter_elements.max() * setting.parameter_bytes
    shares = job.zero != (0,) or allowed_ranks(job) != (1,)
    largest_bytes = setting.cluster.largest_bytes
    return not shares and len(job.pipeline_stages) != 1 and bool(states_bytes > largest_bytes)


def _explained(setting: SystemSetting, job: Job) -> ShardplanError:
    """Why nothing fits within a system's limits: the error without the limits, if there is one, else the limits."""
    free = replace(job, pipeline_stages=(), data_parallel=(), uniform=False, tensor_parallel=())
    try:
        search(setting.costs, setting.cluster, free, any_plan=True)
    except (InfeasibleError, JobError) as error:
        return error
    return InfeasibleError(f"nothing fits with {in_words(job)}", hint="use more devices, or another system")


def _search_proposals(setting: SystemSetting, job: Job, prices: Pricer) -> Iterator[Proposal]:
    """The best decision of a search, its runners-up and the trivial plans that fit.

    Raises:
        InfeasibleError: nothing fits.
    """
    shardings = None if allowed_ranks(job) == (1,) else prices
    answer = search(setting.costs, setting.cluster, job, shardings=shardings, simulated_s=played_s)
    trivial = (candidate for candidate in answer.trivial if candidate.evaluation.feasible)
    for candidate in (answer.best, *answer.runners_up, *trivial)[:MOST_EVALUATED]:
        schedule = candidate.decision.schedule
        notes = () if schedule in job.schedules else (f"schedule {schedule}",)
        yield Proposal((candidate.decision,), notes=notes)


def by_exchange(setting: SystemSetting, system: System) -> Iterator[Proposal]:
    """Propose data parallelism with the exchange scheme of a system, for each micro-batch size."""
    for configuration in data_parallel(setting, system.scheme):
        yield Proposal((configuration,))


def data_parallel(setting: SystemSetting, scheme: str) -> Iterator[Configuration]:
    """Data parallelism with an exchange scheme, one configuration for each micro-batch size, the largest first."""
    for size in reversed(setting.sizes):
        micro_batches, remainder = divmod(setting.job.global_batch, size)
        if not remainder:
            replicas = max(r for r in range(1, setting.devices + 1) if micro_batches % r == 0)
            stages = (StageChoice(0, setting.blocks, 1),)
            yield Configuration(stages, replicas, size, micro_batches // replicas, "1f1b", exchange=scheme)


def by_layouts(setting: SystemSetting, system: System) -> Iterator[Proposal]:
    """Propose the layouts that the system's sharding search finds on each mesh, fastest first, until one fits."""
    if system.layouts is None:
        raise UsageError(f"{system.title} says no way to cut operators", hint="give the system its layouts")
    for layout in search_layouts(task_of(setting), system.layouts):
        costs = setting.prices.whole(layout.micro_batch, layout.mesh, layout.answer.decision, layout.slowest)
        stage = costs.stage(0, setting.blocks)
        count = setting.job.global_batch // layout.micro_batch
        configuration = Configuration((stage,), 1, layout.micro_batch, count, "1f1b")
        shape = " x ".join(map(str, layout.mesh))
        unlike = bool(setting.cluster.device_types[: math.prod(layout.mesh)].any())
        yield Proposal(
            (configuration,),
            words=f"every operator on a mesh of {shape}, micro-batch {layout.micro_batch} x {count}",
            notes=("communication is not overlapped", "unlike devices share the operators: no plan file")[: 1 + unlike],
            unwritten=f"{system.title} shares every operator among unlike devices: its row has no plan file" * unlike,
        )
        if setting.fits(configuration):
            return


def task_of(setting: SystemSetting) -> LayoutTask:
    """The problem that a search for layouts solves in a setting."""
    only = setting.fixed or bool(setting.job.micro_batches)
    where = setting.prices, setting.cluster, setting.job, setting.devices
    return LayoutTask(*where, setting.sizes, only, setting.model_states_bytes)


def system_of(backend: Backend) -> System:
    """A training framework as a system: this planner's search within the limits of the framework."""
    return System(
        key=backend.key,
        title=backend.title,
        solver=by_search,
        source="; ".join(backend.sources.values()),
        limits=None,
        takes=PRICED | {*LIMITS, "overlap"} - {"backends"},
        framework=backend,
    )

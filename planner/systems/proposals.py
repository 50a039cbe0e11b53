"""Where systems have their configurations from: the own search within their limits, every device the whole model, or
layouts that cut every operator.

A training framework is a system, too: the own search within its limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from planner.errors import InfeasibleError, JobError, ShardplanError, UsageError
from planner.solvers import search
from planner.solvers.layouts import LayoutTask, lay_operators
from planner.space import Configuration, StageChoice
from planner.space.asked import LIMITS, PRICED, allowed_ranks, in_words
from planner.space.pricer import Pricer
from planner.space.timing import played_s
from planner.space.types import Job
from planner.systems.backends import Backend, contradiction, within_limits
from planner.systems.setting import Setting
from planner.systems.types import Proposal, System

MOST_JUDGED = 6
"""Decisions of the search that are judged."""


def by_search(setting: Setting, system: System) -> Iterator[Proposal]:
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


def by_exchange(setting: Setting, system: System) -> Iterator[Proposal]:
    """Data parallelism whose gradients travel by a scheme of `planner.exchange`, with each micro-batch size."""
    for configuration in data_parallel(setting, system.scheme):
        yield Proposal((configuration,))


def data_parallel(setting: Setting, scheme: str) -> Iterator[Configuration]:
    """Every device the whole model, gradients exchanged by a scheme, by micro-batch size, the largest first."""
    for size in reversed(setting.sizes):
        parts, rest = divmod(setting.job.global_batch, size)
        if not rest:
            replicas = max(r for r in range(1, setting.devices + 1) if parts % r == 0)
            whole = (StageChoice(0, setting.blocks, 1),)
            yield Configuration(whole, replicas, size, parts // replicas, "1f1b", exchange=scheme)


def by_layouts(setting: Setting, system: System) -> Iterator[Proposal]:
    """The layouts of the system's own search on each mesh with the largest micro-batches, fastest first."""
    if system.layouts is None:
        raise UsageError(f"{system.title} says no way to cut operators", hint="give the system its layouts")
    for each in lay_operators(task_of(setting), system.layouts):
        costs = setting.prices.whole(each.micro_batch, each.mesh, each.answer.decision, each.slowest)
        stage = costs.stage(0, setting.blocks)
        count = setting.job.global_batch // each.micro_batch
        configuration = Configuration((stage,), 1, each.micro_batch, count, "1f1b")
        shape = " x ".join(map(str, each.mesh))
        unlike = bool(setting.cluster.device_types[: math.prod(each.mesh)].any())
        yield Proposal(
            (configuration,),
            words=f"every operator on a mesh of {shape}, micro-batch {each.micro_batch} x {count}",
            notes=("communication is not overlapped", "unlike devices share the operators: no plan file")[: 1 + unlike],
            unwritten=f"{system.title} shares every operator among unlike devices: its row has no plan file" * unlike,
        )
        if setting.fits(configuration):
            return


def task_of(setting: Setting) -> LayoutTask:
    """What layouts are looked for."""
    only = setting.fixed or bool(setting.job.micro_batches)
    where = setting.prices, setting.cluster, setting.job, setting.devices
    return LayoutTask(*where, setting.sizes, only, setting.states_bytes)


def system_of(backend: Backend) -> System:
    """A training framework as a system that can be asked what it would do."""
    orders = " or ".join(backend.schedules)
    return System(
        key=backend.key,
        title=backend.title,
        cut=f"stages of whole layers, equally replicated; {orders}" if orders else "none: replicas of the whole model",
        sharding="columns, rows and heads of every layer" if backend.groups else "none: every tensor is whole",
        solver=by_search,
        staleness="none",
        chooses="the fastest plan that it takes as it is",
        source="; ".join(backend.sources.values()),
        limits=None,
        takes=PRICED | {*LIMITS, "overlap"} - {"backends"},
        open=backend.notes,
        framework=backend,
    )

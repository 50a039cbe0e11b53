"""Devices that a plan leaves idle, and the nearest batch or number of replicas that uses all of them.

A batch that does not divide among the devices leaves some idle, or forces a slower shape on all of them. The plan's
shape on as many devices as there are, and plain data parallelism, are priced at the nearest batch that divides: what
they gain is a lower bound, since a search at that batch may find a faster plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator
from typing import Any

from planner.errors import JobError, ModelError, UsageError
from planner.hardware.types import Cluster
from planner.plans.words import significant
from planner.space.configuration import Configuration, StageChoice
from planner.space.evaluate import evaluate
from planner.space.pricer import Pricer
from planner.space.types import Evaluation, Job

NEAR = 1 / 8
"""Largest change of the batch, as a part of it, that is proposed where no device is idle."""
LEAST_GAIN, LEAST_GAIN_AT_WORK = 0.01, 0.05
"""Least gain in samples a second that is told where devices are idle, and where all are at work."""


_PLAIN = "1f1b"
"""Schedule of plain data parallelism, which has a single stage."""
MOST_SIZES = 3
"""Micro-batches that a shape is priced with, the nearest to the plan's first."""
MOST_PLAIN_ZERO = 3
"""ZeRO stage of plain data parallelism, beside 0, 1 and the plan's, where no single framework must have it."""


def fuller_use(
    pricer: Pricer,
    cluster: Cluster,
    job: Job,
    decision: Configuration,
    evaluation: Evaluation,
    ranks: Collection[int],
    *,
    own_shape: bool,
) -> dict[str, Any]:
    """Fields of a plan's headline about the devices that it leaves idle; empty where all are well used.

    Args:
        pricer: prices of the model.
        cluster: the hardware.
        job: what was asked for.
        decision: the plan's configuration.
        evaluation: the judge's verdict on it.
        ranks: devices at work.
        own_shape: whether the user gave the configuration: no other shape is proposed then.

    Returns:
        `available_devices`; and of the best use of all of them that was priced, if it is faster, `fuller_batch`,
        `fuller_data` and `fuller_gain` (`planner.plans.figures.Headline`), else the fields of `idle_count`.
    """
    available, working = job.devices_of(cluster), len(ranks)
    idle = available - working
    batch = decision.micro_batch * decision.micro_batches * decision.copies
    if not idle and (own_shape or batch % available == 0):
        return {}
    pace, best = batch / evaluation.iteration_s, (0.0, 0, 0)
    for configuration in _on_all(pricer, job, decision, available, working, own_shape=own_shape):
        fuller = configuration.micro_batch * configuration.micro_batches * configuration.copies
        if not idle and (fuller == batch or abs(fuller - batch) > NEAR * batch):
            continue
        seconds = _seconds(pricer, cluster, dataclasses.replace(job, global_batch=fuller), configuration)
        data = configuration.copies * configuration.stages[0].replicas
        best = max(best, (fuller / seconds / pace - 1, -fuller, data))
    gain, negative_batch, data = best
    if gain < (LEAST_GAIN if idle else LEAST_GAIN_AT_WORK):
        return idle_count(cluster, job, ranks)
    fuller_fields = {"fuller_batch": -negative_batch, "fuller_data": data, "fuller_gain": significant(gain)}
    return {"available_devices": available, **fuller_fields}


def idle_count(cluster: Cluster, job: Job, ranks: Collection[int]) -> dict[str, int]:
    """Fields of a headline that say how many devices there are, and how many do, if a plan leaves some idle."""
    available, working = job.devices_of(cluster), len(ranks)
    if working >= available:
        return {}
    first = max(ranks) < working  # a job on so many devices gets the first ones
    return {"available_devices": available, **({"enough_devices": working} if first else {})}


def _on_all(
    pricer: Pricer, job: Job, decision: Configuration, available: int, working: int, *, own_shape: bool
) -> Iterator[Configuration]:
    """The plan's shape on as many devices as there are, and plain data parallelism, at the nearest batches."""
    batch = decision.micro_batch * decision.micro_batches * decision.copies
    replicas = {stage.replicas for stage in decision.stages}
    if len(replicas) == 1 and not decision.devices and not decision.exchange:
        each = replicas.pop()
        if decision.copies > 1:
            shape = dataclasses.replace(decision, copies=available // (working // decision.copies))
        else:
            more = available // (working // each)
            stages = tuple(dataclasses.replace(stage, replicas=more) for stage in decision.stages)
            shape = dataclasses.replace(decision, stages=stages)
        shape = dataclasses.replace(shape, slice_devices=0)
        yield from _near(batch, decision.micro_batch, shape, 1 if own_shape else MOST_SIZES)
    if own_shape:
        return
    blocks, ranks = len(pricer.chain.blocks), decision.stages[0].ranks
    stages_of = [StageChoice(0, blocks, available, recompute) for recompute in (False, True)]
    zeros = {decision.zero, 0, 1} | (set() if len(job.backends) == 1 else {MOST_PLAIN_ZERO})
    for stage, zero in itertools.product(stages_of, sorted(zeros)):
        plain = Configuration((stage,), 1, decision.micro_batch, 1, _PLAIN, zero=zero)
        yield from _near(batch, max(1, decision.micro_batch // ranks), plain, MOST_SIZES)


def _near(batch: int, size: int, shape: Configuration, most_sizes: int) -> Iterator[Configuration]:
    """A shape at the nearest batch that it divides, with so many micro-batches next to a size.

    Shardings are of one micro-batch size, so that shapes with any keep it.
    """
    data, fixed = shape.copies * shape.stages[0].replicas, any(stage.sharding for stage in shape.stages)
    near = _nearest_multiple(batch, data * (size if fixed else 1))
    samples = near // data
    small = [m for m in range(1, math.isqrt(samples) + 1) if samples % m == 0]
    sizes = sorted({*small, *(samples // m for m in small)}, key=lambda m: abs(math.log(m / size)))
    for micro_batch in (size,) if fixed else sizes[:most_sizes]:
        yield dataclasses.replace(shape, micro_batch=micro_batch, micro_batches=near // (micro_batch * shape.copies))


def _nearest_multiple(batch: int, step: int) -> int:
    """The multiple of a number that is nearest to a batch, the smaller of two, at least the number itself."""
    below = batch // step * step
    return below if below and batch - below <= below + step - batch else below + step


def _seconds(pricer: Pricer, cluster: Cluster, job: Job, configuration: Configuration) -> float:
    """Time of a step; infinite where the configuration breaks a limit of the job or cannot be priced."""
    try:
        costs = {each.sharding: each for each in pricer.costs_of(configuration)}
        verdict = evaluate(costs, cluster, job, configuration)
    except (JobError, ModelError, UsageError):
        return math.inf  # a micro-batch that the model or its measured costs cannot have: nothing to propose
    return math.inf if verdict.violations else verdict.iteration_s

"""The judge: the time and memory of a configuration, and the limits that it breaks.

It shares no recurrence, table or bound with the solvers: plain loops over the configuration's blocks, devices and
links.

The closed form of the iteration time, m_i = micro_batches / r_i being what one of the r_i replicas of stage i works on:

    t_i = forward_i + backward_i + receive_i + return_i
    T   = sum_i t_i  +  max_i (m_i - 1 + late_i) t_i  +  max_k (e_k - lead_k)_+

The first term fills and drains the pipeline, the second is the pace of its slowest stage (synchronous 1F1B and GPipe
alike: Narayanan et al., SOSP 2019; Fan et al., PPoPP 2021). Where an earlier stage has fewer replicas, no more than
that many micro-batches arrive at a time, so the last replica of stage i begins late by a part of t_i:

    late_i = 1 - min(1, min_{j<i} r_j / r_i)

The third term is what the end of the iteration still waits for: stage k synchronises and updates for
`e_k = exposed_sync_k + update_k`, beginning `lead_k = sum_{j<k} (backward_j + return_j)` before stage 0 ends its last
backward. Where stages share weights, summing their gradients is part of the first one's `exposed_sync`. Exact for equal
stages; for GPipe a lower bound where another stage is slowest forward than backward.

Where the schedule has no such closed form (several stages a worker, split backwards, pipelines that never drain), its
orders are played, and that gives the time (`planner.space.timing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

from planner.hardware.types import Cluster
from planner.play import Transfers
from planner.schedules import Schedule, get
from planner.space.configuration import Configuration
from planner.space.limits import (
    forbidden_choices,
    malformations,
    missing_devices,
    overfull_hosts,
    overfull_workers,
    unlike_repeats,
)
from planner.space.schemes import judged_exchange
from planner.space.steps import StageTerms, worker_memory
from planner.space.terms import TermCache, TermInputs, stage_terms
from planner.space.timing import least_s, play_terms
from planner.space.types import BlockCosts, Evaluation, Job, Violation
from planner.space.workers import Workers, lay_workers, pipeline_of
from planner.sums import float_sum


class Timed(StrEnum):
    """How the iteration time of an evaluation is found."""

    CLOSED_FORM = "closed form"
    """By the closed form of the module where the schedule has one, else by playing the orders."""

    PLAYED = "played"
    """By playing the orders."""

    BOUND = "bound"
    """By the schedule's critical path: a lower bound for every order of the stages' work."""


def evaluate(
    costs: BlockCosts | Mapping[int, BlockCosts],
    cluster: Cluster,
    job: Job,
    configuration: Configuration,
    *,
    schedule: Schedule | None = None,
    timed: Timed = Timed.CLOSED_FORM,
    cache: TermCache | None = None,
) -> Evaluation:
    """Price a configuration and list every limit that it breaks.

    Args:
        costs: the chain's costs at the configuration's micro-batch size, of one sharding or by number of the sharding.
        cluster: the machine.
        job: what is to be trained, and which choices are allowed.
        configuration: the configuration to price.
        schedule: its schedule, where the registry has none of its name (orders of the user's own).
        timed: how the iteration time is found.
        cache: results of earlier calls for the same cluster, job and micro-batch size; new ones are added.

    Returns:
        The iteration time, the terms of each stage, the memory of each worker and the violations. A configuration whose
        stages or devices make no sense (kinds "coverage", "devices", "divisibility"), or that its schedule or exchange
        scheme cannot serve, gets an infinite time and no terms. What the job forbids is said before what the schedule
        cannot do.

    Raises:
        UsageError: the job's precision or optimizer is unknown.

    O(stages * (blocks + ranks)) where the time is a closed form, else O(actions).
    """
    costs_by_sharding = {costs.sharding: costs} if isinstance(costs, BlockCosts) else costs
    malformed = malformations(costs_by_sharding, job, configuration, named=schedule is None)
    if malformed:
        return _refused(malformed)
    scheduler = schedule or get(configuration.schedule)
    pipeline = pipeline_of(configuration)
    names = costs_by_sharding[configuration.stages[0].sharding].names
    if unserved := scheduler.supports(pipeline):
        return _refused(tuple(forbidden_choices(job, configuration, names)) or (Violation("option", 0, unserved),))
    if unlike := unlike_repeats(configuration, scheduler.recomputed_stages(pipeline)):
        return _refused(tuple(unlike))
    workers = lay_workers(configuration, scheduler)
    if missing := missing_devices(cluster, job, configuration, workers):
        return _refused(tuple(missing))
    exchange, unserved_by = judged_exchange(
        costs_by_sharding[configuration.stages[0].sharding], cluster, job, configuration
    )
    if unserved_by:
        return _refused(unserved_by)
    setting = TermInputs(
        costs_by_sharding, cluster, job, configuration, scheduler, pipeline, workers, exchange, cache or TermCache()
    )
    stages = stage_terms(setting)
    memory = worker_memory(scheduler, pipeline, workers.hosted, stages)
    violations = (
        *forbidden_choices(job, configuration, names, workers),
        *overfull_workers(memory),
        *overfull_hosts(cluster, workers, stages),
    )
    iteration_s = _iteration_s(configuration, scheduler, stages, timed)
    return Evaluation(iteration_s, stages, violations, _bottleneck(workers, stages), memory, exchange)


def in_closed_form(configuration: Configuration, schedule: Schedule) -> bool:
    """True if the closed form of the module gives a configuration's time.

    The schedule has one stage a worker, transfers block both workers, and recomputation is part of the backwards.
    """
    repeats = schedule.closed_form and schedule.recomputed_stages(pipeline_of(configuration))
    return schedule.closed_form and not repeats and configuration.transfers is Transfers.BLOCKING


def _iteration_s(configuration: Configuration, schedule: Schedule, stages: Sequence[StageTerms], timed: Timed) -> float:
    if timed is Timed.BOUND:
        return least_s(configuration, schedule, stages)
    if timed is Timed.CLOSED_FORM and in_closed_form(configuration, schedule):
        replicas = [choice.replicas for choice in configuration.stages]
        body_s = fill_and_pace_s(replicas, configuration.micro_batches, [t.total_s for t in stages])
        return body_s + tail_s(
            [t.exposed_sync_s + t.update_s for t in stages], [t.backward_s + t.return_s for t in stages]
        )
    return play_terms(configuration, schedule, stages).iteration_s


def _refused(violations: tuple[Violation, ...]) -> Evaluation:
    return Evaluation(math.inf, (), violations, 0)


def _bottleneck(workers: Workers, stages: Sequence[StageTerms]) -> int:
    """The longest stage of the busiest worker."""
    pace = [t.total_s / len(own) for t, own in zip(stages, workers.holders, strict=True)]
    busiest = max(workers.hosted, key=lambda own: float_sum(pace[stage] for stage in own))
    return max(busiest, key=lambda stage: (pace[stage], -stage))


def fill_and_pace_s(replicas: Sequence[int], micro_batches: int, stage_s: Sequence[float]) -> float:
    """The first two terms of the closed form: filling and draining, and the slowest stage for its other micro-batches.

    Args:
        replicas: of each stage.
        micro_batches: of all replicas of a stage together.
        stage_s: seconds of each stage for one micro-batch, transfers included.
    """
    steady_s, fewest = 0.0, math.inf
    for count, seconds in zip(replicas, stage_s, strict=True):
        late = 1 - min(1.0, fewest / count)
        steady_s = max(steady_s, (micro_batches // count - 1 + late) * seconds)
        fewest = min(fewest, count)
    return float_sum(stage_s) + steady_s


def tail_s(end_s: Sequence[float], back_s: Sequence[float]) -> float:
    """The third term of the closed form: synchronisation and updates after stage 0's last backward, in seconds.

    Args:
        end_s: synchronisation and update of each stage.
        back_s: backward and return transfer of each stage.
    """
    lead_s = longest_s = 0.0
    for end, back in zip(end_s, back_s, strict=True):
        longest_s = max(longest_s, end - lead_s)
        lead_s += back
    return longest_s

"""The judge: what a decision costs and which limits it breaks, worked out from the inputs alone.

Nothing here is shared with the solvers: plain loops over the blocks, devices and links that a decision names.

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

Where a schedule is no such line (several stages a worker, split backwards, pipelines that never drain), the time is
that of its orders when they are played (`planner.space.timing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

from planner.hardware.types import Cluster
from planner.play import Transfers
from planner.schedules import Schedule, get
from planner.schedules.held import HeldUnits
from planner.space.configuration import Configuration
from planner.space.limits import forbidden_choices, malformations, missing_devices, overfull_workers, unlike_repeats
from planner.space.schemes import judged_exchange
from planner.space.terms import Known, Setting, stage_terms
from planner.space.timing import least_s, play_terms
from planner.space.types import BlockCosts, Evaluation, Job, MemoryBytes, StageTerms, Violation, WorkerMemory
from planner.space.workers import Workers, lay_workers, pipeline_of


class Timed(StrEnum):
    """What the iteration time of an evaluation is."""

    CLOSED_FORM = "closed form"
    """That of the module where the schedule is a paced line of stages, else what playing its orders takes."""

    PLAYED = "played"
    """What playing the orders takes."""

    BOUND = "bound"
    """The schedule's longest chain of waits in closed form: no order of the stages' work is faster."""


Shelf = BlockCosts | Mapping[int, BlockCosts]
"""Costs at one micro-batch size, of one sharding or by the number of several."""


def evaluate(
    costs: Shelf,
    cluster: Cluster,
    job: Job,
    configuration: Configuration,
    *,
    schedule: Schedule | None = None,
    timed: Timed = Timed.CLOSED_FORM,
    known: Known | None = None,
) -> Evaluation:
    """Price a configuration and list every limit that it breaks.

    Args:
        costs: the chain's costs at the configuration's micro-batch size; by sharding where stages differ in it.
        cluster: the machine.
        job: what is to be trained, and which choices are allowed.
        configuration: the point of the space.
        schedule: its schedule, where that has no name in the registry (orders of one's own).
        timed: what the iteration time is to be.
        known: what earlier calls for the same cluster and job, at the same micro-batch size, worked out; filled.

    Returns:
        The iteration time, the terms of each stage, the memory of each worker and the violations. A configuration whose
        stages or devices make no sense (kinds "coverage", "devices", "divisibility"), or that its schedule or exchange
        scheme cannot serve, gets an infinite time and no terms. What the job forbids is said before what the schedule
        cannot do.

    Raises:
        UsageError: the job's precision or optimizer is unknown.

    O(stages * (blocks + ranks)) where the time is a closed form, else O(actions).
    """
    shelf = {costs.sharding: costs} if isinstance(costs, BlockCosts) else costs
    malformed = malformations(shelf, job, configuration, named=schedule is None)
    if malformed:
        return _refused(malformed)
    chosen = schedule or get(configuration.schedule)
    pipeline = pipeline_of(configuration)
    names = shelf[configuration.stages[0].sharding].names
    if unserved := chosen.supports(pipeline):
        return _refused(tuple(forbidden_choices(job, configuration, names)) or (Violation("option", 0, unserved),))
    if unlike := unlike_repeats(configuration, chosen.recomputed_stages(pipeline)):
        return _refused(tuple(unlike))
    workers = lay_workers(configuration, chosen)
    if missing := missing_devices(cluster, job, configuration, workers):
        return _refused(tuple(missing))
    exchange, unserved_by = judged_exchange(shelf[configuration.stages[0].sharding], cluster, job, configuration)
    if unserved_by:
        return _refused(unserved_by)
    setting = Setting(shelf, cluster, job, configuration, chosen, pipeline, workers, exchange, known or Known())
    stages = stage_terms(setting)
    memory = _worker_memory(setting, stages)
    violations = (*forbidden_choices(job, configuration, names, workers), *overfull_workers(memory))
    iteration_s = _iteration_s(configuration, chosen, stages, timed)
    return Evaluation(iteration_s, stages, violations, _bottleneck(workers, stages), memory, exchange)


def in_closed_form(configuration: Configuration, schedule: Schedule) -> bool:
    """Whether the closed form of the module describes the time of a configuration: a paced line of stages whose
    transfers stop both workers, and whose repeated forwards are part of their backwards."""
    repeats = schedule.closed_form and schedule.recomputed_stages(pipeline_of(configuration))
    return schedule.closed_form and not repeats and configuration.transfers is Transfers.BLOCKING


def _iteration_s(configuration: Configuration, schedule: Schedule, stages: Sequence[StageTerms], timed: Timed) -> float:
    if timed is Timed.BOUND:
        return least_s(configuration, schedule, stages)
    if timed is Timed.CLOSED_FORM and in_closed_form(configuration, schedule):
        return sum(t.total_s for t in stages) + _steady_s(configuration, stages) + _tail_s(stages)
    return play_terms(configuration, schedule, stages).iteration_s


def _refused(violations: tuple[Violation, ...]) -> Evaluation:
    return Evaluation(math.inf, (), violations, 0)


def _bottleneck(workers: Workers, stages: Sequence[StageTerms]) -> int:
    """The stage with the most work on the worker that has the most."""
    pace = [t.total_s / len(own) for t, own in zip(stages, workers.holders, strict=True)]
    busiest = max(workers.hosted, key=lambda own: sum(pace[stage] for stage in own))
    return max(busiest, key=lambda stage: (pace[stage], -stage))


def _steady_s(configuration: Configuration, stages: Sequence[StageTerms]) -> float:
    """Seconds that the slowest stage works on all its micro-batches but one, its last replica beginning late."""
    steady_s, fewest = 0.0, math.inf
    for choice, terms in zip(configuration.stages, stages, strict=True):
        late = 1 - min(1.0, fewest / choice.replicas)
        turns = configuration.micro_batches // choice.replicas - 1 + late
        steady_s = max(steady_s, turns * terms.total_s)
        fewest = min(fewest, choice.replicas)
    return steady_s


def _tail_s(stages: Sequence[StageTerms]) -> float:
    """Seconds that synchronisation and updates last beyond stage 0's last backward."""
    lead_s = tail_s = 0.0
    for terms in stages:
        tail_s = max(tail_s, terms.exposed_sync_s + terms.update_s - lead_s)
        lead_s += terms.backward_s + terms.return_s
    return tail_s


def _worker_memory(setting: Setting, stages: Sequence[StageTerms]) -> tuple[WorkerMemory, ...]:
    """Memory of each worker, its stages together; of workers that hold the same stages the first."""
    peaks = setting.schedule.peaks(setting.pipeline)
    found: dict[tuple[int, ...], WorkerMemory] = {}
    for worker, own in enumerate(setting.workers.hosted):
        if own and own not in found:
            found[own] = _together(own, stages, peaks[worker])
    return tuple(found.values())


def _together(own: tuple[int, ...], stages: Sequence[StageTerms], peaks: HeldUnits) -> WorkerMemory:
    """What a worker holds of several stages: weights of all, the most activations at a time, one workspace."""
    terms = [stages[stage] for stage in own]
    if len(own) == 1 and not peaks.guests:
        return WorkerMemory(own, terms[0].memory, terms[0].capacity_bytes)
    working = max(t.memory.activations - t.in_flight * t.unit_bytes for t in terms)
    memory = MemoryBytes(
        weights=sum(t.memory.weights for t in terms),
        gradients=sum(t.memory.gradients for t in terms),
        optimizer=sum(t.memory.optimizer for t in terms),
        activations=peaks.most([t.unit_bytes for t in stages]) + working,
        workspace=max(t.memory.workspace for t in terms),
        reserve=max(t.memory.reserve for t in terms),
    )
    return WorkerMemory(own, memory, min(t.capacity_bytes for t in terms))

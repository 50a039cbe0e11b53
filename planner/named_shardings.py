"""The ways to share operators that a named configuration may take: each sharding worth trying at its degrees."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from planner import schedules
from planner.errors import JobError
from planner.hardware.types import Cluster
from planner.plans import Plan, priced_configuration
from planner.space import Configuration, lay_workers
from planner.space.jobs import check_dealt, mesh_problem
from planner.space.named import Degrees, configurations_of
from planner.space.pricer import Pricer
from planner.space.types import BlockCosts, Job
from planner.sums import float_sum

NamedConfiguration = Degrees | Configuration | Plan
"""A configuration by its degrees, in full, or as a plan has it with its shardings."""

CostsBySharding = Mapping[int, BlockCosts]
"""Costs of the chain's blocks by number of the sharding."""

Way = TypeVar("Way")

ShardingsOf = Callable[[int, int, int, int], list[BlockCosts]]
"""The shardings worth trying at a micro-batch size with TP, CP and EP of so many ranks."""

FEWEST_WEIGHTS_MARGIN = 1.01
"""Times the fewest weights on a rank that still count as the fewest: norms and biases may be whole or cut."""


def ways_to_share(
    pricer: Pricer, job: Job, asked: NamedConfiguration
) -> Iterator[tuple[Configuration, CostsBySharding]]:
    """The configuration once for each sharding worth trying, with the costs of that sharding.

    Raises:
        JobError: its ranks cannot share operators, or are not as many for every stage.
    """
    if isinstance(asked, Plan):
        if asked.shardings and asked.model.fingerprint == pricer.graph.fingerprint:
            yield priced_configuration(asked, pricer)
            return
        asked = with_sharding(asked.configuration, 0)
    for configuration, shardings in alike(pricer, job, asked, functools.partial(shardings_at, pricer, job)):
        yield from each_sharding(configuration, shardings)


def each_sharding(
    configuration: Configuration, shardings: Sequence[BlockCosts]
) -> Iterator[tuple[Configuration, CostsBySharding]]:
    """The configuration under each of some shardings."""
    for costs in shardings:
        yield with_sharding(configuration, costs.sharding), {costs.sharding: costs}


def with_sharding(configuration: Configuration, number: int) -> Configuration:
    """The configuration with one sharding for all stages, by its number; 0 for none, as numbers differ by plan."""
    stages = tuple(dataclasses.replace(stage, sharding=number) for stage in configuration.stages)
    return dataclasses.replace(configuration, stages=stages)


def alike(
    pricer: Pricer, job: Job, asked: Degrees | Configuration, shardings_of: ShardingsOf, *, fewest_weights: bool = False
) -> Iterator[tuple[Configuration, list[BlockCosts]]]:
    """The configuration with the shardings worth trying under it; several where shardings are cut differently.

    Raises:
        JobError: its ranks cannot share operators, or are not as many for every stage.
    """
    if isinstance(asked, Degrees):
        size = asked.micro_batch * max(1, asked.expert)
        shardings = shardings_of(size, asked.tensor, asked.context, asked.expert)
    else:
        _check_devices(asked, pricer.cluster, job)
        shardings = shardings_of(asked.micro_batch, *_widths(asked))
    if fewest_weights:
        shardings = with_fewest_weights(shardings, [[costs] for costs in shardings])
    if isinstance(asked, Degrees):
        yield from configurations_of(asked, pricer.chain, shardings, pricer.cluster, job)
    else:
        yield asked, shardings


def _widths(asked: Configuration) -> tuple[int, int, int]:
    """TP, CP and EP of a configuration in full that names no sharding.

    Raises:
        JobError: they are not the same for every stage, or stages name shardings.
    """
    widths = {(stage.ranks, stage.context, stage.expert) for stage in asked.stages}
    if len(widths) != 1:
        said = ", ".join(map(str, sorted({each[0] for each in widths}))) or "no"
        raise JobError(f"stages of {said} ranks", hint="give all stages as many ranks, CP and EP alike")
    if any(stage.sharding for stage in asked.stages):
        raise JobError(
            "a stage names a sharding, and a configuration by itself has none",
            hint="give the plan file that has it, or leave it out for the fastest way to share operators",
        )
    ranks, context, expert = widths.pop()
    if ranks % (context * expert):
        raise JobError(f"CP {context} x EP {expert} does not divide {ranks} ranks", hint="give ranks as TP x CP x EP")
    return ranks // (context * expert), context, expert


def with_fewest_weights(ways: Sequence[Way], costs: Sequence[Collection[BlockCosts]]) -> list[Way]:
    """The ways to share operators that leave the fewest weights on a rank (`FEWEST_WEIGHTS_MARGIN`)."""
    weights = [float_sum(float(each.parameter_elements.sum()) for each in used) for used in costs]
    return [
        way for way, elements in zip(ways, weights, strict=True) if elements <= FEWEST_WEIGHTS_MARGIN * min(weights)
    ]


def _check_devices(asked: Configuration, cluster: Cluster, job: Job) -> None:
    """Refuse a configuration that does not fit the devices, before arrays of its size are made.

    Raises:
        JobError: more devices side by side than there are, or devices that are not one for each rank of all workers.
    """
    available = job.devices_of(cluster)
    widest = max(asked.copies, *(stage.replicas * stage.ranks for stage in asked.stages), len(asked.devices), 0)
    if widest > available:
        raise JobError(f"{widest} devices side by side, but there are {available}", hint="use fewer copies or replicas")
    if not asked.devices:
        return
    line = dataclasses.replace(asked, devices=())
    workers = lay_workers(line, schedules.get(asked.schedule))
    taken = asked.copies * sum(int(own.shape[1]) for own in workers.ranks)
    if len(asked.devices) != taken or len(set(asked.devices) & set(range(available))) != taken:
        message = f"{len(asked.devices)} devices are given for {taken} ranks of all workers"
        raise JobError(message, hint=f"give each rank one of the devices 0 to {available - 1}, copy by copy")


def shardings_at(
    pricer: Pricer, job: Job, micro_batch: int, tensor: int, context: int, expert: int
) -> list[BlockCosts]:
    """The shardings worth trying at a micro-batch size with TP, CP and EP of so many ranks.

    Raises:
        JobError: ranks cannot share the model's operators so.
    """
    ranks = tensor * context * expert
    if micro_batch < 1 or min(tensor, context, expert) < 1:
        raise JobError(f"micro-batches of {micro_batch} on {ranks} ranks", hint="give numbers of at least 1")
    check_dealt(pricer.graph, dataclasses.replace(job, context_parallel=(context,), expert_parallel=(expert,)))
    degrees = "tensor parallel degree" if ranks == tensor else "TP, CP or EP"
    if reason := mesh_problem(pricer.cluster, job, (ranks,)):
        near = range(1, min(2 * ranks, pricer.cluster.device_count) + 1)
        possible = [str(other) for other in near if not mesh_problem(pricer.cluster, job, (other,))]
        raise JobError(reason, hint=f"use another {degrees}, of {' or '.join(possible[-4:])} ranks in all")
    found = pricer.shardings_of(micro_batch, tensor, context, expert)
    if not found:
        raise JobError(f"no block of the model can be shared by {ranks} ranks", hint=f"use another {degrees}")
    return found

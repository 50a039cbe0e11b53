"""Micro-batch sizes that a job allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.errors import JobError, ModelError
from planner.exchange import recipes
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.solvers._account import either
from planner.space.cuts import divisors
from planner.space.types import BlockCosts, Job

MOST_SIZES = 9
"""Micro-batch sizes that are priced at the most where each is asked of many searches."""

SMALL_GRAPH, MOST_SIZES_SMALL = 200, 13
"""The same for graphs of few operators."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Micro-batch sizes worth pricing, ascending; whether the model has that one only; what was left out."""

    sizes: tuple[int, ...]
    fixed: bool = False
    notes: tuple[str, ...] = ()


def worth_pricing(job: Job, cluster: Cluster, graph: Graph, costs: Callable[[int], BlockCosts]) -> Sizes:
    """Powers of two that divide the global batch, as far as the model can be set to them and a block fits a device.

    Where there are too many, the smallest and the largest stay.

    Raises:
        JobError: none divides the global batch.
        ModelError: the model has one size only, which the job does not allow.
    """
    chosen = [b for b in micro_batch_sizes(job) if job.micro_batches or b & (b - 1) == 0]
    most = MOST_SIZES_SMALL if len(graph.nodes) <= SMALL_GRAPH else MOST_SIZES
    largest = max(device.usable_bytes for device in cluster.devices)
    found: list[int] = []
    notes: tuple[str, ...] = ()
    for size in chosen:
        try:
            own = costs(size)
        except ModelError as error:
            if not found:
                return _as_exported(job, graph.batch or 1, error)
            notes = (f"micro-batches stop at {found[-1]}: {error}",)
            break
        if found and float(np.diagonal(own.saved_bytes).max()) > largest:
            break
        found.append(size)
    return Sizes(tuple(found if len(found) <= most else [found[0], *found[1 - most :]]), notes=notes)


def _as_exported(job: Job, size: int, reason: ModelError) -> Sizes:
    """The only size of a model whose batch cannot be changed.

    Raises:
        ModelError: the job does not allow it.
    """
    message, where = reason.problem.message, reason.problem.where
    if job.global_batch % size:
        raise ModelError(message, where=where, hint=f"use a global batch that {size} divides, as exported")
    if job.micro_batches and size not in job.micro_batches:
        raise ModelError(message, where=where, hint=f"allow micro-batches of {size}, as exported")
    return Sizes((size,), True, (f"micro-batches of {size} sample(s) only: {reason}",))


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

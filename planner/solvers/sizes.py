"""Micro-batch sizes that a job allows."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from planner.errors import JobError, ModelError
from planner.exchange import recipes
from planner.graph import Graph
from planner.hardware.types import Cluster
from planner.memory import fits
from planner.solvers._account import either
from planner.space.cuts import divisors
from planner.space.types import BlockCosts, Job

MOST_SIZES = 9
"""Most micro-batch sizes that are priced if each is used by many searches."""

SMALL_GRAPH, MOST_SIZES_SMALL = 200, 13
"""Operators of a small graph, and the most sizes that are priced for it."""


WorthPricing = tuple[tuple[int, ...], bool, tuple[str, ...]]
"""Micro-batch sizes, ascending; True if there is one since the model's batch cannot be changed; what was left out."""


def worth_pricing(job: Job, cluster: Cluster, graph: Graph, costs: Callable[[int], BlockCosts]) -> WorthPricing:
    """Powers of two that divide the global batch, up to the first that the model or a device's memory rules out.

    If there are too many, the smallest and the largest ones are kept.

    Raises:
        JobError: none divides the global batch.
        ModelError: the model has one size only, which the job does not allow.
    """
    candidates = [b for b in micro_batch_sizes(job) if job.micro_batches or b & (b - 1) == 0]
    limit = MOST_SIZES_SMALL if len(graph.nodes) <= SMALL_GRAPH else MOST_SIZES
    largest = cluster.largest_bytes
    sizes: list[int] = []
    notes: tuple[str, ...] = ()
    for size in candidates:
        try:
            block_costs = costs(size)
        except ModelError as error:
            if not sizes:
                return _as_exported(job, graph.batch or 1, error)
            notes = (f"micro-batches stop at {sizes[-1]}: {error}",)
            break
        if sizes and float(np.diagonal(block_costs.saved_bytes).max()) > largest:
            break
        sizes.append(size)
    return tuple(sizes if len(sizes) <= limit else [sizes[0], *sizes[1 - limit :]]), False, notes


def _as_exported(job: Job, size: int, reason: ModelError) -> WorthPricing:
    """The only size of a model whose batch size is fixed.

    Raises:
        ModelError: the job does not allow it.
    """
    message, where = reason.problem.message, reason.problem.where
    if job.global_batch % size:
        raise ModelError(message, where=where, hint=f"use a global batch that {size} divides, as exported")
    if job.micro_batches and size not in job.micro_batches:
        raise ModelError(message, where=where, hint=f"allow micro-batches of {size}, as exported")
    return (size,), True, (f"micro-batches of {size} sample(s) only: {reason}",)


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
    allowed = tuple(b for b in sizes if b in job.micro_batches)
    if not allowed:
        requested = max(1, *job.micro_batches)
        nearest = sorted(sorted(sizes, key=lambda b: (abs(math.log(b / requested)), b))[:6])
        raise JobError(
            f"no micro-batch size of {either(job.micro_batches)} divides the global batch of {job.global_batch}",
            hint=f"use a micro-batch size of {either(nearest)}, or another global batch",
        )
    return allowed


def any_block_fits(cluster: Cluster, costs: BlockCosts) -> bool:
    """True if for every block the activations of one micro-batch fit the largest device."""
    kept = np.diagonal(costs.saved_bytes) + costs.workspace_bytes
    return bool(fits(kept, cluster.largest_bytes).all())

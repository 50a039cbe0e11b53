"""Collectives on the actual topology: seconds from the hardware's own models, bytes by counting every flow."""

from __future__ import annotations

import dataclasses

import numpy as np

from planner.exchange._defaults import dense_note
from planner.exchange.fabric import Fabric, Traffic, nothing, rank_traffic
from planner.exchange.messages import Leg, Message, pack
from planner.exchange.recipe import ExchangeStep, Phase, Recipe, groups_of, step_terms
from planner.exchange.types import Draft, Step
from planner.hardware import ALGORITHMS, DIRECT, MEASURED, Cluster, Collective, algorithms

CHEAPEST = ""


def unmeasured(cluster: Cluster) -> Cluster:
    """The cluster without its measured collectives, which say nothing of algorithms that were not measured."""
    return dataclasses.replace(cluster, levels=tuple(dataclasses.replace(v, fits=()) for v in cluster.levels))


def affine(fabric: Fabric, step: ExchangeStep, algorithm: str) -> tuple[float, float] | None:
    """Start-up seconds and seconds a byte of one algorithm, None where the group cannot use it.

    A measured collective stands for what libraries run at large sizes; some algorithms are another on a single level.
    """
    own = (algorithms.ALGORITHMS.get(algorithm).alone if _single_level(fabric) else "") or algorithm
    measured = algorithms.ALGORITHMS.get(own).measured
    cluster = fabric.cluster if measured else unmeasured(fabric.cluster)
    terms = step_terms(cluster, step, fabric.ranks, fabric.concurrent)
    for name in (MEASURED, own, DIRECT):
        column = ALGORITHMS.index(name)
        if np.isfinite(terms.latency_s[column]):
            return float(terms.latency_s[column]), float(terms.s_per_byte[column])
    return None


def priced(
    fabric: Fabric, step: ExchangeStep, payload_bytes: float, algorithm: str = CHEAPEST, efficiency: float = 1.0
) -> tuple[str, float]:
    """The algorithm, or the cheapest of all, and its seconds; a measured one counts as the first of all.

    Raises:
        ValueError: the ranks cannot use the algorithm.
    """
    if algorithm == CHEAPEST:
        found = step_terms(fabric.cluster, step, fabric.ranks, fabric.concurrent)
        name = found.algorithm(payload_bytes)
        return (algorithms.algorithm_names()[0] if name == MEASURED else name), float(found.seconds(payload_bytes))
    terms = affine(fabric, step, algorithm)
    if terms is None:
        raise ValueError(f"{algorithm} cannot serve this group")
    used = algorithm if len(fabric.ranks) > 1 else DIRECT
    return used, terms[0] + terms[1] / efficiency * payload_bytes


def _single_level(fabric: Fabric) -> bool:
    return sum(len(np.unique(row)) > 1 for row in fabric.rank_ports) <= 1


def step_traffic(
    fabric: Fabric, step: ExchangeStep, algorithm: str = "ring", members: np.ndarray | None = None
) -> Traffic:
    """Bytes through every port when a step moves one byte of payload; a scatter or a gather is half an all-reduce.

    Args:
        fabric: where.
        step: what.
        algorithm: how.
        members: positions of the ranks that exchange, ascending; all of the fabric's when None.
    """
    positions = np.arange(len(fabric.ranks)) if members is None else members
    groups = groups_of(np.asarray(fabric.ranks)[positions] // fabric.node_size, positions, step.group)
    traffic = nothing(fabric)
    if groups.shape[1] > 1:
        hops = algorithms.ALGORITHMS.get(algorithm).hops
        if hops is None:
            raise ValueError(f"{algorithm} serves no all-reduce")
        sizes = [fabric.child_size(level) for level in range(fabric.top + 2)]
        for group in groups:
            traffic = traffic + rank_traffic(fabric, *hops(fabric.ranks, sizes, group))
    return traffic * ((1.0 if step.collective is Collective.ALL_REDUCE else 0.5) / step.shares(groups))


def draft_recipe(
    fabric: Fabric,
    step: Step,
    recipe: Recipe,
    bucket_bytes: float,
    *,
    algorithm: str = CHEAPEST,
    efficiency: float = 1.0,
    method: str = "",
) -> Draft:
    """The steps of a recipe bucket by bucket, by one algorithm or each by its cheapest.

    A message passes each step once; the bytes are those of all passes of a training step. What travels is named after
    `method`, or after the algorithm. O(buckets * steps + ranks * levels).
    """
    buckets = pack(step, bucket_bytes)
    moved: dict[tuple[str, ExchangeStep], float] = {}
    messages = []
    for bucket in buckets:
        used, legs = method, []
        for part in recipe.steps:
            payload = part.payload(bucket)
            name, seconds = priced(fabric, part, payload, algorithm, efficiency)
            times = 1 if part.phase is Phase.END else step.micro_batches
            moved[name, part] = moved.get((name, part), 0.0) + payload * times
            legs += [Leg(fabric.everything(seconds))] if seconds > 0 else []
            used = used or name
        messages.append(Message(bucket.variables, used, bucket.gradient_bytes, bucket.ready_s, tuple(legs)))
    traffic = nothing(fabric)
    for (name, part), size in moved.items():
        traffic = traffic + step_traffic(fabric, part, name) * size
    methods = {v: m.method for m in messages for v in m.variables}
    return Draft(tuple(messages), traffic, methods, notes=dense_note(step))

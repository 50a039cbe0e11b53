"""Steps of a recipe on the actual topology: seconds from the hardware's cost models, bytes by counting every flow."""

from __future__ import annotations

import dataclasses

import numpy as np

from planner.exchange.fabric import Fabric, Traffic, nothing, rank_traffic
from planner.exchange.recipe import ExchangeStep, Phase, Recipe, groups_of, step_terms
from planner.exchange.scheme import Leg, Message, MessagePlan, dense_note, pack
from planner.exchange.types import Step
from planner.hardware import COLUMNS, DIRECT, MEASURED, Cluster, Collective
from planner.hardware.collectives import ALGORITHMS

CHEAPEST = ""
"""In place of an algorithm: whichever is cheapest for the payload."""


def unmeasured(cluster: Cluster) -> Cluster:
    """The cluster without its measured collectives, which do not apply to algorithms that were not measured."""
    return dataclasses.replace(cluster, levels=tuple(dataclasses.replace(v, fits=()) for v in cluster.levels))


def affine(fabric: Fabric, step: ExchangeStep, algorithm: str) -> tuple[float, float] | None:
    """Start-up seconds and seconds a byte of one algorithm; None where the group cannot use it.

    Measured collectives replace the algorithms that libraries run at large sizes. On a single level some algorithms
    are the same as another one.
    """
    equivalent = (ALGORITHMS[algorithm].alone if _single_level(fabric) else "") or algorithm
    measured = ALGORITHMS[equivalent].measured
    cluster = fabric.cluster if measured else unmeasured(fabric.cluster)
    terms = step_terms(cluster, step, fabric.ranks)
    for name in (MEASURED, equivalent, DIRECT):
        column = COLUMNS.index(name)
        if np.isfinite(terms.latency_s[column]):
            return float(terms.latency_s[column]), float(terms.s_per_byte[column])
    return None


def priced(
    fabric: Fabric, step: ExchangeStep, payload_bytes: float, algorithm: str = CHEAPEST, efficiency: float = 1.0
) -> tuple[str, float]:
    """The algorithm that runs a step (the cheapest one by default), and its seconds.

    A measured collective goes by the name of the first algorithm.

    Raises:
        ValueError: the ranks cannot use the algorithm.
    """
    if algorithm == CHEAPEST:
        terms = step_terms(fabric.cluster, step, fabric.ranks)
        name = terms.algorithm(payload_bytes)
        return (next(iter(ALGORITHMS)) if name == MEASURED else name), float(terms.seconds(payload_bytes))
    costs = affine(fabric, step, algorithm)
    if costs is None:
        raise ValueError(f"{algorithm} cannot serve this group")
    latency_s, s_per_byte = costs
    return algorithm if len(fabric.ranks) > 1 else DIRECT, latency_s + s_per_byte / efficiency * payload_bytes


def _single_level(fabric: Fabric) -> bool:
    return sum(len(np.unique(row)) > 1 for row in fabric.rank_ports) <= 1


def step_traffic(
    fabric: Fabric, step: ExchangeStep, algorithm: str = "ring", members: np.ndarray | None = None
) -> Traffic:
    """Bytes through every port when a step moves one byte of payload; a scatter or a gather is half an all-reduce.

    Args:
        fabric: the ranks and their ports.
        step: the step of a recipe.
        algorithm: the collective algorithm.
        members: positions of the ranks that exchange, ascending; all of the fabric's when None.
    """
    positions = np.arange(len(fabric.ranks)) if members is None else members
    groups = groups_of(np.asarray(fabric.ranks)[positions] // fabric.node_size, positions, step.group)
    traffic = nothing(fabric)
    if groups.shape[1] > 1:
        hops = ALGORITHMS[algorithm].hops
        if hops is None:
            raise ValueError(f"{algorithm} serves no all-reduce")
        sizes = [fabric.child_size(level) for level in range(fabric.top + 2)]
        for group in groups:
            traffic = traffic + rank_traffic(fabric, *hops(fabric.ranks, sizes, group))
    return traffic * ((1.0 if step.collective is Collective.ALL_REDUCE else 0.5) / step.shares(groups))


def plan_recipe(
    fabric: Fabric,
    step: Step,
    recipe: Recipe,
    bucket_bytes: float,
    *,
    algorithm: str = CHEAPEST,
    efficiency: float = 1.0,
) -> MessagePlan:
    """One message a bucket, a leg for each step of a recipe, by one algorithm or the cheapest for each leg.

    A message passes each step once; the traffic is that of all micro-batches of a training step. Transfers are named
    after the algorithm. O(buckets * steps + ranks * levels).
    """
    buckets = pack(step, bucket_bytes)
    moved: dict[tuple[str, ExchangeStep], float] = {}
    messages = []
    for bucket in buckets:
        name_of_transfer, legs = "", []
        for part in recipe.steps:
            payload = part.payload(bucket)
            name, seconds = priced(fabric, part, payload, algorithm, efficiency)
            times = 1 if part.phase is Phase.END else step.micro_batches
            moved[name, part] = moved.get((name, part), 0.0) + payload * times
            legs += [Leg(fabric.busy_everywhere(seconds))] if seconds > 0 else []
            name_of_transfer = name_of_transfer or name
        messages.append(Message(bucket.variables, name_of_transfer, bucket.gradient_bytes, bucket.ready_s, tuple(legs)))
    traffic = nothing(fabric)
    for (name, part), size in moved.items():
        traffic = traffic + step_traffic(fabric, part, name) * size
    methods = {v: m.method for m in messages for v in m.variables}
    return MessagePlan(tuple(messages), traffic, methods, notes=dense_note(step))

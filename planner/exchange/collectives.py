"""Collectives on the actual topology: seconds from the hardware's own models, bytes by counting every flow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from planner.exchange._defaults import dense_note
from planner.exchange.buckets import pack
from planner.exchange.fabric import Fabric
from planner.exchange.messages import Leg, Message
from planner.exchange.readings import groups_of, step_terms
from planner.exchange.recipe import ExchangeStep, Phase, Recipe
from planner.exchange.traffic import Traffic, nothing, rank_traffic
from planner.exchange.types import Draft, Step
from planner.hardware import ALGORITHMS, Cluster, Collective, moved_bytes

CHEAPEST = ""


def unmeasured(cluster: Cluster) -> Cluster:
    """The cluster without its measured collectives, which say nothing of algorithms that were not measured."""
    return dataclasses.replace(cluster, levels=tuple(dataclasses.replace(v, fits=()) for v in cluster.levels))


def affine(fabric: Fabric, step: ExchangeStep, algorithm: str) -> tuple[float, float] | None:
    """Start-up seconds and seconds a byte of one algorithm, None where the group cannot use it.

    A measured collective stands for the ring, which is what libraries run at large sizes; on a single level the
    hierarchical algorithm is the ring.
    """
    cluster = unmeasured(fabric.cluster) if algorithm == "tree" else fabric.cluster
    terms = step_terms(cluster, step, fabric.ranks, fabric.concurrent)
    names = {"ring": ("measured", "ring", "direct"), "hierarchical": ("hierarchical", "measured", "direct")}
    wanted = names.get(algorithm, (algorithm, "direct"))
    if algorithm == "hierarchical" and _single_level(fabric):
        wanted = ("measured", "ring", "direct")
    for name in wanted:
        column = ALGORITHMS.index(name)
        if np.isfinite(terms.latency_s[column]):
            return float(terms.latency_s[column]), float(terms.s_per_byte[column])
    return None


def priced(
    fabric: Fabric, step: ExchangeStep, payload_bytes: float, algorithm: str = CHEAPEST, efficiency: float = 1.0
) -> tuple[str, float]:
    """The algorithm, or the cheapest of all, and its seconds; a measured one counts as a ring.

    Raises:
        ValueError: the ranks cannot use the algorithm.
    """
    if algorithm == CHEAPEST:
        found = step_terms(fabric.cluster, step, fabric.ranks, fabric.concurrent)
        name = found.algorithm(payload_bytes)
        return ("ring" if name == "measured" else name), float(found.seconds(payload_bytes))
    terms = affine(fabric, step, algorithm)
    if terms is None:
        raise ValueError(f"{algorithm} cannot serve this group")
    used = algorithm if len(fabric.ranks) > 1 else "direct"
    return used, terms[0] + terms[1] / efficiency * payload_bytes


def _single_level(fabric: Fabric) -> bool:
    return sum(len(np.unique(row)) > 1 for row in fabric.rank_ports) <= 1


def ring_flows(fabric: Fabric, group: np.ndarray) -> Traffic:
    """An all-reduce of one byte around a ring of ranks (by position, in order): everyone sends to the next."""
    return rank_traffic(fabric, group, np.roll(group, -1), moved_bytes(Collective.ALL_REDUCE, 1.0, len(group)))


def tree_flows(fabric: Fabric, group: np.ndarray) -> Traffic:
    """An all-reduce of one byte over two trees of half a byte, in which an inner node of one is a leaf of the other.

    On each level the children of one parent are joined by binary trees, their first (or last) ranks standing for them.
    Source: Sanders, Speck and Traeff, Parallel Computing 2009.
    """
    sources: list[int] = []
    targets: list[int] = []
    for side in (0, -1):
        members = {rank: rank for rank in group.tolist()}
        for level in range(fabric.top + 1):
            groups: dict[int, list[int]] = {}
            size = fabric.child_size(level + 1)
            for leader in members.values():
                groups.setdefault(fabric.ranks[leader] // size, []).append(leader)
            for leaders in groups.values():
                order = leaders if side == 0 else leaders[::-1]
                sources += order[1:]
                targets += [order[(i - 1) // 2] for i in range(1, len(order))]
            members = {parent: leaders[side] for parent, leaders in groups.items()}
    up, down = np.asarray(sources, dtype=np.int64), np.asarray(targets, dtype=np.int64)
    return rank_traffic(fabric, np.concatenate([up, down]), np.concatenate([down, up]), 0.5)


def hierarchical_flows(fabric: Fabric, group: np.ndarray) -> Traffic:
    """An all-reduce of one byte level by level: rings inside, then rings of the ranks with the same shard across."""
    sources: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    ranks = np.asarray(fabric.ranks)
    for level in range(fabric.top + 1):
        size, above = fabric.child_size(level), fabric.child_size(level + 1)
        child = ranks[group] // size
        children = [group[child == c] for c in np.unique(child)]
        parents: dict[int, list[np.ndarray]] = {}
        for members in children:
            parents.setdefault(int(ranks[members[0]] // above), []).append(members)
        for siblings in parents.values():
            if len(siblings) == 1:
                continue
            table = np.stack(siblings)  # [children, ranks of a child]: columns hold the same shard
            sources.append(table.reshape(-1))
            targets.append(np.roll(table, -1, axis=0).reshape(-1))
            share = moved_bytes(Collective.ALL_REDUCE, 1.0, len(siblings)) / table.shape[1]
            counts.append(np.full(table.size, share))
    if not sources:
        return nothing(fabric)
    return rank_traffic(fabric, np.concatenate(sources), np.concatenate(targets), np.concatenate(counts))


FLOWS: dict[str, Callable[[Fabric, np.ndarray], Traffic]] = {
    "ring": ring_flows,
    "tree": tree_flows,
    "hierarchical": hierarchical_flows,
}


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
        for group in groups:
            traffic = traffic + FLOWS[algorithm](fabric, group)
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

"""All-reduce on the actual topology: seconds from the hardware's own models, bytes by counting every flow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from planner.hardware import ALGORITHMS, Cluster, Collective, collective_terms
from planner.sync._defaults import dense_note
from planner.sync.buckets import Bucket, pack
from planner.sync.fabric import Fabric
from planner.sync.messages import Message, Phase
from planner.sync.traffic import Traffic, nothing, rank_traffic
from planner.sync.types import Draft, Step

CHEAPEST = ""


def unmeasured(cluster: Cluster) -> Cluster:
    """The cluster without its measured collectives, which say nothing of algorithms that were not measured."""
    return dataclasses.replace(cluster, levels=tuple(dataclasses.replace(v, fits=()) for v in cluster.levels))


def affine(fabric: Fabric, kind: Collective, algorithm: str, ranks: tuple[int, ...] = ()) -> tuple[float, float] | None:
    """Start-up seconds and seconds a byte of one algorithm, None where the group cannot use it.

    A measured collective stands for the ring, which is what libraries run at large sizes; on a single level the
    hierarchical algorithm is the ring.
    """
    cluster, group = fabric.cluster, ranks or fabric.ranks
    if algorithm == "tree":
        cluster = unmeasured(cluster)
    terms = collective_terms(cluster, kind, group, fabric.concurrent)
    names = {"ring": ("measured", "ring", "direct"), "hierarchical": ("hierarchical", "measured", "direct")}
    wanted = names.get(algorithm, (algorithm, "direct"))
    if algorithm == "hierarchical" and _single_level(fabric):
        wanted = ("measured", "ring", "direct")
    for name in wanted:
        column = ALGORITHMS.index(name)
        if np.isfinite(terms.latency_s[column]):
            return float(terms.latency_s[column]), float(terms.s_per_byte[column])
    return None


def cheapest(fabric: Fabric, kind: Collective, payload_bytes: float, ranks: tuple[int, ...] = ()) -> tuple[str, float]:
    """The cheapest algorithm and its seconds; a measured one counts as a ring."""
    terms = collective_terms(fabric.cluster, kind, ranks or fabric.ranks, fabric.concurrent)
    name = terms.algorithm(payload_bytes)
    return ("ring" if name == "measured" else name), float(terms.seconds(payload_bytes))


def _single_level(fabric: Fabric) -> bool:
    return sum(len(np.unique(row)) > 1 for row in fabric.rank_ports) <= 1


def ring_flows(fabric: Fabric) -> Traffic:
    """An all-reduce of one byte around a ring of the ranks in order: everyone sends 2(n-1)/n to the next."""
    count = len(fabric.ranks)
    if count == 1:
        return nothing(fabric)
    source = np.arange(count)
    return rank_traffic(fabric, source, (source + 1) % count, 2 * (count - 1) / count)


def tree_flows(fabric: Fabric) -> Traffic:
    """An all-reduce of one byte over two trees of half a byte, in which an inner node of one is a leaf of the other.

    On each level the children of one parent are joined by binary trees, their first (or last) ranks standing for them.
    Source: Sanders, Speck and Traeff, Parallel Computing 2009.
    """
    sources: list[int] = []
    targets: list[int] = []
    for side in (0, -1):
        members = {rank: rank for rank in range(len(fabric.ranks))}
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


def hierarchical_flows(fabric: Fabric) -> Traffic:
    """An all-reduce of one byte level by level: rings inside, then rings of the ranks with the same shard across."""
    sources: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    ranks = np.asarray(fabric.ranks)
    for level in range(fabric.top + 1):
        size, above = fabric.child_size(level), fabric.child_size(level + 1)
        children = [np.flatnonzero(ranks // size == c) for c in np.unique(ranks // size)]
        parents: dict[int, list[np.ndarray]] = {}
        for child in children:
            parents.setdefault(int(ranks[child[0]] // above), []).append(child)
        for siblings in parents.values():
            if len(siblings) == 1:
                continue
            table = np.stack(siblings)  # [children, ranks of a child]: columns hold the same shard
            sources.append(table.reshape(-1))
            targets.append(np.roll(table, -1, axis=0).reshape(-1))
            share = 2 * (len(siblings) - 1) / len(siblings) / table.shape[1]
            counts.append(np.full(table.size, share))
    if not sources:
        return nothing(fabric)
    return rank_traffic(fabric, np.concatenate(sources), np.concatenate(targets), np.concatenate(counts))


FLOWS: dict[str, Callable[[Fabric], Traffic]] = {
    "ring": ring_flows,
    "tree": tree_flows,
    "hierarchical": hierarchical_flows,
    "direct": nothing,
}


def draft_all_reduce(
    fabric: Fabric, step: Step, bucket_bytes: float, algorithm: str = CHEAPEST, efficiency: float = 1.0
) -> Draft:
    """Buckets exchanged one after the other by one algorithm, or each by its cheapest."""
    buckets = pack(step, bucket_bytes)
    priced = [_priced(fabric, bucket, algorithm, efficiency) for bucket in buckets]
    traffic = nothing(fabric)
    for name in sorted({name for name, _ in priced}):
        total = sum(b.payload_bytes for b, (used, _) in zip(buckets, priced, strict=True) if used == name)
        traffic = traffic + FLOWS[name](fabric) * total
    messages = tuple(
        Message(b.variables, name, b.payload_bytes, b.ready_s, _phases(fabric, seconds))
        for b, (name, seconds) in zip(buckets, priced, strict=True)
    )
    methods = {v: m.method for m in messages for v in m.variables}
    return Draft(messages, traffic, methods, notes=dense_note(step))


def _phases(fabric: Fabric, seconds: float) -> tuple[Phase, ...]:
    return (Phase(fabric.everything(seconds)),) if seconds > 0 else ()


def _priced(fabric: Fabric, bucket: Bucket, algorithm: str, efficiency: float) -> tuple[str, float]:
    if algorithm == CHEAPEST:
        return cheapest(fabric, Collective.ALL_REDUCE, bucket.payload_bytes)
    terms = affine(fabric, Collective.ALL_REDUCE, algorithm)
    if terms is None:
        raise ValueError(f"{algorithm} cannot serve this group")
    used = algorithm if len(fabric.ranks) > 1 else "direct"
    return used, terms[0] + terms[1] / efficiency * bucket.payload_bytes

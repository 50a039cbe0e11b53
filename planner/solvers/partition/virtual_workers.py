"""HetPipe's virtual workers: which devices belong to which, the cut of each kind, and its devices in order."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from planner.hardware.collectives import send_terms
from planner.hardware.types import Cluster
from planner.solvers.partition import search_partition
from planner.space.cuts import StageTables
from planner.space.partition import hetpipe
from planner.space.types import BlockCosts

TIME_LIMIT_S = 3.0
"""For the cut of one kind of virtual worker."""

PROBE_BYTES = 1e8
"""Size of the transfer whose rate stands for a link."""

Workers = list[list[int]]
"""Ranks of each virtual worker."""

Cut = tuple[tuple[int, ...], list[int]]
"""Boundaries, and the device type of each stage."""


def allocations(cluster: Cluster, devices: int, work_s: Sequence[float]) -> dict[str, Workers]:
    """Ranks of each virtual worker by policy: one node each (NP), the same share of every type (ED), or hybrid (HD).

    Where a node is used in part, virtual workers are equal parts of nodes; where none come out, it is left idle.
    HD joins the fastest type with the slowest, the second fastest with the second slowest, and so on, half of a virtual
    worker from each; a type left in the middle keeps to itself. It stands where virtual workers of a node's size come
    out whole.

    Args:
        cluster: the machine.
        devices: that are used, in line.
        work_s: by device type, forward and backward of the whole model.
    """
    ranks = list(range(devices))
    found: dict[str, Workers] = {}
    size = cluster.node_size or devices
    part = math.gcd(size, devices) if devices > size else devices
    part = part if part > 1 else size
    if part > 1:
        found["NP"] = [ranks[i : i + part] for i in range(0, devices - part + 1, part)]
    by_type: dict[int, list[int]] = {}
    for rank in ranks:
        by_type.setdefault(int(cluster.device_types[rank]), []).append(rank)
    count = math.gcd(*(len(own) for own in by_type.values()))
    if len(by_type) > 1:
        shares = [len(own) // count for own in by_type.values()]
        found["ED"] = [
            [r for own, k in zip(by_type.values(), shares, strict=True) for r in own[v * k : (v + 1) * k]]
            for v in range(count)
        ]
        hybrid = _hybrid(work_s, by_type, size)
        if hybrid is not None and len(by_type) > 2:
            found["HD"] = hybrid
    return found


def _hybrid(work_s: Sequence[float], by_type: dict[int, list[int]], size: int) -> Workers | None:
    """Virtual workers of `size` devices, half of one type and half of its partner; None where they do not come out."""
    fastest_first = sorted(by_type, key=work_s.__getitem__)
    found: Workers = []
    while fastest_first:
        pair = {fastest_first.pop(0), fastest_first.pop() if fastest_first else -1} - {-1}
        part = size // len(pair)
        counts = {len(by_type[t]) for t in pair}
        if part < 1 or size % len(pair) or len(counts) > 1 or (count := counts.pop()) % part:
            return None
        found += [
            [r for t in sorted(pair) for r in by_type[t][v * part : (v + 1) * part]] for v in range(count // part)
        ]
    return found


def kinds(cluster: Cluster, workers: Workers) -> list[Workers]:
    """Virtual workers with the same devices together."""
    found: dict[tuple[int, ...], Workers] = {}
    for ranks in workers:
        found.setdefault(tuple(sorted(cluster.device_types[ranks].tolist())), []).append(ranks)
    return list(found.values())


def own_cut(tables: StageTables, cluster: Cluster, ranks: Sequence[int], concurrent: int) -> Cut | None:
    """A virtual worker's cut by the exact search; None where nothing fits.

    Args:
        tables: of the chain, for a mini-batch.
        cluster: the machine.
        ranks: its devices.
        concurrent: mini-batches in its pipeline.
    """
    costs, chosen = tables.costs, tables.precision
    counts = Counter(int(t) for t in cluster.device_types[list(ranks)])
    types = sorted(counts)
    problem = hetpipe(
        (costs.forward_s + costs.backward_s)[types],
        costs.parameter_elements * chosen.weight_bytes,
        np.diagonal(costs.saved_bytes).copy(),
        costs.boundary_bytes,
        tuple(counts[t] for t in types),
        np.array([float(cluster.devices[t].usable_bytes) for t in types]),
        _speeds(cluster, ranks, types),
        concurrent=concurrent,
        optimizer_per_weight=(chosen.copy_bytes + chosen.held_gradient_bytes + tables.state_bytes)
        / chosen.weight_bytes,
        use_all=len(ranks) <= len(costs.parameter_elements),
    )
    decision = search_partition(problem, time_limit_s=TIME_LIMIT_S).decision
    return None if decision is None else (decision.boundaries, [types[kind] for kind in decision.types])


def _speeds(cluster: Cluster, ranks: Sequence[int], types: Sequence[int]) -> np.ndarray:
    """[t, t] bytes a second between a device of one type and another of the virtual worker."""
    found = np.full((len(types), len(types)), np.inf)
    of_type = cluster.device_types
    for i, a in enumerate(types):
        for j, b in enumerate(types):
            pairs = [(r, s) for r in ranks for s in ranks if r != s and of_type[r] == a and of_type[s] == b]
            if pairs:
                seconds = send_terms(cluster, *np.asarray(pairs).T).seconds(PROBE_BYTES)
                found[i, j] = PROBE_BYTES / float(seconds.max())
    return found


def dealt(costs: BlockCosts, cluster: Cluster, workers: Workers, cut: Cut) -> tuple[int, ...]:
    """Devices of the stages of a cut, one virtual worker after the other: in its order of types, or matched to it."""
    boundaries, types = cut
    found: list[int] = []
    for ranks in workers:
        own = sorted(cluster.device_types[ranks].tolist()) == sorted(types)
        found += _in_order(cluster, ranks, types) if own else _matched(costs, cluster, ranks, boundaries)
    return tuple(found)


def _in_order(cluster: Cluster, ranks: Sequence[int], types: Sequence[int]) -> list[int]:
    """A virtual worker's devices in the order of their types."""
    free = {t: [r for r in ranks if int(cluster.device_types[r]) == t] for t in types}
    return [free[t].pop(0) for t in types]


def _matched(costs: BlockCosts, cluster: Cluster, ranks: Sequence[int], boundaries: Sequence[int]) -> list[int]:
    """A virtual worker's devices for stages that are given: the most work to the fastest device, and so on."""
    work_s = (costs.forward_s + costs.backward_s).sum(axis=1)
    fastest = sorted(ranks, key=lambda r: (float(work_s[cluster.device_types[r]]), r))
    mean = (costs.forward_s + costs.backward_s).mean(axis=0)
    stages = range(len(boundaries) - 1)
    heaviest = sorted(stages, key=lambda s: (-float(mean[boundaries[s] : boundaries[s + 1]].sum()), s))
    places = dict(zip(heaviest, fastest, strict=False))
    return [places[stage] for stage in stages]

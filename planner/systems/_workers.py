"""Virtual workers of a pool: who belongs to which, and each one's cut and order of devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from planner.hardware.collectives import send_terms
from planner.solvers.partition.hetpipe_dp import solve_hetpipe
from planner.space.partition.hetpipe import HetPipeProblem
from planner.systems._bench import Bench
from planner.systems._search import stages_of
from planner.systems.types import Point

TIME_LIMIT_S = 3.0
Workers = list[list[int]]
Cut = tuple[tuple[int, ...], list[int]]
"""Boundaries, and the device type of each stage."""


def allocations(bench: Bench) -> dict[str, Workers]:
    """Ranks of each virtual worker by policy: one node each (NP), the same share of every type (ED), or hybrid (HD).

    Where a node is used in part, virtual workers are equal parts of nodes; where none come out, it is left idle.
    HD joins the fastest type with the slowest, the second fastest with the second slowest, and so on, half of a virtual
    worker from each; a type left in the middle keeps to itself. It stands where virtual workers of a node's size come
    out whole.
    """
    ranks = list(range(bench.devices))
    found: dict[str, Workers] = {}
    size = bench.cluster.node_size or bench.devices
    part = math.gcd(size, bench.devices) if bench.devices > size else bench.devices
    part = part if part > 1 else size
    if part > 1:
        found["NP"] = [ranks[i : i + part] for i in range(0, bench.devices - part + 1, part)]
    by_type: dict[int, list[int]] = {}
    for rank in ranks:
        by_type.setdefault(int(bench.cluster.device_types[rank]), []).append(rank)
    count = math.gcd(*(len(own) for own in by_type.values()))
    if len(by_type) > 1:
        shares = [len(own) // count for own in by_type.values()]
        found["ED"] = [
            [r for own, k in zip(by_type.values(), shares, strict=True) for r in own[v * k : (v + 1) * k]]
            for v in range(count)
        ]
        hybrid = _hybrid(bench, by_type, size)
        if hybrid is not None and len(by_type) > 2:
            found["HD"] = hybrid
    return found


def _hybrid(bench: Bench, by_type: dict[int, list[int]], size: int) -> Workers | None:
    """Virtual workers of `size` devices, half of one type and half of its partner; None where they do not come out."""
    costs = bench.costs(bench.sizes[0])
    fastest_first = sorted(by_type, key=lambda t: float((costs.forward_s + costs.backward_s)[t].sum()))
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


def kinds(bench: Bench, workers: Workers) -> list[Workers]:
    """Virtual workers with the same devices together."""
    found: dict[tuple[int, ...], Workers] = {}
    for ranks in workers:
        found.setdefault(tuple(sorted(bench.cluster.device_types[ranks].tolist())), []).append(ranks)
    return list(found.values())


def own_cut(bench: Bench, ranks: Sequence[int], size: int, concurrent: int) -> Cut | None:
    """A virtual worker's cut by the exact search; None where nothing fits.

    Args:
        bench: model, cluster and job.
        ranks: its devices.
        size: micro-batch size.
        concurrent: mini-batches in its pipeline.
    """
    costs, chosen = bench.costs(size), bench.precision
    counts = Counter(int(t) for t in bench.cluster.device_types[list(ranks)])
    types = sorted(counts)
    more = (chosen.gradient_bytes + bench.state_bytes) / chosen.weight_bytes
    problem = HetPipeProblem(
        (costs.forward_s + costs.backward_s)[types],
        costs.parameter_elements * chosen.weight_bytes,
        np.diagonal(costs.saved_bytes).copy(),
        costs.boundary_bytes,
        tuple(counts[t] for t in types),
        np.array([float(bench.cluster.devices[t].usable_bytes) for t in types]),
        _speeds(bench, ranks, types),
        concurrent=concurrent,
        optimizer_per_weight=more,
        use_all=len(ranks) <= bench.blocks,
    )
    decision = solve_hetpipe(problem, time_limit_s=TIME_LIMIT_S).decision
    return None if decision is None else (decision.boundaries, [types[kind] for kind in decision.types])


def in_order(bench: Bench, ranks: Sequence[int], types: Sequence[int]) -> list[int]:
    """A virtual worker's devices in the order of their types."""
    free = {t: [r for r in ranks if int(bench.cluster.device_types[r]) == t] for t in types}
    return [free[t].pop(0) for t in types]


def matched(bench: Bench, ranks: Sequence[int], boundaries: Sequence[int], size: int) -> list[int]:
    """A virtual worker's devices for stages that are given: the most work to the fastest device, and so on."""
    costs = bench.costs(size)
    work_s = (costs.forward_s + costs.backward_s).sum(axis=1)
    fastest = sorted(ranks, key=lambda r: (float(work_s[bench.cluster.device_types[r]]), r))
    mean = (costs.forward_s + costs.backward_s).mean(axis=0)
    stages = range(len(boundaries) - 1)
    heaviest = sorted(stages, key=lambda s: (-float(mean[boundaries[s] : boundaries[s + 1]].sum()), s))
    places = dict(zip(heaviest, fastest, strict=False))
    return [places[stage] for stage in stages]


def point_of(
    boundaries: Sequence[int], ranks: Sequence[int], copies: int, size: int, concurrent: int, each: int
) -> Point:
    """Virtual workers that are cut alike, the devices of one after those of another."""
    played = concurrent * max(1, math.ceil(2 * (len(boundaries) - 1) / concurrent))
    played = min(each, played) if each % concurrent == 0 else each
    schedule = f"hetpipe:concurrent={concurrent}"
    return Point(stages_of(boundaries), copies, size, each, schedule, ranks=tuple(ranks), played=played)


def _speeds(bench: Bench, ranks: Sequence[int], types: Sequence[int]) -> np.ndarray:
    """[t, t] bytes a second between a device of one type and another of the virtual worker."""
    found = np.full((len(types), len(types)), np.inf)
    probe = 1e8
    for i, a in enumerate(types):
        for j, b in enumerate(types):
            pairs = [
                (r, s) for r in ranks for s in ranks
                if r != s and int(bench.cluster.device_types[r]) == a and int(bench.cluster.device_types[s]) == b
            ]  # fmt: skip
            if pairs:
                source, target = np.asarray(pairs).T
                found[i, j] = probe / float(send_terms(bench.cluster, source, target).seconds(probe).max())
    return found

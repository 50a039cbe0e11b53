"""HetPipe: virtual workers of unlike devices, each a pipeline, with waves of mini-batches pushed to servers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.hardware.collectives import collective_s, send_terms
from planner.hardware.types import Collective
from planner.schedules.hetpipe import global_staleness
from planner.solvers.partition.hetpipe_dp import solve_hetpipe
from planner.space.partition.hetpipe import HetPipeProblem
from planner.systems._bench import Bench
from planner.systems._found import Found, Played
from planner.systems._play import play
from planner.systems._search import found_of, search, stages_of
from planner.systems.types import Point, System

MOST_CONCURRENT = 16
"""Mini-batches in a virtual worker's pipeline at the most, and never more than twice its devices."""

TIME_LIMIT_S = 3.0
Workers = list[list[int]]


def allocations(bench: Bench) -> dict[str, Workers]:
    """Ranks of each virtual worker by policy: one node each (NP), the same share of every type (ED), or hybrid (HD).

    HD joins the fastest type with the slowest, the second fastest with the second slowest, and so on, half of a virtual
    worker from each; a type left in the middle keeps to itself. It stands where virtual workers of a node's size come
    out whole.
    """
    ranks = list(range(bench.devices))
    found: dict[str, Workers] = {}
    size = bench.cluster.node_size or bench.devices
    if bench.devices % size == 0 and size > 1:
        found["NP"] = [ranks[i : i + size] for i in range(0, bench.devices, size)]
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


@search("hetpipe")
def by_virtual_workers(bench: Bench, system: System) -> Found:
    """The allocation, mini-batch and number of concurrent mini-batches with the highest throughput."""
    best: Played | None = None
    chosen, reason = "", "a virtual worker needs two devices, and the batch must divide among virtual workers"
    policies = allocations(bench)
    wanted = system.options.get("policy", "")
    if wanted and wanted not in policies:
        known = ", ".join(policies) or "none"
        return Found(reason=f"allocation policy {wanted} does not come out on this pool (possible: {known})")
    for policy, workers in policies.items():
        if wanted and policy != wanted:
            continue
        for size in bench.sizes:
            for concurrent, each in _waves(bench, workers, size):
                played = _play(bench, system, workers, size, concurrent, each)
                if played is None or not played.feasible:
                    reason = played.reason if played else "no stages fit in a virtual worker with a stashed wave"
                    continue
                if best is None or played.iteration_s < best.iteration_s:
                    best, chosen = played, f"{_counted(len(workers))} ({policy}), Nm {concurrent}"
                break
    if best is None:
        return Found(reason=reason)
    found = found_of(best, tells={"allocation": chosen, "clock_distance": "0"}, notes=(chosen,))
    return replace(found, plan=f"{chosen}, {found.plan}", played=best if best.exchanges else None)


def _counted(workers: int) -> str:
    return f"{workers} virtual workers" if workers > 1 else "1 virtual worker"


def _waves(bench: Bench, workers: Workers, size: int) -> Iterator[tuple[int, int]]:
    """(concurrent mini-batches, mini-batches of an iteration) of a virtual worker, the most concurrent first."""
    each, rest = divmod(bench.job.global_batch, size * len(workers))
    most = min(MOST_CONCURRENT, 2 * len(workers[0]))
    if not rest and each:
        for concurrent in range(min(each, most), 0, -1):
            if each % concurrent == 0:
                yield concurrent, each


def _play(bench: Bench, system: System, workers: Workers, size: int, concurrent: int, each: int) -> Played | None:
    """The slowest kind of virtual worker: all work at its pace, as the clock distance is bounded."""
    kinds: dict[tuple[int, ...], Workers] = {}
    for ranks in workers:
        kinds.setdefault(tuple(sorted(bench.cluster.device_types[ranks].tolist())), []).append(ranks)
    found = []
    for alike in kinds.values():
        point = _point(bench, alike, size, concurrent, each)
        if point is None:
            return None
        found.append(play(bench, point, system.transfers))
    failed = next((p for p in found if not p.feasible), None)
    if failed is not None:
        return failed
    slowest = max(found, key=lambda p: p.iteration_s)
    # Workers that are cut alike keep a stage's servers beside the stage, and its exchange has been played; unlike ones
    # deal their shards evenly over all nodes.
    exchange_s = _exchange_s(bench, workers) * each / concurrent if len(kinds) > 1 else 0.0
    total_s = max(slowest.iteration_s, exchange_s)
    busy = sum((1 - p.bubble) * p.iteration_s * p.devices for p in found)
    payload = float(bench.tables(size).elements[0, -1]) * bench.precision.gradient_bytes
    pushed = 2 * (len(workers) - 1) * payload * each / concurrent
    own = sum(p.sent_bytes for p in found)
    devices = sum(p.devices for p in found)
    return replace(
        slowest,
        iteration_s=total_s,
        bubble=max(0.0, 1 - busy / (devices * total_s)),
        devices=devices,
        exchanges=slowest.exchanges if len(kinds) == 1 else (),
        sent_bytes=own + (pushed if len(kinds) > 1 else 0.0),
        staleness=max(slowest.staleness, global_staleness(concurrent, 0) if len(workers) > 1 else concurrent - 1),
    )


def _exchange_s(bench: Bench, workers: Workers) -> float:
    """Pushing and pulling all weights among as many servers as there are virtual workers: what a ring takes."""
    if len(workers) < 2:
        return 0.0
    payload = float(bench.tables(bench.sizes[0]).elements[0, -1]) * bench.precision.gradient_bytes
    every = sorted(rank for ranks in workers for rank in ranks)
    return collective_s(bench.cluster, Collective.ALL_REDUCE, every, payload)


def _point(bench: Bench, alike: Workers, size: int, concurrent: int, each: int) -> Point | None:
    """Order of the devices of a virtual worker and its cuts, by the exact search."""
    costs, chosen = bench.costs(size), bench.precision
    ranks = alike[0]
    counts = Counter(int(t) for t in bench.cluster.device_types[ranks])
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
    if decision is None:
        return None
    order: list[int] = []
    for own in alike:
        free = {t: [r for r in own if int(bench.cluster.device_types[r]) == t] for t in types}
        order += [free[types[kind]].pop(0) for kind in decision.types]
    schedule = f"hetpipe:concurrent={concurrent}"
    played = concurrent * max(1, math.ceil(2 * len(ranks) / concurrent))
    played = min(each, played) if each % concurrent == 0 else each
    return Point(stages_of(decision.boundaries), len(alike), size, each, schedule, ranks=tuple(order), played=played)


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

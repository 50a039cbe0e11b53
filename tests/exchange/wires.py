"""Exchanges played with real numbers over counted wires: what every rank sends and receives, and that sums are right.

Nothing here knows a formula or reads code of the planner. An element is one byte.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from planner.hardware import Cluster, Curve, Device, Level


class Wires:
    """Counts elements that leave and enter each rank, and each machine when they cross to another."""

    def __init__(self, machine_of: list[int]) -> None:
        self.machine_of = machine_of
        self.rank_out: dict[int, float] = defaultdict(float)
        self.rank_in: dict[int, float] = defaultdict(float)
        self.machine_out: dict[int, float] = defaultdict(float)
        self.machine_in: dict[int, float] = defaultdict(float)

    def send(self, source: int, target: int, data: np.ndarray) -> np.ndarray:
        if source != target:
            here, there = self.machine_of[source], self.machine_of[target]
            if here == there:
                self.rank_out[source] += data.size
                self.rank_in[target] += data.size
            else:
                self.machine_out[here] += data.size
                self.machine_in[there] += data.size
        return data.copy()


def gradients(ranks: int, size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(ranks * 1000 + size)
    return [rng.integers(0, 1000, size) for _ in range(ranks)]


def ring_scatter(wires: Wires, group: list[int], held: dict[int, np.ndarray]) -> dict[int, int]:
    """Leaves rank group[i] with the sum of one chunk; returns which. `held` are equal arrays whose size n divides."""
    n = len(group)
    chunks = {r: np.split(held[r], n) for r in group}
    for step in range(n - 1):
        moved = {i: (i - step) % n for i in range(n)}
        data = {i: wires.send(group[i], group[(i + 1) % n], chunks[group[i]][moved[i]]) for i in range(n)}
        for i in range(n):
            chunks[group[(i + 1) % n]][moved[i]] = chunks[group[(i + 1) % n]][moved[i]] + data[i]
    for r in group:
        held[r] = np.concatenate(chunks[r])
    return {group[i]: (i + 1) % n for i in range(n)}


def ring_gather(wires: Wires, group: list[int], held: dict[int, np.ndarray], own: dict[int, int]) -> None:
    n = len(group)
    chunks = {r: np.split(held[r], n) for r in group}
    for step in range(n - 1):
        moved = {i: (own[group[i]] - step) % n for i in range(n)}
        data = {i: wires.send(group[i], group[(i + 1) % n], chunks[group[i]][moved[i]]) for i in range(n)}
        for i in range(n):
            chunks[group[(i + 1) % n]][moved[i]] = data[i]
    for r in group:
        held[r] = np.concatenate(chunks[r])


def ring_all_reduce(wires: Wires, group: list[int], held: dict[int, np.ndarray]) -> None:
    ring_gather(wires, group, held, ring_scatter(wires, group, held))


def tree_all_reduce(wires: Wires, group: list[int], held: dict[int, np.ndarray]) -> None:
    """Half the payload over a binary tree, the other half over its mirror image."""
    size = held[group[0]].size
    for half, order in ((slice(0, size // 2), group), (slice(size // 2, size), group[::-1])):
        total = {r: held[r][half].copy() for r in order}
        for i in range(len(order) - 1, 0, -1):
            total[order[(i - 1) // 2]] += wires.send(order[i], order[(i - 1) // 2], total[order[i]])
        for i in range(1, len(order)):
            total[order[i]] = wires.send(order[(i - 1) // 2], order[i], total[order[(i - 1) // 2]])
        for r in order:
            held[r][half] = total[r]


def hierarchical_all_reduce(wires: Wires, machines: list[list[int]], held: dict[int, np.ndarray]) -> None:
    own: dict[int, int] = {}
    for machine in machines:
        own.update(ring_scatter(wires, machine, held))
    for column in zip(*machines, strict=True):
        size = held[column[0]].size // len(machines[0])
        at = slice(own[column[0]] * size, (own[column[0]] + 1) * size)
        shard = {r: held[r][at] for r in column}
        ring_all_reduce(wires, list(column), shard)
        for r in column:
            held[r][at] = shard[r]
    for machine in machines:
        ring_gather(wires, machine, held, own)


def by_servers(
    wires: Wires, workers: list[int], holder: np.ndarray, held: dict[int, np.ndarray], server_at: dict[int, int]
) -> None:
    """`holder[e]` is the server of element e; server s is on endpoint `server_at[s]`."""
    results = {}
    for s in np.unique(holder):
        mine = np.flatnonzero(holder == s)
        results[s] = np.sum([wires.send(w, server_at[int(s)], held[w][mine]) for w in workers], axis=0)
    for s, result in results.items():
        mine = np.flatnonzero(holder == s)
        for w in workers:
            held[w][mine] = wires.send(server_at[int(s)], w, result)


def sparse_by_servers(
    wires: Wires, touched: dict[int, np.ndarray], holder: np.ndarray, width: int, server_at: dict[int, int]
) -> None:
    """Machine w pushes and pulls `touched[w]` rows of `width` elements; row r is at server holder[r]."""
    for w, rows in touched.items():
        for s in np.unique(holder):
            part = np.zeros(int(np.sum(holder[rows] == s)) * width)
            wires.send(w, server_at[int(s)], part)
            wires.send(server_at[int(s)], w, part)


def sparse_by_gather(wires: Wires, touched: dict[int, np.ndarray], width: int) -> None:
    """Everyone gets everyone's rows."""
    for source, rows in touched.items():
        for target in touched:
            wires.send(source, target, np.zeros(len(rows) * width))


def cluster_of(
    machines: int,
    ranks: int = 1,
    *,
    port: float = 1.0,
    inside: float = 1.0,
    latency_s: float = 0.0,
    inside_latency_s: float = 0.0,
) -> Cluster:
    """Machines of some ranks each on one flat network; rates in bytes a second, fully achievable."""
    device = Device("d", 10**9, 0, {}, Curve((1.0,), (1.0,)), 1.0, 1.0, Curve((1.0,), (1.0,)), 0.0)
    levels = []
    if ranks > 1:
        levels.append(Level("bus", ranks, inside, inside, inside_latency_s))
    levels.append(Level("net", machines, port, port, latency_s))
    return Cluster("test", "f", (device,), np.zeros(machines * ranks, dtype=np.int64), tuple(levels), ranks)

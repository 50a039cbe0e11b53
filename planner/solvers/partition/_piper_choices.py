"""Choices of the nodes of one stage: useless ones dropped, and the cheapest that fit the memory, exactly."""

from __future__ import annotations

import numpy as np

from planner.hardware.collectives import moved_bytes
from planner.hardware.types import Collective
from planner.memory import room_bytes
from planner.space.partition.piper import PiperProblem


def useful_choices(problem: PiperProblem, tensor: int) -> list[np.ndarray]:
    """For every node, its choices at a tensor degree that no other of them beats in every respect."""
    columns = np.column_stack([
        problem.time_s, problem.weight_bytes, problem.activation_bytes, problem.fixed_bytes,
        problem.input_sync_bytes, problem.output_sync_bytes,
    ])  # fmt: skip
    at_degree = problem.choice_tensor == tensor
    found = []
    for node in range(problem.node_count):
        choices = np.flatnonzero(at_degree & (problem.choice_node == node))
        kept: list[int] = []
        for c in choices.tolist():
            worse = any(
                np.all(columns[o] <= columns[c]) and (o < c or np.any(columns[o] < columns[c]))
                for o in choices.tolist()
                if o != c
            )
            if not worse:
                kept.append(c)
        found.append(np.array(kept, dtype=np.int64))
    return found


def stage_costs(problem: PiperProblem, inside: np.ndarray, choices: np.ndarray, data: int) -> np.ndarray:
    """[choices] seconds each choice adds to its stage's time, extra transfers at the stage's borders included."""
    source, target = problem.edges[:, 0], problem.edges[:, 1]
    entering = inside[target] & ~inside[source]
    leaving = inside[source] & ~inside[target]
    moved = problem.input_sync_bytes[choices] @ entering + problem.output_sync_bytes[choices] @ leaving
    exchange = 2 * moved_bytes(Collective.ALL_REDUCE, 1.0, data) / problem.batch * problem.weight_bytes[choices]
    seconds: np.ndarray = problem.time_s[choices] / data + (2 * moved / data + exchange) / problem.bandwidth_bytes_per_s
    return seconds


def border_seconds(problem: PiperProblem, inside: np.ndarray, data: int) -> float:
    """Seconds a stage's borders cost whatever its nodes choose."""
    crossing = inside[problem.edges[:, 0]] != inside[problem.edges[:, 1]]
    return float(2 * problem.edge_bytes[crossing].sum() / data / problem.bandwidth_bytes_per_s)


def cheapest_choices(
    problem: PiperProblem, useful: list[np.ndarray], inside: np.ndarray, data: int, in_flight: int
) -> tuple[float, np.ndarray] | None:
    """The stage's least time under the memory, and the choice (index) of each of its nodes; None when none fits.

    A multiple-choice knapsack, solved by extending the Pareto front of (memory, time) node by node; partial answers
    that a Lagrangian bound shows to be no better than a known one are dropped.
    """
    nodes = np.flatnonzero(inside)
    costs = [stage_costs(problem, inside, useful[v], data) for v in nodes]
    sizes = [problem.activation_bytes[useful[v]] * in_flight + problem.fixed_bytes[useful[v]] for v in nodes]
    picked = cheapest_fitting(costs, sizes, room_bytes(problem.memory_bytes))
    if picked is None:
        return None
    total = border_seconds(problem, inside, data) + sum(float(c[i]) for c, i in zip(costs, picked, strict=True))
    return total, np.array([useful[v][i] for v, i in zip(nodes, picked, strict=True)], dtype=np.int64)


def cheapest_fitting(costs: list[np.ndarray], sizes: list[np.ndarray], room: float) -> list[int] | None:
    """One entry of each list so that the sizes fit and the costs are least; None when nothing fits.

    Args:
        costs: by item, the cost of each of its entries.
        sizes: by item, the size of each of its entries.
        room: what the sizes may add up to.
    """
    cheap = [int(np.lexsort((s, c))[0]) for c, s in zip(costs, sizes, strict=True)]
    if sum(float(s[i]) for s, i in zip(sizes, cheap, strict=True)) <= room:
        return cheap
    if sum(float(s.min()) for s in sizes) > room:
        return None
    price, known = _dual(costs, sizes, room)
    return _extend(costs, sizes, room, price, known)


def _dual(costs: list[np.ndarray], sizes: list[np.ndarray], room: float) -> tuple[float, float]:
    """The price of memory with the best Lagrangian bound, and the cost of the best fitting answer met on the way."""

    def at(price: float) -> tuple[float, float]:
        picks = [np.lexsort((s, c + price * s))[0] for c, s in zip(costs, sizes, strict=True)]
        size = sum(float(s[i]) for s, i in zip(sizes, picks, strict=True))
        return size, sum(float(c[i]) for c, i in zip(costs, picks, strict=True))

    spread = max(float(c.max() - c.min()) for c in costs)
    step = min((float(np.diff(np.unique(s)).min()) for s in sizes if len(np.unique(s)) > 1), default=1.0)
    low, high = 0.0, max(spread, 1e-300) / step * 2
    known = at(high)[1] if at(high)[0] <= room else float("inf")
    for _ in range(60):
        middle = (low + high) / 2
        size, cost = at(middle)
        if size <= room:
            high, known = middle, min(known, cost)
        else:
            low = middle
    return high, known


def _extend(
    costs: list[np.ndarray], sizes: list[np.ndarray], room: float, price: float, known: float
) -> list[int] | None:
    """Pareto front of (size, cost) over the items, pruned by what the rest takes at the least."""
    least_size = np.append(np.cumsum([s.min() for s in sizes[::-1]])[::-1], 0.0)
    reduced = [float((c + price * s).min()) for c, s in zip(costs, sizes, strict=True)]
    least_rest = np.append(np.cumsum(reduced[::-1])[::-1], 0.0)
    limit = known * (1 + 1e-12) + 1e-300
    size, cost = np.zeros(1), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []
    for i, (c, s) in enumerate(zip(costs, sizes, strict=True)):
        wide_size = (size[:, None] + s).ravel()
        wide_cost = (cost[:, None] + c).ravel()
        possible = (wide_size <= room) & (wide_size + least_size[i + 1] <= room * (1 + 1e-15))
        at = np.flatnonzero(possible & (wide_cost + price * (wide_size - room) + least_rest[i + 1] <= limit))
        at = at[np.lexsort((wide_cost[at], wide_size[at]))]
        below = np.minimum.accumulate(np.concatenate(([np.inf], wide_cost[at])))
        at = at[wide_cost[at] < below[:-1] - 1e-15 * np.abs(wide_cost[at])]
        if not len(at):
            return None
        size, cost = wide_size[at], wide_cost[at]
        steps.append((at // len(c), at % len(c)))
    label = int(np.argmin(cost))
    picked = []
    for parents, entries in reversed(steps):
        picked.append(int(entries[label]))
        label = int(parents[label])
    return picked[::-1]

"""Stages of a graph as pairs of ideals: a stage is what a larger ideal holds beyond a smaller one.

One pass over the ideals: whether a pipeline whose stages all keep a cap needs no more than the devices there are.
With them stand the choices of the nodes of one stage: useless ones dropped, and the cheapest that fit, exactly.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import numpy as np

from planner.graph.ideals import enumerate_ideals, prefix_ideals, topological_lines
from planner.hardware.tiers import moved_bytes
from planner.hardware.types import Collective
from planner.memory import room_bytes
from planner.solvers.partition.types import NEVER, Deadline, OutOfTime
from planner.space.partition import PiperProblem


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


@dataclass(frozen=True)
class Pairs:
    """All stages that some pipeline may have. i ideals, r pairs, n nodes.

    Attributes:
        members: [i, n] 0/1; ideals by size, the empty one first and the whole graph last.
        lower: [r] ideal before the stage, ascending.
        upper: [r] ideal after it.
        complete: whether every ideal of the graph is here.
    """

    members: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    complete: bool


_MOST_IDEALS = 1500
"""All pairs of that many ideals are searched, seconds a pass."""
_MOST_CHOSEN = 700
"""Of more ideals, about that many are chosen."""
_MOST_FOUND = 28_000
"""Of more ideals than this, not even the cheapest are looked for."""
_SHARE = 0.25
"""Of the time is spent on listing ideals at the most."""


def pairs_of(node_count: int, edges: np.ndarray, edge_bytes: np.ndarray, deadline: Deadline = NEVER) -> Pairs:
    """All pairs of ideals; if there are too many ideals, of those with the cheapest borders.

    Too many are also those that cannot be listed before the deadline.

    Args:
        node_count: n.
        edges: [m, 2] source and target.
        edge_bytes: [m] what an edge moves when it crosses a border.
        deadline: when to stop.

    Raises:
        OutOfTime: the deadline passed before any pairs were known.
    """
    arcs = [(u, v) for u, v in edges.tolist()]
    rows, listing = None, deadline.within(deadline.left_s * _SHARE)
    with contextlib.suppress(OutOfTime):
        rows = enumerate_ideals(node_count, arcs, _MOST_FOUND, check=listing.check)
    complete = rows is not None and len(rows) <= _MOST_IDEALS
    if rows is None or not complete:
        chain = prefix_ideals(node_count, topological_lines(node_count, arcs)[1:2])
        rows = chain if rows is None else _cheapest(rows, chain, _members(rows, node_count), edges, edge_bytes)
    deadline.check()
    members = _members(rows, node_count)
    members = members[np.lexsort((*rows.T, members.sum(axis=1)))]
    outside = members @ (1 - members).T  # how many nodes of the row's ideal the column's lacks
    np.fill_diagonal(outside, 1)
    lower, upper = np.nonzero(outside == 0)
    return Pairs(members, lower, upper, complete)


def _members(rows: np.ndarray, node_count: int) -> np.ndarray:
    """[i, n] 0/1 from ideals as bits."""
    octets = np.ascontiguousarray(rows).view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little", count=node_count).astype(np.float32)


def _cheapest(
    rows: np.ndarray, chain: np.ndarray, members: np.ndarray, edges: np.ndarray, edge_bytes: np.ndarray
) -> np.ndarray:
    """The ideals along one topological order, and of each size those with the cheapest borders there is room for."""
    sizes = members.sum(axis=1)
    crossing = (members[:, edges[:, 0]] - members[:, edges[:, 1]]) @ edge_bytes
    order = np.lexsort((*rows.T, crossing, sizes))
    first_of_size = np.searchsorted(sizes[order], sizes[order], side="left")
    room = max((_MOST_CHOSEN - len(chain)) // members.shape[1], 0)
    return np.unique(np.concatenate([chain, rows[order[np.arange(len(order)) - first_of_size < room]]]), axis=0)


@dataclass(frozen=True)
class Options:
    """Stages a pass may use, sorted by the ideal before them: at most `most_after` replicas may follow."""

    lower: np.ndarray
    upper: np.ndarray
    tensor: np.ndarray
    data: np.ndarray
    most_after: np.ndarray
    row: np.ndarray


class _States:
    """Undominated states of one pass, ideal by ideal: replicas, devices, state before, option taken."""

    def __init__(self, ideals: int) -> None:
        self.begin = np.zeros(ideals, dtype=np.int64)
        self.count = np.zeros(ideals, dtype=np.int64)
        self.table = np.zeros((4, 1024), dtype=np.int64)
        self.table[:, 0] = 0, 0, -1, -1  # the whole graph: nothing comes after it
        self.count[-1] = 1
        self.filled = 1

    def add(self, ideal: int, columns: tuple[np.ndarray, ...]) -> None:
        """Keep those states of an ideal that no other one beats in replicas and devices."""
        replicas, devices = columns[0], columns[1]
        order = np.lexsort((devices, replicas))
        devices = devices[order]
        kept = np.ones(len(order), dtype=bool)
        kept[1:] = devices[1:] < np.minimum.accumulate(devices)[:-1]
        order = order[kept]
        end = self.filled + len(order)
        while end > self.table.shape[1]:
            self.table = np.concatenate([self.table, np.zeros_like(self.table)], axis=1)
        for row, column in enumerate(columns):
            self.table[row, self.filled : end] = column[order]
        self.begin[ideal], self.count[ideal] = self.filled, len(order)
        self.filled = end


def run_pass(
    problem: PiperProblem, pairs: Pairs, options: Options, reserve: np.ndarray, deadline: Deadline
) -> tuple[list[tuple[int, int, int, int]] | None, int]:
    """Stages (row, tensor, data, replicas after) of a plan, in order, and how many states there were.

    Args:
        problem: the instance.
        pairs: its ideals.
        options: the stages that keep the cap.
        reserve: [i] devices that the nodes of an ideal take at the least.
        deadline: when to stop.

    Returns:
        None for the stages when there is no plan.

    Raises:
        OutOfTime: the deadline passed.
    """
    ideals = len(pairs.members)
    most_devices = (problem.devices - np.minimum(reserve, problem.devices + 1)).astype(np.int64)
    first = np.searchsorted(options.lower, np.arange(ideals + 1))
    cost = options.data * options.tensor
    states = _States(ideals)
    for ideal in range(ideals - 2, -1, -1):
        deadline.check()
        upper = options.upper[first[ideal] : first[ideal + 1]]
        lengths = states.count[upper]
        total = int(lengths.sum())
        if not total:
            continue
        option = np.repeat(np.arange(first[ideal], first[ideal + 1]), lengths)
        offset = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = np.repeat(states.begin[upper], lengths) + offset
        after = states.table[0, source]
        replicas = after + options.data[option]
        devices = states.table[1, source] + cost[option]
        fits = (after <= options.most_after[option]) & (replicas <= problem.batch) & (devices <= most_devices[ideal])
        if fits.any():
            states.add(ideal, (replicas[fits], devices[fits], source[fits], option[fits]))
    return (_path(states, options) if states.count[0] else None), states.filled


def _path(states: _States, options: Options) -> list[tuple[int, int, int, int]]:
    """The stages that lead to the empty ideal's state with the fewest devices."""
    reached = slice(states.begin[0], states.begin[0] + states.count[0])
    state = int(states.begin[0] + np.argmin(states.table[1, reached]))
    path = []
    while states.table[3, state] >= 0:
        option, state = int(states.table[3, state]), int(states.table[2, state])
        stage = (int(options.row[option]), int(options.tensor[option]), int(options.data[option]))
        path.append((*stage, int(states.table[0, state])))
    return path

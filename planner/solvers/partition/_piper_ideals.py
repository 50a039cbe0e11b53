"""Stages of a graph as pairs of ideals: a stage is what a larger ideal holds beyond a smaller one.

One pass over the ideals: whether a pipeline whose stages all keep a cap needs no more than the devices there are.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass

import numpy as np

from planner.solvers.partition import NEVER, Deadline, OutOfTime
from planner.space.partition.piper import PiperProblem


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
    before = [0] * node_count
    for u, v in edges.tolist():
        before[v] |= 1 << u
    found = None
    with contextlib.suppress(OutOfTime):
        found = _enumerate(before, _MOST_FOUND, deadline.within(deadline.left_s * _SHARE))
    ideals = found
    if ideals is None or len(ideals) > _MOST_IDEALS:
        chain = _prefixes(before, deadline)
        ideals = _cheapest(ideals or chain, chain, edges, edge_bytes, _MOST_CHOSEN)
    members = _members(ideals, node_count)
    deadline.check()
    outside = members @ (1 - members).T  # how many nodes of the row's ideal the column's lacks
    np.fill_diagonal(outside, 1)
    lower, upper = np.nonzero(outside == 0)
    return Pairs(members, lower, upper, found is not None and len(ideals) == len(found))


def _members(ideals: list[int], node_count: int) -> np.ndarray:
    members = np.zeros((len(ideals), node_count), dtype=np.float32)
    for row, mask in enumerate(ideals):
        members[row, [v for v in range(node_count) if mask >> v & 1]] = 1
    return members


def _cheapest(ideals: list[int], chain: list[int], edges: np.ndarray, edge_bytes: np.ndarray, most: int) -> list[int]:
    """The ideals along one topological order, and as many others of each size as there is room for."""
    node_count = len(chain) - 1
    members = _members(ideals, node_count)
    crossing = ((members[:, edges[:, 0]] - members[:, edges[:, 1]]) @ edge_bytes).tolist()
    room = max((most - len(chain)) // node_count, 0)
    kept = set(chain)
    for _, group in itertools.groupby(sorted(zip(ideals, crossing, strict=True), key=_size), key=_size):
        kept.update(mask for mask, _ in sorted(group, key=lambda entry: (entry[1], entry[0]))[:room])
    return sorted(kept, key=lambda mask: (mask.bit_count(), mask))


def _size(entry: tuple[int, float]) -> int:
    return entry[0].bit_count()


def _enumerate(before: list[int], most: int, deadline: Deadline) -> list[int] | None:
    """All ideals as bit masks, by size and then by value; None when there are more than `most`."""
    layer = {0}
    found = [0]
    for _ in before:
        following = set()
        for mask in layer:
            deadline.check()
            for v, needed in enumerate(before):
                if not mask >> v & 1 and needed & ~mask == 0:
                    following.add(mask | 1 << v)
        found += sorted(following)
        if len(found) > most:
            return None
        layer = following
    return found


def _prefixes(before: list[int], deadline: Deadline) -> list[int]:
    """The ideals along the topological order that takes the longest-waiting ready node first."""
    found = [0]
    ready_since: dict[int, int] = {}
    mask = 0
    for step in range(len(before)):
        deadline.check()
        for v, needed in enumerate(before):
            if not mask >> v & 1 and needed & ~mask == 0:
                ready_since.setdefault(v, step)
        node = max(ready_since, key=lambda v: (ready_since[v], -v))  # follow a branch to its end before the next
        del ready_since[node]
        mask |= 1 << node
        found.append(mask)
    return found


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

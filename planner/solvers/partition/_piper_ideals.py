"""Stages of a graph as pairs of ideals: a stage is what a larger ideal holds beyond a smaller one."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass

import numpy as np

from planner.solvers.partition._deadline import NEVER, Deadline, OutOfTime


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

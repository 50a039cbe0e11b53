"""Sets of nodes closed under predecessors (ideals) of a DAG, as bitsets.

An ideal contains with each node all nodes that it depends on, so it can be the first stages of a pipeline. Their number
may be exponential, yet it is small in practice: networks are long and narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np

_WORD = 64


def _neighbours(count: int, arcs: Iterable[tuple[int, int]]) -> tuple[list[list[int]], list[int]]:
    targets: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b in sorted(set(arcs)):
        if a != b:
            targets[a].append(b)
            waiting[b] += 1
    return targets, waiting


def topological_line(count: int, arcs: Iterable[tuple[int, int]]) -> list[int]:
    """A topological order of nodes 0..count-1, breadth first; shorter than `count` if the arcs form a cycle.

    O(count + arcs log arcs).
    """
    targets, waiting = _neighbours(count, arcs)
    line = [i for i in range(count) if waiting[i] == 0]
    for node in line:
        for after in targets[node]:
            waiting[after] -= 1
            if waiting[after] == 0:
                line.append(after)
    return line


def ancestor_bits(count: int, arcs: Iterable[tuple[int, int]]) -> list[int]:
    """For each node the set of nodes with a path to it (itself not), as the bits of an integer.

    Args:
        count: number of nodes.
        arcs: (start, end) pairs without circles; loops of a node to itself are ignored.

    Complexity: O(arcs * count / 64).
    """
    pairs = sorted(set(arcs))
    targets, _ = _neighbours(count, pairs)
    bits = [0] * count
    for node in topological_line(count, pairs):
        reach = bits[node] | 1 << node
        for after in targets[node]:
            bits[after] |= reach
    return bits


def components(count: int, arcs: Iterable[tuple[int, int]]) -> list[int]:
    """The strongly connected component of each node, named by its smallest member; O(count + arcs)."""
    import networkx

    graph = networkx.DiGraph(arcs)
    graph.add_nodes_from(range(count))
    names = [0] * count
    for group in networkx.strongly_connected_components(graph):
        smallest = min(group)
        for member in group:
            names[member] = smallest
    return names


Member = TypeVar("Member", str, tuple[str, int])


def group_leaders(pairs: Iterable[tuple[Member, Member]]) -> dict[Member, Member]:
    """By member, the least member of its connected component; a pair of one member twice adds it alone.

    The smaller of two groups that meet joins the larger: O(pairs log pairs), without the 0.1 s that networkx loads for.
    """
    groups: dict[Member, set[Member]] = {}
    for pair in pairs:
        small, large = sorted((groups.setdefault(member, {member}) for member in pair), key=len)
        if small is not large:
            large |= small
            groups.update(dict.fromkeys(small, large))
    leaders = {id(group): min(group) for group in {id(group): group for group in groups.values()}.values()}
    return {member: leaders[id(group)] for member, group in groups.items()}


def words(count: int) -> int:
    """How many 64-bit words hold a set of `count` members."""
    return max(1, (count + _WORD - 1) // _WORD)


def bit_row(members: Iterable[int], width: int) -> np.ndarray:
    """A set as uint64 words, member i being bit i % 64 of word i // 64."""
    row = [0] * width
    for i in members:
        row[i // _WORD] |= 1 << (i % _WORD)
    return np.array(row, dtype=np.uint64)


def prefix_ideals(count: int, lines: Iterable[Iterable[int]]) -> np.ndarray:
    """All prefixes of some topological lines, each set once, as uint64 words [ideals, words]."""
    width = words(count)
    rows = []
    for line in lines:
        row = np.zeros(width, dtype=np.uint64)
        rows.append(row.copy())
        for node in line:
            row[node // _WORD] |= np.uint64(1 << (node % _WORD))
            rows.append(row.copy())
    return np.unique(np.array(rows, dtype=np.uint64).reshape(-1, width), axis=0)


def enumerate_ideals(
    count: int,
    arcs: Iterable[tuple[int, int]],
    most: int,
    *,
    only: np.ndarray | None = None,
    check: Callable[[], None] = lambda: None,
) -> np.ndarray | None:
    """Every ideal of a DAG, the empty and the full set included.

    Nodes are taken in topological order; each set that already holds a node's predecessors gives one new set with it.

    Args:
        count: number of nodes.
        arcs: (start, end) pairs without circles.
        most: give up when there are more.
        only: bool [count] nodes that the ideals are made of; all by default. No arc may touch the others.
        check: called for every node; it may raise an error of the caller's to end the search.

    Returns:
        uint64 [ideals, words], or None when there are more than `most`. O(ideals * nodes) word operations.
    """
    width = words(count)
    pairs = sorted(set(arcs))
    sources: list[list[int]] = [[] for _ in range(count)]
    for a, b in pairs:
        if a != b:
            sources[b].append(a)
    ideals = np.zeros((256, width), dtype=np.uint64)
    size = 1
    for node in topological_line(count, pairs):
        check()
        if only is not None and not only[node]:
            continue
        need = bit_row(sources[node], width)
        fits = np.ones(size, dtype=bool)
        for w in np.flatnonzero(need):
            fits &= (ideals[:size, w] & need[w]) == need[w]
        rows = np.flatnonzero(fits)
        if size + len(rows) > most:
            return None
        while size + len(rows) > len(ideals):
            ideals = np.concatenate([ideals, np.zeros_like(ideals)])
        ideals[size : size + len(rows)] = ideals[rows]
        ideals[size : size + len(rows), node // _WORD] |= np.uint64(1 << (node % _WORD))
        size += len(rows)
    return ideals[:size].copy()


def topological_lines(count: int, arcs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Several topological orders: breadth first and depth first, each from both ends, and by node number.

    Args:
        count: number of nodes.
        arcs: (start, end) pairs without circles.

    Complexity: O((count + arcs) log count).
    """
    pairs = sorted(set(arcs))
    back = [(b, a) for a, b in pairs]
    return [
        topological_line(count, pairs),
        _deep_line(count, pairs),
        _deep_line(count, back)[::-1],
        numbered_line(count, pairs),
        topological_line(count, back)[::-1],
    ]


def _deep_line(count: int, arcs: Iterable[tuple[int, int]]) -> list[int]:
    targets, waiting = _neighbours(count, arcs)
    ready = [i for i in reversed(range(count)) if waiting[i] == 0]
    line = []
    while ready:
        node = ready.pop()
        line.append(node)
        for after in reversed(targets[node]):
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
    return line


def numbered_line(count: int, arcs: Iterable[Sequence[int]]) -> list[int]:
    """Nodes 0..count-1 with every arc's start before its end, the smallest ready number first; arcs without circles.

    O((count + arcs) log count).
    """
    import networkx

    graph = networkx.DiGraph((a, b) for a, b in arcs if a != b)
    graph.add_nodes_from(range(count))
    return list(networkx.lexicographical_topological_sort(graph))

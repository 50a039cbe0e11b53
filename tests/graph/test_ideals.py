"""Ideals, ancestors, components and orders against definitions and a graph library."""

from __future__ import annotations

import time

import networkx as nx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph import (
    ancestor_bits,
    bit_row,
    components,
    enumerate_ideals,
    prefix_ideals,
    topological_line,
    topological_lines,
    words,
)

Arcs = list[tuple[int, int]]


def members(row: np.ndarray, count: int) -> frozenset[int]:
    return frozenset(i for i in range(count) if int(row[i // 64]) >> (i % 64) & 1)


@st.composite
def dags(draw: st.DrawFn) -> tuple[int, Arcs]:
    count = draw(st.integers(1, 9))
    names = draw(st.permutations(range(count)))
    pairs = [(names[i], names[j]) for i in range(count) for j in range(i + 1, count)]
    return count, draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []


@given(dags())
@settings(deadline=None, max_examples=60)
def test_ideals_are_the_closed_sets(dag: tuple[int, Arcs]) -> None:
    count, arcs = dag
    closed = {
        frozenset(i for i in range(count) if mask >> i & 1)
        for mask in range(1 << count)
        if all(mask >> a & 1 or not mask >> b & 1 for a, b in arcs)
    }
    found = enumerate_ideals(count, arcs, 1 << count)
    assert found is not None
    assert len(found) == len(closed)
    assert {members(row, count) for row in found} == closed
    assert enumerate_ideals(count, arcs, len(closed)) is not None
    assert enumerate_ideals(count, arcs, len(closed) - 1) is None


@given(dags())
@settings(deadline=None, max_examples=60)
def test_ancestors_and_lines(dag: tuple[int, Arcs]) -> None:
    count, arcs = dag
    graph = nx.DiGraph(arcs)
    graph.add_nodes_from(range(count))
    bits = ancestor_bits(count, arcs)
    for node in range(count):
        assert {i for i in range(count) if bits[node] >> i & 1} == nx.ancestors(graph, node)
    for line in topological_lines(count, arcs):
        assert sorted(line) == list(range(count))
        place = {node: at for at, node in enumerate(line)}
        assert all(place[a] < place[b] for a, b in arcs)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=25))
@settings(deadline=None, max_examples=80)
def test_components(arcs: Arcs) -> None:
    reach = np.eye(9, dtype=bool)
    for a, b in arcs:
        reach[a, b] = True
    for _ in range(4):  # paths of up to 16 arcs
        reach = reach @ reach
    assert components(9, arcs) == (reach & reach.T).argmax(axis=1).tolist()


def test_ideals_of_a_chain_across_words() -> None:
    count = 130
    found = enumerate_ideals(count, [(i, i + 1) for i in range(count - 1)], 1000)
    assert found is not None
    assert found.shape == (131, 3)
    assert {len(members(row, count)) for row in found} == set(range(131))


def test_ideals_of_some_nodes_only() -> None:
    found = enumerate_ideals(4, [(0, 2)], 100, only=np.array([True, False, True, True]))
    assert found is not None
    sets = {members(row, 4) for row in found}
    assert sets == {frozenset(s) for s in ((), (0,), (0, 2), (3,), (0, 3), (0, 2, 3))}


def test_prefixes() -> None:
    rows = prefix_ideals(3, [[0, 1, 2], [1, 0, 2]])
    assert {members(row, 3) for row in rows} == {frozenset(s) for s in ((), (0,), (1,), (0, 1), (0, 1, 2))}
    assert len(rows) == 5


def test_circles_leave_the_line_short() -> None:
    assert topological_line(3, [(0, 1), (1, 2), (2, 1)]) == [0]


def test_bit_rows() -> None:
    assert words(64) == 1
    assert words(65) == 2
    assert bit_row([0, 65], 2).tolist() == [1, 2]


def test_components_of_long_lines_and_circles_in_linear_time() -> None:
    count = 20_000
    line = [(i, i + 1) for i in range(count - 1)]
    begun = time.process_time()
    assert components(count, line) == list(range(count))
    assert components(count, [*line, (count - 1, 0)]) == [0] * count
    assert time.process_time() - begun < 2.0

"""Find nodes that no gradient flows through, and a topological order in which few bytes are alive at each point."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.graph.types import Graph, TensorKind


def side_nodes(graph: Graph) -> np.ndarray:
    """Nodes that depend on no parameter: masks, rotary tables, position ids.

    They carry no gradient and can be computed again wherever their results are needed, so they need never cross a cut.
    All false when no node depends on a parameter.

    Returns:
        bool array of shape [nodes]. O(nodes + tensor reads).
    """
    trained = np.zeros(len(graph.nodes), dtype=bool)
    for i, node in enumerate(graph.nodes):
        for name in node.inputs:
            if not name:
                continue
            at = graph.producer.get(name)
            if at is None:
                trained[i] |= graph.tensors[name].kind is TensorKind.PARAMETER
            else:
                trained[i] |= trained[at]
    return ~trained if trained.any() else trained


def depth_first_order(graph: Graph, members: Sequence[int]) -> list[int]:
    """A topological order of some nodes in which each comes as late as its first reader allows.

    Post-order of a depth-first walk from the last nodes back to their inputs, inputs visited in the
    order they are read. `members` must be topologically sorted. O(nodes + tensor reads), no recursion.
    """
    inside = set(members)
    done: set[int] = set()
    order: list[int] = []
    reads = {i: _producers(graph, i, inside) for i in members}
    has_reader = {p for i in members for p in reads[i]}
    for root in (i for i in members if i not in has_reader):
        stack = [(root, 0)]
        while stack:
            node, next_input = stack.pop()
            if node in done:
                continue
            if next_input < len(reads[node]):
                stack.append((node, next_input + 1))
                if reads[node][next_input] not in done:
                    stack.append((reads[node][next_input], 0))
            else:
                done.add(node)
                order.append(node)
    return order


def _producers(graph: Graph, node: int, inside: set[int]) -> list[int]:
    producers: dict[int, None] = {}
    for name in graph.nodes[node].inputs:
        at = graph.producer.get(name, -1)
        if at in inside:
            producers[at] = None
    return list(producers)


def lifetimes(graph: Graph, order: Sequence[int]) -> dict[str, tuple[int, int]]:
    """For each tensor that one node of the order hands to a later one: (producer position, last reader position)."""
    position = {node: at for at, node in enumerate(order)}
    spans: dict[str, tuple[int, int]] = {}
    for at, node in enumerate(order):
        for name in graph.nodes[node].outputs:
            readers = [position[r] for r in graph.consumers.get(name, ()) if r in position]
            if readers:
                spans[name] = (at, max(readers))
    return spans


def crossing_bytes(graph: Graph, order: Sequence[int]) -> np.ndarray:
    """Bytes of the tensors alive across each place of an order, float64 of shape [len(order) + 1]; the ends are 0."""
    change = np.zeros(len(order) + 2)
    for name, (start, stop) in lifetimes(graph, order).items():
        size = graph.tensors[name].byte_count
        change[start + 1] += size
        change[stop + 1] -= size
    return np.cumsum(change)[:-1]


def linear_order(graph: Graph, members: Sequence[int]) -> list[int]:
    """A topological order of some nodes: the given or a depth-first one, whichever keeps fewer bytes alive."""
    given_order = list(members)
    depth_first = depth_first_order(graph, given_order)
    if depth_first == given_order:
        return given_order
    deep_bytes, given_bytes = crossing_bytes(graph, depth_first).sum(), crossing_bytes(graph, given_order).sum()
    return depth_first if deep_bytes < given_bytes else given_order

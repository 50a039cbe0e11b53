"""Larger operator graphs out of given ones, to see how solvers scale: mirrored, repeated, side by side."""

from __future__ import annotations

from dataclasses import replace

from planner.published.readers.operator_graph import OperatorGraph, OperatorNode


def mirrored(graph: OperatorGraph, *, backward_ratio: float = 2.0, activations: bool = True) -> OperatorGraph:
    """A training graph: each forward node gets a backward node that runs the other way.

    Gradients of a result with several readers are summed by a node of their own, which has no forward twin.

    Args:
        graph: a graph of forward nodes only.
        backward_ratio: time of a backward node as a multiple of its forward node's.
        activations: whether backward nodes read their forward node's inputs again.
    """
    count = len(graph.nodes)
    following = 1 + max((node.id for node in graph.nodes), default=0)
    colour = 1 + max((node.colour for node in graph.nodes if node.colour is not None), default=0)
    forward, backward = [], []
    for i, node in enumerate(graph.nodes):
        twin_colour = node.colour if node.colour is not None else colour + i
        forward.append(replace(node, colour=twin_colour))
        backward.append(
            OperatorNode(
                following + i, f"{node.name}_grad", node.accelerator_ms * backward_ratio, node.cpu_ms * backward_ratio,
                node.size_bytes, node.supported, True, twin_colour,
            )
        )  # fmt: skip
    readers: dict[int, list[int]] = {}
    for source, target in graph.edges:
        readers.setdefault(source, []).append(target)
    edges = list(graph.edges)
    sums: list[OperatorNode] = []
    transfer = list(graph.transfer_ms) + [0.0] * count
    for source, targets in readers.items():
        size = graph.transfer_ms[source]
        for target in targets:
            transfer[count + target] = max(transfer[count + target], size)
            if activations:
                edges.append((source, count + target))
        if len(targets) == 1:
            edges.append((count + targets[0], count + source))
            continue
        place = 2 * count + len(sums)
        sums.append(OperatorNode(following + place, f"sum_{graph.nodes[source].name}", 0.0, 0.0, 0.0, True, True, None))
        edges += [(count + target, place) for target in targets] + [(place, count + source)]
        transfer.append(size)
    return replace(
        graph, name=f"{graph.name}_mirrored", nodes=(*forward, *backward, *sums), edges=tuple(edges),
        transfer_ms=tuple(transfer), fingerprint="", notes=(),
    )  # fmt: skip


def repeated(graph: OperatorGraph, times: int) -> OperatorGraph:
    """Copies of a graph one after the other: what a copy leaves unread feeds the nodes without source of the next.

    Args:
        graph: the graph.
        times: how many copies, 1 or more.
    """
    read = {source for source, _ in graph.edges}
    fed = {target for _, target in graph.edges}
    count = len(graph.nodes)
    sinks = [i for i in range(count) if i not in read]
    sources = [i for i in range(count) if i not in fed]
    return _copies(graph, times, [(a, count + b) for a in sinks for b in sources], "x")


def widened(graph: OperatorGraph, times: int) -> OperatorGraph:
    """Copies of a graph side by side, without edges between them: ideals multiply.

    Args:
        graph: the graph.
        times: how many copies, 1 or more.
    """
    return _copies(graph, times, [], "w")


def _copies(graph: OperatorGraph, times: int, seams: list[tuple[int, int]], mark: str) -> OperatorGraph:
    count = len(graph.nodes)
    step = 1 + max(node.id for node in graph.nodes)
    colours = 1 + max((node.colour for node in graph.nodes if node.colour is not None), default=0)
    nodes, edges, transfer = [], [], list(graph.transfer_ms) * times
    typical = max(graph.transfer_ms, default=0.0)
    for copy in range(times):
        for node in graph.nodes:
            shifted = None if node.colour is None else node.colour + copy * colours
            nodes.append(replace(node, id=node.id + copy * step, name=f"{node.name}_{copy}", colour=shifted))
        edges += [(a + copy * count, b + copy * count) for a, b in graph.edges]
        if copy + 1 < times:
            edges += [(a + copy * count, b + copy * count) for a, b in seams]
            for a, _ in seams:
                transfer[a + copy * count] = transfer[a + copy * count] or typical
    return replace(
        graph, name=f"{graph.name}_{mark}{times}", nodes=tuple(nodes), edges=tuple(edges), transfer_ms=tuple(transfer),
        fingerprint="", notes=(),
    )  # fmt: skip

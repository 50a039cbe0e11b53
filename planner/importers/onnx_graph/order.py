"""Sort the file's nodes, find those that outputs depend on, and bound their number once functions are inlined.

Models that grow beyond bounds once their functions are written out are refused before anything is written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from planner.importers.formats import damaged

if TYPE_CHECKING:
    import onnx

_GRAPH, _GRAPHS = 5, 10


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Bodies that a node carries as attributes."""
    graphs: list[onnx.GraphProto] = []
    for attribute in node.attribute:
        if attribute.type == _GRAPH:
            graphs.append(attribute.g)
        elif attribute.type == _GRAPHS:
            graphs.extend(attribute.graphs)
    return graphs


def reads(node: onnx.NodeProto) -> list[str]:
    """Names that a node reads, in its bodies too; names that a body defines itself may be among them."""
    names = [name for name in node.input if name]
    for graph in subgraphs(node) if node.attribute else ():
        for inner in graph.node:
            names.extend(reads(inner))
        names.extend(value.name for value in graph.output)
    return names


def in_order(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Sort nodes topologically, keeping the given order where it is one already. Linear.

    Raises:
        ModelError: they depend on each other in a circle, or two write one result.
    """
    owner: dict[str, int] = {}
    for i, node in enumerate(nodes):
        for name in node.output:
            if name and name in owner:
                first, second = node_label(nodes[owner[name]]), node_label(node)
                raise damaged(f"{second} writes {name!r}, which {first} writes too")
            owner[name] = i
    owner.pop("", None)
    needs = [[owner[name] for name in reads(node) if name in owner] for node in nodes]
    if all(j < i for i, group in enumerate(needs) for j in group):
        return nodes
    import networkx

    graph = networkx.DiGraph()
    graph.add_nodes_from(range(len(nodes)))
    graph.add_edges_from((i, j) for i, group in enumerate(needs) for j in group)
    if not networkx.is_directed_acyclic_graph(graph):
        through = node_label(nodes[networkx.find_cycle(graph)[-1][1]])
        raise damaged(f"the graph has a cycle through {through}")
    return [nodes[i] for i in networkx.dfs_postorder_nodes(graph)]


def live_nodes(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """The nodes that an output depends on; `nodes` must be in topological order."""
    wanted = set(outputs)
    live = []
    for node in reversed(nodes):
        if any(name in wanted for name in node.output):
            live.append(node)
            wanted.update(reads(node))
    return live[::-1]


def node_label(node: onnx.NodeProto) -> str:
    """What errors call a node: its operator, and its name or that of its first result."""
    return f"{node.op_type} {node.name or next(iter(node.output), '')!r}"


MOST_NODES = 1 << 20
"""Largest number of operators of a model, all functions inlined."""
MOST_NESTED = 64
"""Largest depth of nested function calls."""

_Key = tuple[str, str, str]


def require_bounded(model: onnx.ModelProto) -> None:
    """Refuse a model whose functions call themselves, or grow beyond `MOST_NODES` operators. Linear in the file.

    Raises:
        ModelError: names the function, used or not, and the node that calls it.
    """
    functions = {(f.domain, f.name, f.overload): f for f in model.functions}
    known: dict[_Key, int] = {}
    calling: list[_Key] = []

    def written_out(nodes: Iterable[onnx.NodeProto]) -> int:
        count = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            count += body_of(key, node_label(node)) if key in functions else 1
            count += sum(written_out(graph.node) for graph in subgraphs(node))
        return count

    def body_of(key: _Key, caller: str) -> int:
        if key in calling or len(calling) >= MOST_NESTED:
            why = "calls itself" if key in calling else f"is called more than {MOST_NESTED} calls deep"
            raise damaged(f"the function {key[1]!r} {why}, at {caller}")
        if key not in known:
            calling.append(key)
            known[key] = written_out(functions[key].node)
            calling.pop()
        return known[key]

    for key in functions:
        body_of(key, "its definition")
    count = written_out(model.graph.node)
    if count > MOST_NODES:
        raise damaged(f"with its functions written out the model has {count:,} operators, over {MOST_NODES:,}")

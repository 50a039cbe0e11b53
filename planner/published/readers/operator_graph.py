"""Operator graphs (JSON): nodes timed on an accelerator and on a CPU, edges with the time of moving a result.

    {"maxSizePerFPGA": bytes, "maxFPGAs": 6, "maxCPUs": 1,
     "nodes": [{"id": 1, "supportedOnFpga": 1, "cpuLatency": ms, "fpgaLatency": ms, "isBackwardNode": 0,
                "colorClass": 1, "size": bytes, "name": "..."}, ...],
     "edges": [{"sourceId": 1, "destId": 2, "cost": ms}, ...]}

"FPGA" means any accelerator. `cost` is the time to move the source's result between an accelerator and host memory,
so all edges of one source must agree on it. Nodes of one colour class belong on one device; a training graph gives a
backward node the class of its forward node. Flags are written as 0/1 or as false/true, and `colorClass` may be absent
or null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le, MultipleOf

from planner.errors import ModelError
from planner.graph import Note, NoteLevel, topological_line
from planner.importers.formats import Findings, some
from planner.published.readers.documents import MOST_INSTANCE_DEVICES, Figure, decoded, keyed, read_document

_COST_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """One operator.

    Attributes:
        id: the file's number of it.
        name: the file's name of it, `node<id>` when it has none.
        accelerator_ms: time on an accelerator; 0 where it is not supported there and the file says nothing.
        cpu_ms: time on a CPU.
        size_bytes: memory it takes on an accelerator.
        supported: whether an accelerator can run it.
        backward: whether it belongs to the backward pass.
        colour: its class, None for a node on its own.
    """

    id: int
    name: str
    accelerator_ms: float
    cpu_ms: float
    size_bytes: float
    supported: bool
    backward: bool
    colour: int | None


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """An operator graph as its file says it.

    Attributes:
        name: the file's name without its suffix.
        fingerprint: sha256 of the file (hex).
        nodes: in the file's order.
        edges: (source, target) as positions in `nodes`, each pair once, in the file's order; they form no cycle.
        transfer_ms: by node, time to move its result between an accelerator and host memory; 0 when nobody reads it.
        accelerators: how many accelerators the file allows.
        cpus: how many CPUs it allows.
        memory_bytes: memory of one accelerator.
        notes: what was left out or assumed.
    """

    name: str
    fingerprint: str
    nodes: tuple[OperatorNode, ...]
    edges: tuple[tuple[int, int], ...]
    transfer_ms: tuple[float, ...]
    accelerators: int
    cpus: int
    memory_bytes: float
    notes: tuple[Note, ...] = ()


def is_operator_graph(head: bytes) -> bool:
    """Whether a file starts like an operator graph."""
    text = head.lstrip()
    return text.startswith(b"{") and any(key in text for key in (b'"maxFPGAs"', b'"maxSizePerFPGA"', b'"fpgaLatency"'))


_Flag = Literal[0, 1, False, True]
_Count = Annotated[float, Ge(0), Le(MOST_INSTANCE_DEVICES), MultipleOf(1)]


@dataclass(frozen=True, slots=True)
class _Node:
    __pydantic_config__: ClassVar[Any] = keyed(
        supported="supportedOnFpga", accelerator_ms="fpgaLatency", cpu_ms="cpuLatency", backward="isBackwardNode",
        colour="colorClass",
    )  # fmt: skip

    id: int
    supported: _Flag
    cpu_ms: Figure
    size: Figure
    accelerator_ms: Figure | None = None
    backward: _Flag = 0
    colour: int | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Edge:
    __pydantic_config__: ClassVar[Any] = keyed(source="sourceId", target="destId")

    source: int
    target: int
    cost: Figure


@dataclass(frozen=True, slots=True)
class _Document:
    __pydantic_config__: ClassVar[Any] = keyed(accelerators="maxFPGAs", cpus="maxCPUs", memory_bytes="maxSizePerFPGA")

    accelerators: _Count
    cpus: _Count
    memory_bytes: Figure
    nodes: tuple[_Node, ...]
    edges: tuple[_Edge, ...]


def load_operator_graph(path: str | Path) -> OperatorGraph:
    """Read an operator graph.

    Args:
        path: the JSON file.

    Raises:
        ModelError: the file is missing or no JSON object; a field is absent, of the wrong kind or out of range; an id
            occurs twice, an edge names an unknown node or the edges of a source disagree on its cost; there is a cycle.
            All findings of one kind are reported together, each with its field path.
    """
    document, fingerprint = read_document(Path(path))
    return operator_graph_from(document, Path(path).stem, fingerprint, where=str(path))


def operator_graph_from(document: object, name: str, fingerprint: str = "", *, where: str = "") -> OperatorGraph:
    """Build an operator graph from the decoded JSON document; see `load_operator_graph`.

    Args:
        document: what the JSON says.
        name: a short name for people.
        fingerprint: sha256 of the file.
        where: the file, for messages.
    """
    findings = Findings(where)
    read = decoded(findings, document, _Document)
    nodes = [_node(findings, node, f"nodes[{i}]") for i, node in enumerate(read.nodes)]
    index: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if index.setdefault(node.id, i) != i:
            findings.wrong(f"nodes[{i}].id", f"id {node.id} is taken by nodes[{index[node.id]}]", "give each its own")
    edges, transfers = _edges(findings, read.edges, index)
    findings.stop()
    _refuse_cycle(nodes, edges, where)
    _note_training(findings, nodes)
    accelerators, cpus = int(read.accelerators), int(read.cpus)
    if accelerators + cpus == 0:
        raise ModelError("maxFPGAs and maxCPUs are both 0", where=where, hint="give at least one device")
    notes = tuple(findings.notes)
    return OperatorGraph(
        name, fingerprint, tuple(nodes), tuple(edges), transfers, accelerators, cpus, read.memory_bytes, notes
    )


def _node(findings: Findings, node: _Node, path: str) -> OperatorNode:
    if node.supported and node.accelerator_ms is None:
        findings.wrong(f"{path}.fpgaLatency", "is missing", "say it for every node that an accelerator supports")
    name, time_ms = node.name or f"node{node.id}", node.accelerator_ms or 0.0
    supported, backward = bool(node.supported), bool(node.backward)
    return OperatorNode(node.id, name, time_ms, node.cpu_ms, node.size, supported, backward, node.colour)


def _edges(
    findings: Findings, items: Iterable[_Edge], index: Mapping[int, int]
) -> tuple[list[tuple[int, int]], tuple[float, ...]]:
    """Edges by positions of nodes, each once and none from a node to itself; and by node, the time of its edges."""
    costs: dict[int, tuple[float, int]] = {}
    edges: dict[tuple[int, int], None] = {}
    loops: list[int] = []
    repeated: list[str] = []
    for i, item in enumerate(items):
        ends = {"sourceId": item.source, "destId": item.target}
        absent = [(key, end) for key, end in ends.items() if end not in index]
        for key, end in absent:
            findings.wrong(f"edges[{i}].{key}", f"no node has id {end}", "name a node of this file")
        if absent:
            continue
        source, target = index[item.source], index[item.target]
        known, at = costs.setdefault(source, (item.cost, i))
        if not math.isclose(known, item.cost, rel_tol=_COST_TOLERANCE):
            findings.wrong(
                f"edges[{i}].cost", f"node {item.source} costs {item.cost:g} ms to move here and {known:g} ms in "
                f"edges[{at}]", "all edges of a source carry the time of moving its one result: make them equal",
            )  # fmt: skip
        if source == target:
            loops.append(item.source)
        elif (source, target) in edges:
            repeated.append(f"{item.source} -> {item.target}")
        else:
            edges[source, target] = None
    if loops:
        message = f"edges of a node to itself are left out: node {some(loops)}"
        findings.note(NoteLevel.WARNING, "self-loop", message)
    if repeated:
        message = f"edges given more than once are counted once: {some(repeated)}"
        findings.note(NoteLevel.INFO, "repeated-edge", message)
    moved = {source for source, _ in edges}
    return list(edges), tuple(costs[i][0] if i in moved else 0.0 for i in index.values())


def _refuse_cycle(nodes: list[OperatorNode], edges: list[tuple[int, int]], where: str) -> None:
    if len(topological_line(len(nodes), edges)) == len(nodes):
        return
    import networkx

    cycle = [nodes[source].id for source, _ in networkx.find_cycle(networkx.DiGraph(edges))]
    raise ModelError(
        f"the edges run in a circle: {' -> '.join(map(str, [*cycle, cycle[0]]))}",
        where=f"{where}: edges" if where else "edges",
        hint="an operator graph has no cycles; unroll loops",
    )


def _note_training(findings: Findings, nodes: list[OperatorNode]) -> None:
    forward = {node.colour for node in nodes if not node.backward and node.colour is not None}
    alone = [node.id for node in nodes if node.backward and node.colour not in forward]
    if alone and len(alone) < sum(node.backward for node in nodes):
        findings.note(
            NoteLevel.INFO, "backward-without-forward",
            f"{len(alone)} backward nodes share a class with no forward node and may go anywhere: {some(alone)}",
        )  # fmt: skip
    elif alone:
        message = "no backward node shares a class with a forward node, so that nothing ties the two passes together"
        findings.note(NoteLevel.WARNING, "passes-untied", message)
    uncoloured = [node.id for node in nodes if node.colour is None]
    if uncoloured:
        message = f"{len(uncoloured)} nodes have no colour class and are placed one by one: {some(uncoloured)}"
        findings.note(NoteLevel.INFO, "no-colour", message)

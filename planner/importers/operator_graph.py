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

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ModelError, Problem
from planner.graph import Note, NoteLevel, topological_line
from planner.importers.formats import MOST_INSTANCE_DEVICES
from planner.json_text import LARGEST_FIGURE, JsonError, is_figure, read_json

_SHOWN = 8
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


def load_operator_graph(path: str | Path) -> OperatorGraph:
    """Read an operator graph.

    Args:
        path: the JSON file.

    Raises:
        ModelError: the file is missing or no JSON object, a field is absent or of the wrong kind or out of range, an id
            occurs twice, an edge names an unknown node, the edges of a source disagree on its cost, or there is a
            cycle. All findings of one kind are reported together, each with its field path.
    """
    file = Path(path)
    try:
        content = file.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"cannot be read: {reason}", where=str(file), hint="check path and permissions") from None
    try:
        document = read_json(content)
    except JsonError as error:
        raise ModelError(str(error), where=str(file), hint="export or copy the graph again") from None
    return operator_graph_from(document, file.stem, hashlib.sha256(content).hexdigest(), where=str(file))


def operator_graph_from(document: object, name: str, fingerprint: str = "", *, where: str = "") -> OperatorGraph:
    """Build an operator graph from the decoded JSON document; see `load_operator_graph`.

    Args:
        document: what the JSON says.
        name: a short name for people.
        fingerprint: sha256 of the file.
        where: the file, for messages.
    """
    if not isinstance(document, dict) or not isinstance(document.get("nodes"), list):
        raise ModelError("no operator graph: a JSON object with a list `nodes` is expected", where=where,
                         hint="see the format in the documentation of operator graphs")  # fmt: skip
    read = _Reader(where)
    accelerators = read.count(document, "maxFPGAs", "")
    cpus = read.count(document, "maxCPUs", "")
    memory = read.number(document, "maxSizePerFPGA", "")
    nodes = [read.node(item, f"nodes[{i}]") for i, item in enumerate(document["nodes"])]
    read.unique(nodes)
    read.stop()
    index = {node.id: i for i, node in enumerate(nodes)}
    edges, transfers = _edges(read, document.get("edges"), nodes, index)
    read.stop()
    _refuse_cycle(nodes, edges, where)
    _note_training(read, nodes)
    if accelerators + cpus == 0:
        raise ModelError("maxFPGAs and maxCPUs are both 0", where=where, hint="give at least one device")
    return OperatorGraph(
        name, fingerprint, tuple(nodes), tuple(edges), transfers, accelerators, cpus, memory, tuple(read.notes)
    )


class _Reader:
    """Reads fields of the document and collects their problems, so that they are raised together."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []
        self.notes: list[Note] = []

    def wrong(self, message: str, path: str, hint: str = "") -> None:
        place = f"{self.where}: {path}" if self.where else path
        self.problems.append(Problem(message, place, hint))

    def stop(self) -> None:
        """Raise all problems collected so far, if there are any."""
        if self.problems:
            first = self.problems[0]
            raise ModelError(first.message, where=first.where, hint=first.hint, problems=self.problems)

    def number(self, item: Mapping[str, Any], key: str, path: str, default: float | None = None) -> float:
        """A number from 0 to `LARGEST_FIGURE`."""
        value = item.get(key, default)
        label = f"{path}.{key}" if path else key
        if value is None:
            self.wrong(f"{_who(item)}`{key}` is missing", label, "every node and edge needs its figures")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            self.wrong(f"{_who(item)}`{key}` is {value!r}, not a number", label)
        elif not is_figure(value):
            limit = f"it must be finite, not negative and at most {LARGEST_FIGURE:g}"
            self.wrong(f"{_who(item)}`{key}` is {value!r}; {limit}", label)
        else:
            return float(value)
        return 0.0

    def count(self, item: Mapping[str, Any], key: str, path: str) -> int:
        value = self.number(item, key, path)
        if value != int(value) or value > MOST_INSTANCE_DEVICES:
            limit = f"a whole number up to {MOST_INSTANCE_DEVICES:,}"
            self.wrong(f"`{key}` is {value!r}, not {limit}", f"{path}.{key}" if path else key)
        return int(value)

    def flag(self, item: Mapping[str, Any], key: str, path: str, default: bool | None = None) -> bool:
        """A flag written as false/true or as 0/1."""
        value = item.get(key, default)
        if value is None:
            self.wrong(f"{_who(item)}`{key}` is missing", f"{path}.{key}", "write 0 or 1, or false or true")
        elif value not in (0, 1):
            self.wrong(f"{_who(item)}`{key}` is {value!r}", f"{path}.{key}", "write 0 or 1, or false or true")
        return bool(value)

    def identity(self, item: Mapping[str, Any], key: str, path: str) -> int:
        value = item.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            self.wrong(f"`{key}` is {value!r}, not an integer", f"{path}.{key}")
            return -1
        return value

    def node(self, item: object, path: str) -> OperatorNode:
        if not isinstance(item, dict):
            self.wrong(f"is {type(item).__name__}, not an object", path)
            return OperatorNode(-1, "", 0.0, 0.0, 0.0, True, False, None)
        number = self.identity(item, "id", path)
        supported = self.flag(item, "supportedOnFpga", path)
        colour = item.get("colorClass")
        if colour is not None:
            colour = self.identity(item, "colorClass", path)
        name = item.get("name")
        return OperatorNode(
            id=number,
            name=name if isinstance(name, str) and name else f"node{number}",
            accelerator_ms=self.number(item, "fpgaLatency", path, None if supported else 0.0),
            cpu_ms=self.number(item, "cpuLatency", path),
            size_bytes=self.number(item, "size", path),
            supported=supported,
            backward=self.flag(item, "isBackwardNode", path, False),
            colour=colour,
        )

    def unique(self, nodes: list[OperatorNode]) -> None:
        seen: dict[int, int] = {}
        for i, node in enumerate(nodes):
            if node.id in seen and node.id != -1:
                self.wrong(f"id {node.id} is taken by nodes[{seen[node.id]}]", f"nodes[{i}].id", "give each its own")
            seen.setdefault(node.id, i)

    def note(self, level: NoteLevel, code: str, message: str) -> None:
        self.notes.append(Note(level, code, message, self.where))


def _who(item: Mapping[str, Any]) -> str:
    if "id" in item:
        return f"node {item['id']}: "
    if "sourceId" in item:
        return f"edge {item['sourceId']} -> {item.get('destId')}: "
    return ""


def _edges(
    read: _Reader, items: object, nodes: list[OperatorNode], index: Mapping[int, int]
) -> tuple[list[tuple[int, int]], tuple[float, ...]]:
    if not isinstance(items, list):
        read.wrong("`edges` is not a list", "edges")
        return [], ()
    costs: dict[int, tuple[float, int]] = {}
    edges: dict[tuple[int, int], None] = {}
    loops: list[int] = []
    repeated: list[str] = []
    for i, item in enumerate(items):
        path = f"edges[{i}]"
        if not isinstance(item, dict):
            read.wrong(f"is {type(item).__name__}, not an object", path)
            continue
        ends = [read.identity(item, key, path) for key in ("sourceId", "destId")]
        cost = read.number(item, "cost", path)
        for key, end in zip(("sourceId", "destId"), ends, strict=True):
            if end not in index and isinstance(item.get(key), int):
                read.wrong(f"no node has id {end}", f"{path}.{key}", "name a node of this file")
        if any(end not in index for end in ends):
            continue
        source, target = (index[end] for end in ends)
        known, at = costs.setdefault(source, (cost, i))
        if not math.isclose(known, cost, rel_tol=_COST_TOLERANCE):
            read.wrong(
                f"node {ends[0]} costs {cost:g} ms to move here and {known:g} ms in edges[{at}]", f"{path}.cost",
                "all edges of a source carry the time of moving its one result: make them equal",
            )  # fmt: skip
        if source == target:
            loops.append(ends[0])
        elif (source, target) in edges:
            repeated.append(f"{ends[0]} -> {ends[1]}")
        else:
            edges[source, target] = None
    if loops:
        read.note(NoteLevel.WARNING, "self-loop", f"edges of a node to itself are left out: node {_some(loops)}")
    if repeated:
        read.note(NoteLevel.INFO, "repeated-edge", f"edges given more than once are counted once: {_some(repeated)}")
    moved = {source for source, _ in edges}
    return list(edges), tuple(costs[i][0] if i in moved else 0.0 for i in range(len(nodes)))


def _some(items: Iterable[object]) -> str:
    shown = list(items)
    return ", ".join(str(item) for item in shown[:_SHOWN]) + (
        f" and {len(shown) - _SHOWN} more" * (len(shown) > _SHOWN)
    )


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


def _note_training(read: _Reader, nodes: list[OperatorNode]) -> None:
    forward = {node.colour for node in nodes if not node.backward and node.colour is not None}
    alone = [node.id for node in nodes if node.backward and node.colour not in forward]
    if alone and len(alone) < sum(node.backward for node in nodes):
        read.note(
            NoteLevel.INFO, "backward-without-forward",
            f"{len(alone)} backward nodes share a class with no forward node and may go anywhere: {_some(alone)}",
        )  # fmt: skip
    elif alone:
        message = "no backward node shares a class with a forward node, so that nothing ties the two passes together"
        read.note(NoteLevel.WARNING, "passes-untied", message)
    uncoloured = [node.id for node in nodes if node.colour is None]
    if uncoloured:
        message = f"{len(uncoloured)} nodes have no colour class and are placed one by one: {_some(uncoloured)}"
        read.note(NoteLevel.INFO, "no-colour", message)

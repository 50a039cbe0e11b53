"""Piper's instances (TMPC JSON): layers with their costs for each tensor degree and choice, and the edges between them.

    {"maxDevices": 8, "maxMemoryPerDevice": 8e10, "bandwidth": 2.5e10, "mbsInBatch": 1920,
     "nodes": [{"id": 0, "name": "layer", "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 0.03,
                "parameterSize": 1.8e8, "memoryUsageA": 6e8, "memoryUsageB": 3.5e8,
                "syncTimeFw": {"7": 0.0}, "syncTimeBw": {"9": 0.0}}]}}],
     "edges": [{"sourceId": 0, "destId": 1, "communicationCost": 3e7}]}

`TMPCs` maps a tensor degree (as text) to the choices a layer has there. `syncTimeFw` and `syncTimeBw` are bytes, not
times: what a layer split over tensor-parallel devices moves besides the edge itself, by the neighbour's id. Published
files key `syncTimeFw` by the layer before and `syncTimeBw` by the layer after; the format's own description has it the
other way round. Files written so are read so, and said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, MinLen, MultipleOf

from planner.files import LARGEST_FIGURE
from planner.graph import Note, NoteLevel, topological_line
from planner.importers.formats import Findings
from planner.published.readers.documents import MOST_INSTANCE_DEVICES, Figure, decoded, keyed, read_document

_SLOW_SAMPLE_S = 1.0
"""A layer that takes longer a sample than this is more likely given in milliseconds."""

_Number = Annotated[int, Ge(0), Le(int(LARGEST_FIGURE))]
"""A node's id or a tensor degree as a key."""

Edge = tuple[int, int, float]
"""Source id, target id and bytes of an edge."""


@dataclass(frozen=True, slots=True)
class PiperChoice:
    """One way to run a layer at some tensor degree.

    Attributes:
        time_s: forward and backward time of one sample (one micro-batch) on one tensor-parallel group.
        weight_bytes: weights of one device, what data-parallel replicas exchange.
        activation_bytes: memory that grows with every sample in flight.
        fixed_bytes: memory that does not.
        input_sync_bytes: extra bytes for an edge that enters from another stage, by the id of its source.
        output_sync_bytes: extra bytes for an edge that leaves to another stage, by the id of its target.
        name: such as "vanilla" or "activation recomp".
    """

    __pydantic_config__: ClassVar[Any] = keyed(
        name="id", time_s="timePerSample", weight_bytes="parameterSize", activation_bytes="memoryUsageA",
        fixed_bytes="memoryUsageB", input_sync_bytes="syncTimeFw", output_sync_bytes="syncTimeBw",
    )  # fmt: skip

    time_s: Figure
    weight_bytes: Figure
    activation_bytes: Figure
    fixed_bytes: Figure
    input_sync_bytes: Mapping[_Number, Figure] = field(default_factory=dict)
    output_sync_bytes: Mapping[_Number, Figure] = field(default_factory=dict)
    name: str = ""


@dataclass(frozen=True, slots=True)
class PiperNode:
    """A layer: its id in the file, its choices by tensor degree, and its name."""

    __pydantic_config__: ClassVar[Any] = keyed(choices="TMPCs")

    id: int
    choices: Annotated[Mapping[Annotated[_Number, Ge(1)], tuple[PiperChoice, ...]], MinLen(1)]
    name: str = ""


@dataclass(frozen=True, slots=True)
class PiperFile:
    """A Piper instance as the file has it.

    Attributes:
        nodes: in the file's order.
        edges: in the file's order.
        devices: devices there are.
        memory_bytes: memory of one device.
        batch: samples (micro-batches) in a batch, over which replicas exchange their gradients once.
        bandwidth_bytes_per_s: from each device to the outside.
        notes: what was assumed.
    """

    nodes: tuple[PiperNode, ...]
    edges: tuple[Edge, ...]
    devices: int
    memory_bytes: float
    batch: int
    bandwidth_bytes_per_s: float
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class _Edge:
    __pydantic_config__: ClassVar[Any] = keyed(source="sourceId", target="destId", moved_bytes="communicationCost")

    source: int
    target: int
    moved_bytes: Figure


@dataclass(frozen=True, slots=True)
class _Document:
    __pydantic_config__: ClassVar[Any] = keyed(
        devices="maxDevices", memory_bytes="maxMemoryPerDevice", batch="mbsInBatch"
    )

    devices: Annotated[float, Ge(1), Le(MOST_INSTANCE_DEVICES), MultipleOf(1)]
    memory_bytes: Figure
    bandwidth: Annotated[float, Gt(0), Le(LARGEST_FIGURE)]
    batch: Annotated[float, Ge(1), Le(LARGEST_FIGURE), MultipleOf(1)]
    nodes: Annotated[tuple[PiperNode, ...], MinLen(1)]
    edges: tuple[_Edge, ...]


def sniff_piper(head: bytes) -> bool:
    """Whether a file starts like a Piper instance."""
    return head.lstrip().startswith(b"{") and (b'"TMPCs"' in head or b'"maxMemoryPerDevice"' in head)


def read_piper(path: str | Path) -> PiperFile:
    """Read a Piper instance.

    Args:
        path: the JSON file.

    Raises:
        ModelError: not JSON; fields that are missing, of the wrong kind or out of range, all of them at once; ids twice
            and edges to a node that is not there or to the node itself, all of them at once; a cycle.
    """
    return piper_from_document(read_document(Path(path))[0], str(path))


def piper_from_document(document: object, where: str = "document") -> PiperFile:
    """Read a Piper instance from what its JSON holds (see `read_piper`)."""
    findings = Findings(where)
    if isinstance(document, dict) and "mbsInBatch" not in document and "maxBatchSize" in document:
        document = {**document, "mbsInBatch": document["maxBatchSize"]}
    read = decoded(findings, document, _Document)
    edges = tuple((edge.source, edge.target, edge.moved_bytes) for edge in read.edges)
    _check_graph(findings, read.nodes, edges)
    nodes = _oriented(findings, [replace(node, choices=_choices(node)) for node in read.nodes], edges)
    _note_times(findings, nodes)
    devices, batch = int(read.devices), int(read.batch)
    return PiperFile(nodes, edges, devices, read.memory_bytes, batch, read.bandwidth, tuple(findings.notes))


def _choices(node: PiperNode) -> Mapping[int, tuple[PiperChoice, ...]]:
    """Choices by degree, ascending; an empty list says the same as an absent degree."""
    return {degree: choices for degree, choices in sorted(node.choices.items()) if choices}


def _check_graph(findings: Findings, nodes: Sequence[PiperNode], edges: Sequence[Edge]) -> None:
    """Refuse ids that two nodes have, nodes without a choice, edges from nowhere or to their source, and cycles.

    Raises:
        ModelError: with all of the first three at once.
    """
    index = {node.id: i for i, node in reversed(list(enumerate(nodes)))}
    for i, node in enumerate(nodes):
        if index[node.id] != i:
            findings.wrong(f"nodes[{i}].id", f"is {node.id}, which another node has")
        if not any(node.choices.values()):
            findings.wrong(f"nodes[{i}].TMPCs", "holds no choice at any tensor degree")
    for i, (source, target, _) in enumerate(edges):
        absent = [end for end in (source, target) if end not in index]
        if absent:
            findings.wrong(f"edges[{i}]", f"names node {absent[0]}, which is not there")
        elif source == target:
            findings.wrong(f"edges[{i}]", f"leads from node {source} to itself")
    findings.stop()
    line = topological_line(len(nodes), [(index[source], index[target]) for source, target, _ in edges])
    if len(line) < len(nodes):
        stuck = min(index.keys() - {nodes[i].id for i in line})
        findings.wrong("edges", f"form a cycle that node {stuck} waits for", "layers must form an acyclic graph")
    findings.stop()


def _oriented(findings: Findings, nodes: Sequence[PiperNode], edges: Sequence[Edge]) -> tuple[PiperNode, ...]:
    """Key sync bytes by source and target as published files do.

    Files that follow the format's description have the two tables swapped.
    """
    before: dict[int, set[int]] = {node.id: set() for node in nodes}
    after: dict[int, set[int]] = {node.id: set() for node in nodes}
    for source, target, _ in edges:
        before[target].add(source)
        after[source].add(target)
    pairs = [(node.id, choice) for node in nodes for options in node.choices.values() for choice in options]
    stray = [n for n, c in pairs if c.input_sync_bytes.keys() - before[n] or c.output_sync_bytes.keys() - after[n]]
    if stray:
        swapped = all(
            c.input_sync_bytes.keys() <= after[n] and c.output_sync_bytes.keys() <= before[n] for n, c in pairs
        )
        if swapped:
            message = "syncTimeFw is keyed by the layers after and syncTimeBw by those before: read so"
            findings.note(NoteLevel.WARNING, "sync-turned", message)
            return tuple(_turn(node) for node in nodes)
        message = "syncs with a node that shares no edge are left out"
        findings.note(NoteLevel.WARNING, "sync-stray", message, f"node {stray[0]}")
    absent = [n for n, c in pairs if before[n] - c.input_sync_bytes.keys() or after[n] - c.output_sync_bytes.keys()]
    if absent:
        message = "edges without syncTimeFw or syncTimeBw count as needing no bytes besides their own"
        findings.note(NoteLevel.INFO, "sync-absent", message, f"node {absent[0]}")
    return tuple(nodes)


def _note_times(findings: Findings, nodes: Sequence[PiperNode]) -> None:
    slowest = max(((c.time_s, n.id) for n in nodes for cs in n.choices.values() for c in cs), default=(0.0, 0))
    if slowest[0] >= _SLOW_SAMPLE_S:
        message = (
            f"a layer takes {slowest[0]:g} a sample: if the file's times are milliseconds, its bandwidth must be "
            "bytes per millisecond too, else transfers count a thousand times too little"
        )
        findings.note(NoteLevel.WARNING, "time-unit", message, f"node {slowest[1]}")


def _turn(node: PiperNode) -> PiperNode:
    choices = {
        degree: tuple(
            replace(c, input_sync_bytes=c.output_sync_bytes, output_sync_bytes=c.input_sync_bytes) for c in choices
        )
        for degree, choices in node.choices.items()
    }
    return replace(node, choices=choices)

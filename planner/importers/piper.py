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

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import ModelError, Problem
from planner.graph import Note, NoteLevel, topological_line
from planner.importers.formats import MOST_INSTANCE_DEVICES
from planner.json_text import LARGEST_FIGURE, MOST_DIGITS, JsonError, is_figure, read_json

_SLOW_SAMPLE_S = 1.0
"""A layer that takes longer a sample than this is more likely given in milliseconds."""


@dataclass(frozen=True, slots=True)
class PiperChoice:
    """One way to run a layer at some tensor degree.

    Attributes:
        name: such as "vanilla" or "activation recomp".
        time_s: forward and backward time of one sample (one micro-batch) on one tensor-parallel group.
        weight_bytes: weights of one device, what data-parallel replicas exchange.
        activation_bytes: memory that grows with every sample in flight.
        fixed_bytes: memory that does not.
        input_sync_bytes: extra bytes for an edge that enters from another stage, by the id of its source.
        output_sync_bytes: extra bytes for an edge that leaves to another stage, by the id of its target.
    """

    name: str
    time_s: float
    weight_bytes: float
    activation_bytes: float
    fixed_bytes: float
    input_sync_bytes: Mapping[int, float]
    output_sync_bytes: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class PiperNode:
    """A layer: its id in the file, its name, and its choices by tensor degree."""

    id: int
    name: str
    choices: Mapping[int, tuple[PiperChoice, ...]]


@dataclass(frozen=True, slots=True)
class PiperFile:
    """A Piper instance as the file has it.

    Attributes:
        nodes: in the file's order.
        edges: (source id, target id, bytes), in the file's order.
        devices: devices there are.
        memory_bytes: memory of one device.
        batch: samples (micro-batches) in a batch, over which replicas exchange their gradients once.
        bandwidth_bytes_per_s: from each device to the outside.
        notes: what was assumed.
    """

    nodes: tuple[PiperNode, ...]
    edges: tuple[tuple[int, int, float], ...]
    devices: int
    memory_bytes: float
    batch: int
    bandwidth_bytes_per_s: float
    notes: tuple[Note, ...] = ()


def sniff_piper(head: bytes) -> bool:
    """Whether a file starts like a Piper instance."""
    return head.lstrip().startswith(b"{") and (b'"TMPCs"' in head or b'"maxMemoryPerDevice"' in head)


def read_piper(path: str | Path) -> PiperFile:
    """Read a Piper instance.

    Args:
        path: the JSON file.

    Raises:
        ModelError: not JSON, or fields that are missing, of the wrong kind or out of range, all of them at once; an
            edge to a node that is not there; a cycle.
    """
    file = Path(path)
    try:
        document = read_json(file.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", where=str(file), hint="check the path") from None
    except JsonError as error:
        raise ModelError(str(error), where=str(file), hint="expected a Piper instance") from None
    return piper_from_document(document, str(file))


def piper_from_document(document: object, where: str = "document") -> PiperFile:
    """Read a Piper instance from what its JSON holds (see `read_piper`)."""
    reader = _Reader(where)
    file = reader.read(document)
    if reader.problems or file is None:
        first = reader.problems[0]
        raise ModelError(first.message, where=first.where, hint=first.hint, problems=reader.problems)
    return file


class _Reader:
    """Reads one document and collects all its problems, so that they are raised together."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []
        self.notes: list[Note] = []

    def read(self, document: object) -> PiperFile | None:
        if not isinstance(document, dict):
            self.complain("", "is not an object", "a Piper instance has maxDevices, bandwidth, nodes, edges, ...")
            return None
        devices = self.whole(document, "maxDevices", "")
        if devices > MOST_INSTANCE_DEVICES:
            self.complain("maxDevices", f"is {devices}", f"at most {MOST_INSTANCE_DEVICES:,}")
        memory = self.number(document, "maxMemoryPerDevice", "")
        bandwidth = self.number(document, "bandwidth", "", positive=True)
        batch_field = "maxBatchSize" if "maxBatchSize" in document and "mbsInBatch" not in document else "mbsInBatch"
        batch = self.whole(document, batch_field, "")
        nodes = tuple(self.nodes(document))
        edges = tuple(self.edges(document, {node.id for node in nodes}))
        if self.problems:
            return None
        self.check_order(nodes, edges)
        nodes = self.orient(nodes, edges)
        self.note_times(nodes)
        return PiperFile(nodes, edges, devices, memory, batch, bandwidth, tuple(self.notes))

    def complain(self, field: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, f"{self.where}: {field}" if field else self.where, hint))

    def number(self, owner: Mapping[str, Any], key: str, at: str, *, positive: bool = False) -> float:
        field = f"{at}.{key}" if at else key
        if key not in owner:
            self.complain(field, "is missing", "every Piper instance has it")
            return math.nan
        value = owner[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.complain(field, f"is {value!r}, not a finite number")
            return math.nan
        if not is_figure(value) or (positive and value == 0):
            limit = "must be above zero" if positive else "must not be negative"
            self.complain(field, f"is {value}", f"{limit}, and at most {LARGEST_FIGURE:g}")
        return float(value)

    def whole(self, owner: Mapping[str, Any], key: str, at: str) -> int:
        before = len(self.problems)
        value = self.number(owner, key, at, positive=True)
        if len(self.problems) == before and value != int(value):
            self.complain(f"{at}.{key}" if at else key, f"is {value}, not a whole number")
        return int(value) if math.isfinite(value) else 0

    def items(self, document: Mapping[str, Any], key: str) -> list[Any]:
        value = document.get(key)
        if not isinstance(value, list):
            self.complain(key, "is missing or not a list")
            return []
        return value

    def nodes(self, document: Mapping[str, Any]) -> Iterator[PiperNode]:
        seen: set[int] = set()
        entries = self.items(document, "nodes")
        if not entries and not self.problems:
            self.complain("nodes", "is empty")
        for position, entry in enumerate(entries):
            at = f"nodes[{position}]"
            number = entry.get("id") if isinstance(entry, dict) else None
            if isinstance(number, bool) or not isinstance(number, int):
                self.complain(at, "has no whole number as its id")
                continue
            if number in seen:
                self.complain(f"{at}.id", f"is {number}, which another node has")
            seen.add(number)
            yield PiperNode(number, str(entry.get("name", "")), self.degrees(entry, at))

    def degrees(self, entry: Mapping[str, Any], at: str) -> dict[int, tuple[PiperChoice, ...]]:
        table = entry.get("TMPCs")
        if not isinstance(table, dict) or not table:
            self.complain(
                f"{at}.TMPCs", "is missing or empty", "a node needs the choices of one tensor degree at least"
            )
            return {}
        choices_by_degree: dict[int, tuple[PiperChoice, ...]] = {}
        for key, choices in table.items():
            field = f"{at}.TMPCs[{key!r}]"
            if not _is_natural(key) or int(key) < 1:
                self.complain(field, "is no tensor degree", "keys are whole numbers from 1, as text")
            elif int(key) in choices_by_degree:
                self.complain(field, "repeats a tensor degree")
            elif not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
                self.complain(field, "is not a list of choices")
            elif choices:  # an empty list says the same as an absent degree
                choices_by_degree[int(key)] = tuple(self.choice(c, f"{field}[{i}]") for i, c in enumerate(choices))
        if not choices_by_degree and not self.problems:
            self.complain(f"{at}.TMPCs", "holds no choice at any tensor degree")
        return dict(sorted(choices_by_degree.items()))

    def choice(self, entry: Mapping[str, Any], at: str) -> PiperChoice:
        return PiperChoice(
            str(entry.get("id", "")),
            self.number(entry, "timePerSample", at),
            self.number(entry, "parameterSize", at),
            self.number(entry, "memoryUsageA", at),
            self.number(entry, "memoryUsageB", at),
            self.sync(entry, "syncTimeFw", at),
            self.sync(entry, "syncTimeBw", at),
        )

    def sync(self, entry: Mapping[str, Any], key: str, at: str) -> dict[int, float]:
        table = entry.get(key, {})
        if not isinstance(table, dict):
            self.complain(f"{at}.{key}", "is not an object of node id to bytes")
            return {}
        sync_bytes = {}
        for neighbour in table:
            if _is_natural(neighbour):
                sync_bytes[int(neighbour)] = self.number(table, neighbour, f"{at}.{key}")
            else:
                self.complain(f"{at}.{key}", f"{neighbour!r} is no node id")
        return sync_bytes

    def edges(self, document: Mapping[str, Any], known: set[int]) -> Iterator[tuple[int, int, float]]:
        for position, entry in enumerate(self.items(document, "edges")):
            at = f"edges[{position}]"
            if not isinstance(entry, dict):
                self.complain(at, "is not an object")
                continue
            ends = [entry.get("sourceId"), entry.get("destId")]
            unknown = [end for end in ends if isinstance(end, bool) or not isinstance(end, int) or end not in known]
            if unknown:
                self.complain(at, f"names node {unknown[0]!r}, which is not there")
            elif ends[0] == ends[1]:
                self.complain(at, f"leads from node {ends[0]} to itself")
            yield (ends[0], ends[1], self.number(entry, "communicationCost", at))  # type: ignore[misc]

    def check_order(self, nodes: tuple[PiperNode, ...], edges: tuple[tuple[int, int, float], ...]) -> None:
        index = {node.id: i for i, node in enumerate(nodes)}
        line = topological_line(len(nodes), [(index[source], index[target]) for source, target, _ in edges])
        if len(line) < len(nodes):
            stuck = min(set(index) - {nodes[i].id for i in line})
            self.complain("edges", f"form a cycle that node {stuck} waits for", "layers must form an acyclic graph")

    def orient(self, nodes: tuple[PiperNode, ...], edges: tuple[tuple[int, int, float], ...]) -> tuple[PiperNode, ...]:
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
                self.notes.append(Note(NoteLevel.WARNING, "sync-turned", message))
                return tuple(_turn(node) for node in nodes)
            message = "syncs with a node that shares no edge are left out"
            self.notes.append(Note(NoteLevel.WARNING, "sync-stray", message, f"node {stray[0]}"))
        absent = [n for n, c in pairs if before[n] - c.input_sync_bytes.keys() or after[n] - c.output_sync_bytes.keys()]
        if absent:
            message = "edges without syncTimeFw or syncTimeBw count as needing no bytes besides their own"
            self.notes.append(Note(NoteLevel.INFO, "sync-absent", message, f"node {absent[0]}"))
        return nodes

    def note_times(self, nodes: tuple[PiperNode, ...]) -> None:
        slowest = max(((c.time_s, n.id) for n in nodes for cs in n.choices.values() for c in cs), default=(0.0, 0))
        if slowest[0] >= _SLOW_SAMPLE_S:
            message = (
                f"a layer takes {slowest[0]:g} a sample: if the file's times are milliseconds, its bandwidth must be "
                "bytes per millisecond too, else transfers count a thousand times too little"
            )
            self.notes.append(Note(NoteLevel.WARNING, "time-unit", message, f"node {slowest[1]}"))


def _is_natural(text: str) -> bool:
    return text.isdecimal() and len(text) < MOST_DIGITS


def _turn(node: PiperNode) -> PiperNode:
    def turned(c: PiperChoice) -> PiperChoice:
        memory = (c.activation_bytes, c.fixed_bytes)
        return PiperChoice(c.name, c.time_s, c.weight_bytes, *memory, c.output_sync_bytes, c.input_sync_bytes)

    return PiperNode(node.id, node.name, {t: tuple(turned(c) for c in cs) for t, cs in node.choices.items()})

"""Prices that came with the graph: costs of its operators in a file, or a profile measured elsewhere.

What `profile --output` measured or priced is a file: JSON with seconds by operator for one batch. Planning reads them
in place of the roofline's; what is kept in memory, FLOPs and bytes are the rules' as ever. Where the file has several
batches, seconds of a micro-batch between them lie on the line from one to the next; beyond them they grow in
proportion. A rank that does a part of an operator takes as long as for that part of the micro-batch's samples. The file
may say what an update of weights takes, too. A profile measured elsewhere is read by an importer.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from planner.costs.types import Profile
from planner.costs.work import tensor_bytes
from planner.errors import ModelError, UsageError
from planner.files import LARGEST_FIGURE, is_figure
from planner.foreign_files import Door
from planner.graph import Graph, Node, Note, NoteLevel
from planner.operators.batching import rebatch
from planner.operators.saved import element_bytes
from planner.operators.types import Origin, SavedBytes

FORMAT = "shardplan-costs/1"
_ATTRIBUTE, _UPDATE = "measured_s", "measured_update_byte_per_s"
GIVEN_SECONDS = frozenset((_ATTRIBUTE, _UPDATE))
"""Attributes of operators whose seconds come from a file of costs."""
OWN_COSTS = "own-costs"
"""Code of the note that seconds of operators come from a file."""
_FIELDS = ("forward_s", "backward_s", "weight_grad_s")


def costs_document(graph: Graph, profile: Profile) -> dict[str, Any]:
    """Seconds of every operator as plain data, for JSON: forward, backward, and the weights' part of the latter."""
    document = {
        "format": FORMAT,
        "model": graph.fingerprint,
        "of": f"{profile.device}, {profile.precision} ({profile.source})",
        **_of_batch(graph, profile),
    }
    if profile.smaller:
        document["smaller"] = [_of_batch(graph, each) for each in profile.smaller]
    if profile.update_byte_per_s:
        document["update_byte_per_s"] = profile.update_byte_per_s
    return document


def _of_batch(graph: Graph, profile: Profile) -> dict[str, Any]:
    """The batch of a profile, and seconds of every operator."""
    columns = (profile.forward_s, profile.backward_s, profile.weight_grad_s)
    rows = zip(graph.nodes, *(column.tolist() for column in columns), strict=True)
    return {"batch": profile.micro_batch, "operators": {node.key: seconds for node, *seconds in rows}}


def with_costs(graph: Graph, text: str | bytes, name: str = "costs") -> Graph:
    """The graph with seconds of its operators from a file; it is another model to a plan than the one without.

    Args:
        graph: the model that the file was made for.
        text: the file's.
        name: what errors call it.

    Raises:
        ModelError: the text is no such file, is for another model, or lacks an operator.
    """
    document = _document(text, name)
    if document["model"] != graph.fingerprint:
        raise ModelError("the costs are of another model", where=name, hint="measure this one: profile --measure -o")
    batches = sorted((*document.get("smaller", ()), document), key=lambda each: int(each["batch"]))
    update, nodes = float(document.get("update_byte_per_s", 0.0)), []
    for node in graph.nodes:
        rows = [each["operators"].get(node.key) for each in batches]
        if not all(map(_is_row, rows)):
            raise ModelError(f"no three times for operator {node.key!r}", where=name, hint="measure the model again")
        times = tuple(float(value) for each, row in zip(batches, rows, strict=True) for value in (each["batch"], *row))
        attributes = {**node.attributes, _ATTRIBUTE: times, _UPDATE: update}
        nodes.append(dataclasses.replace(node, attributes=attributes))
    digest = hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()
    note = Note(NoteLevel.INFO, OWN_COSTS, f"seconds of operators are those of {name}: {document['of']}")
    return dataclasses.replace(
        graph,
        nodes=tuple(nodes),
        fingerprint=hashlib.sha256(f"{graph.fingerprint} {digest}".encode()).hexdigest(),
        report=dataclasses.replace(graph.report, notes=(*graph.report.notes, note)),
    )


def _document(text: str | bytes, name: str) -> Mapping[str, Any]:
    content = Door(name, ModelError, "measure it again: profile --measure -o").json(text)
    kinds: Mapping[str, type] = {"format": str, "model": str, "of": str, "batch": int, "operators": dict}
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ModelError(f"not a file of costs ({FORMAT})", where=name, hint="write one with `profile --measure -o`")
    smaller = content.get("smaller", [])
    sound = {field: isinstance(content.get(field), kind) for field, kind in kinds.items()}
    sound["batch"] = not sound["operators"] or _is_batch(content)
    sound["smaller"] = isinstance(smaller, list) and all(map(_is_batch, smaller))
    sound["update_byte_per_s"] = is_figure(content.get("update_byte_per_s", 0.0))
    if all(sound.values()):
        sound["smaller"] = len({each["batch"] for each in (content, *smaller)}) == 1 + len(smaller)
    for field, well in sound.items():
        if not well:
            raise ModelError(f"{field} is missing or wrong", where=name, hint="measure the model again")
    return content


def _is_batch(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("operators"), dict):
        return False
    batch = entry.get("batch")
    return isinstance(batch, int) and not isinstance(batch, bool) and 1 <= batch <= LARGEST_FIGURE


def _is_row(row: object) -> bool:
    return isinstance(row, list) and len(row) == len(_FIELDS) and all(map(is_figure, row))


def by_own_costs(graph: Graph, profile: Profile) -> Profile:
    """The profile with seconds from a costs file, if the graph has them (`with_costs`)."""
    rows = [node.attributes.get(_ATTRIBUTE) for node in graph.nodes]
    if not rows or any(row is None for row in rows):
        return profile
    table = np.array(rows, dtype=np.float64).reshape(len(rows), -1, 1 + len(_FIELDS))
    measured = _Measured(table[0, :, 0], np.moveaxis(table[:, :, 1:], 0, -1), profile.micro_batch)
    seconds: dict[str, Any] = dict(zip(_FIELDS, measured.of(profile.micro_batch), strict=True))
    update = _number(graph.nodes[0], _UPDATE)
    return dataclasses.replace(
        profile, source="measured", by_share=measured.at, update_byte_per_s=update, smaller=(), **seconds
    )


@dataclasses.dataclass(frozen=True)
class _Measured:
    """Times of all nodes at some batches.

    Attributes:
        batches: float64 [batches], ascending.
        seconds: float64 [batches, fields, nodes].
        micro_batch: samples of the micro-batch of which `at` gives shares.
    """

    batches: np.ndarray
    seconds: np.ndarray
    micro_batch: int

    def of(self, samples: float) -> np.ndarray:
        """Seconds [fields, nodes] of a batch of so many samples, which need not be whole."""
        batches, seconds = self.batches, self.seconds
        if samples >= batches[-1] or len(batches) == 1:
            return np.asarray(seconds[-1] * samples / batches[-1])
        after = max(1, int(np.searchsorted(batches, samples)))
        least, most = batches[after - 1], batches[after]
        slope = (seconds[after] - seconds[after - 1]) / (most - least)
        found = seconds[after - 1] + (samples - least) * slope
        below = samples < least
        return np.clip(found, seconds[0] * samples / least, seconds[0]) if below else np.asarray(found)

    def at(self, share: float, pieces: int) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of a share of the micro-batch: from that share of its times up to all of it."""
        whole, part = self.of(self.micro_batch)[:2], self.of(share * self.micro_batch)[:2]
        forward_s, backward_s = np.clip(part, share * whole, whole)
        return forward_s, backward_s


def is_priced(graph: Graph) -> bool:
    """Whether every node of a graph carries measured seconds of its own."""
    return bool(graph.nodes) and all("forward_s" in n.attributes and "backward_s" in n.attributes for n in graph.nodes)


def imported_profile(graph: Graph, *, micro_batch: int | None = None) -> Profile:
    """The profile that a graph carries.

    Every node keeps its results for backward; in-place operators, views and picked results share their operand's
    storage. Times and sizes grow with the micro-batch in proportion to the batch they were measured at, which the nodes
    say too (`measured_batch`), so that a graph set to another batch keeps its prices a sample.

    Args:
        graph: a graph whose nodes have `forward_s` and `backward_s` among their attributes.
        micro_batch: samples per execution; by default those of the measurement.

    Raises:
        UsageError: the graph carries no prices.
        ModelError: sizes cannot follow another micro-batch.
    """
    if not is_priced(graph):
        raise UsageError("the model carries no measured times", hint="price it with --device or --measure")
    sized = graph if micro_batch is None else rebatch(graph, micro_batch)
    measured = _number(graph.nodes[0], "measured_batch") or float(graph.batch)
    scale = sized.batch / measured
    sizes = element_bytes(sized, 4.0)
    outputs, workspace = tensor_bytes(sized, sizes)
    forward = np.array([_number(node, "forward_s") for node in graph.nodes]) * scale
    backward = np.array([_number(node, "backward_s") for node in graph.nodes]) * scale
    note = Note(
        NoteLevel.INFO,
        "imported-profile",
        f"times were measured in fp32 by the profile's authors on their device, for batches of {measured:g}",
    )
    zeros = np.zeros(len(sized.nodes))
    return Profile(
        device=f"as measured ({graph.report.format})",
        precision="fp32",
        micro_batch=sized.batch,
        source=graph.report.format,
        forward_s=forward,
        backward_s=backward,
        weight_grad_s=np.array([0.5 * b if w else 0.0 for b, w in zip(backward, sized.node_parameters, strict=True)]),
        forward_flops=zeros,
        backward_flops=zeros.copy(),
        moved_bytes=zeros.copy(),
        output_bytes=outputs,
        workspace_bytes=workspace,
        origin=(Origin.RULE,) * len(sized.nodes),
        saved=_saved(sized),
        notes=(note,),
    )


def _number(node: Node, name: str) -> float:
    value = node.attributes.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _saved(graph: Graph) -> tuple[tuple[SavedBytes, ...], ...]:
    roots: dict[str, str] = {}
    kept = []
    for node in graph.nodes:
        shared = bool(node.attributes.get("view")) and bool(node.inputs)
        for output in node.outputs:
            roots[output] = roots.get(node.inputs[0], node.inputs[0]) if shared else output
        names = dict.fromkeys(roots[o] for o in node.outputs)
        owned = (graph.tensors[n] for n in names if n in graph.producer)
        kept.append(tuple(SavedBytes(t.name, t.byte_count) for t in owned if t.byte_count))
    return tuple(kept)

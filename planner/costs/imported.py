"""Prices that came with the graph: costs of its operators in a file, or a profile measured elsewhere.

What `profile --output` measured or priced is a file: JSON with seconds by operator for one batch. Planning reads them
in place of the roofline's; what is kept in memory, FLOPs and bytes are the rules' as ever. Seconds grow with the
micro-batch in proportion to the batch that they are of, and a rank that does a part of an operator takes that part of
its time. A profile measured elsewhere is read by an importer.
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
from planner.graph import Graph, Node, Note, NoteLevel
from planner.json_text import JsonError, is_figure, read_json
from planner.operators.batching import rebatch
from planner.operators.saved import element_bytes
from planner.operators.types import Origin, SavedBytes

FORMAT = "shardplan-costs/1"
_ATTRIBUTE = "measured_s"
_FIELDS = ("forward_s", "backward_s", "weight_grad_s")


def costs_document(graph: Graph, profile: Profile) -> dict[str, Any]:
    """Seconds of every operator as plain data, for JSON: forward, backward, and the weights' part of the latter."""
    columns = (profile.forward_s, profile.backward_s, profile.weight_grad_s)
    rows = zip(graph.nodes, *(column.tolist() for column in columns), strict=True)
    return {
        "format": FORMAT,
        "model": graph.fingerprint,
        "of": f"{profile.device}, {profile.precision} ({profile.source})",
        "batch": profile.micro_batch,
        "operators": {node.key: seconds for node, *seconds in rows},
    }


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
    seconds, batch = document["operators"], float(document["batch"])
    nodes = []
    for node in graph.nodes:
        row = seconds.get(node.key)
        if not _is_row(row):
            raise ModelError(f"no three times for operator {node.key!r}", where=name, hint="measure the model again")
        times = tuple(float(value) / batch for value in row)
        nodes.append(dataclasses.replace(node, attributes={**node.attributes, _ATTRIBUTE: times}))
    digest = hashlib.sha256(text if isinstance(text, bytes) else text.encode()).hexdigest()
    note = Note(NoteLevel.INFO, "own-costs", f"seconds of operators are those of {name}: {document['of']}")
    return dataclasses.replace(
        graph,
        nodes=tuple(nodes),
        fingerprint=hashlib.sha256(f"{graph.fingerprint} {digest}".encode()).hexdigest(),
        report=dataclasses.replace(graph.report, notes=(*graph.report.notes, note)),
    )


def _document(text: str | bytes, name: str) -> Mapping[str, Any]:
    try:
        content = read_json(text)
    except JsonError as error:
        raise ModelError(error.message, where=f"{name}:{error.line}:{error.column}", hint="measure it again") from error
    kinds: Mapping[str, type] = {"format": str, "model": str, "of": str, "batch": int, "operators": dict}
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ModelError(f"not a file of costs ({FORMAT})", where=name, hint="write one with `profile --measure -o`")
    for field, kind in kinds.items():
        if not isinstance(content.get(field), kind) or (field == "batch" and content[field] < 1):
            raise ModelError(f"{field} is missing or wrong", where=name, hint="measure the model again")
    return content


def _is_row(row: object) -> bool:
    return isinstance(row, list) and len(row) == len(_FIELDS) and all(map(is_figure, row))


def by_own_costs(graph: Graph, profile: Profile) -> Profile:
    """The profile with seconds from a costs file, if the graph has them (`with_costs`)."""
    rows = [node.attributes.get(_ATTRIBUTE) for node in graph.nodes]
    if not rows or any(row is None for row in rows):
        return profile
    times = np.array(rows, dtype=np.float64).T * profile.micro_batch
    seconds: dict[str, Any] = dict(zip(_FIELDS, times, strict=True))
    return dataclasses.replace(profile, source="measured", by_share=None, **seconds)


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

"""Costs of operators in a file: what `profile --output` measured or priced, for planning by those figures.

The file is JSON with seconds by operator for one batch. Planning reads them in place of the roofline's; what is kept in
memory, FLOPs and bytes are the rules' as ever. Seconds grow with the micro-batch in proportion to the batch that they
are of, and a rank that does a part of an operator takes that part of its time.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from planner.costs.types import Profile
from planner.errors import ModelError
from planner.graph import Graph, Note, NoteLevel
from planner.json_text import JsonError, is_figure, read_json

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
        found = seconds.get(node.key)
        if not _is_row(found):
            raise ModelError(f"no three times for operator {node.key!r}", where=name, hint="measure the model again")
        times = tuple(float(value) / batch for value in found)
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


def _is_row(found: object) -> bool:
    return isinstance(found, list) and len(found) == len(_FIELDS) and all(map(is_figure, found))


def by_own_costs(graph: Graph, profile: Profile) -> Profile:
    """The profile with the seconds that the graph carries, if it does."""
    rows = [node.attributes.get(_ATTRIBUTE) for node in graph.nodes]
    if not rows or any(row is None for row in rows):
        return profile
    times = np.array(rows, dtype=np.float64).T * profile.micro_batch
    found: dict[str, Any] = dict(zip(_FIELDS, times, strict=True))
    return dataclasses.replace(profile, source="measured", by_share=None, **found)

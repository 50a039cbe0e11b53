"""Hugging Face's `config.json`: sizes of a model, built as the graph that the bundled models of its type have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from planner.bundled import build_configured
from planner.errors import ModelError, UsageError
from planner.foreign_files import Door
from planner.graph import Graph, Note, NoteLevel
from planner.importers.formats import FORMATS, Format
from planner.importers.onnx import graph_from_proto
from planner.registry import did_you_mean

DIMS = ("batch", "seq")


def sniff(head: bytes) -> bool:
    """Whether a file starts like a configuration."""
    return head.lstrip().startswith(b"{") and any(key in head for key in (b'"model_type"', b'"transformers_version"'))


def load(path: Path, dims: Mapping[str, int], as_written: bool) -> Graph:
    """The graph of a configuration, for `batch` samples of `seq` tokens (4096 or what its positions allow).

    Raises:
        ModelError: not a JSON object, no builder for its `model_type`, missing keys, or sizes that make no sense.
        UsageError: a dimension other than these two.
    """
    require_dims("a config.json has", dims)
    door = Door(str(path), ModelError, "name the config.json of a model; if it is damaged, copy it again")
    document = door.json_object(door.content(path), any_number=True)
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    try:
        model, notes = build_configured(document, name=name, batch=dims.get("batch", 1), seq=dims.get("seq"))
    except UsageError as error:
        raise ModelError(error.problem.message, hint=error.problem.hint) from None
    graph = graph_from_proto(model, name=name, as_written=as_written)
    said = tuple(Note(NoteLevel.WARNING, "configuration", note, str(path)) for note in notes)
    return replace(graph, report=replace(graph.report, format="hugging_face", notes=(*said, *graph.report.notes)))


def require_dims(who: str, dims: Mapping[str, int]) -> None:
    """Refuse dimensions that a model which is built does not have.

    Raises:
        UsageError: it names the first.
    """
    for name in dims:
        if name not in DIMS:
            raise UsageError(f"{who} no dimension {name!r}", hint=did_you_mean(name, DIMS))


FORMATS.register("hugging_face", Format("Hugging Face configuration", (".json",), sniff, load))

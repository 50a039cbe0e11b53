"""A configuration as JSON: in full, as a plan file carries it, or by its degrees of parallelism, as people write it.

{"format": "shardplan-configuration", "version": 1, "degrees": {"tensor": 8, "pipeline": 4, "zero": 1}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from planner.errors import PlanError
from planner.graph import Graph, build_chain
from planner.plans import documents, files
from planner.plans.types import FORMAT as PLAN_FORMAT
from planner.plans.types import Plan
from planner.space.configuration import Configuration
from planner.space.named import Degrees, block_number

FORMAT: Literal["shardplan-configuration"] = "shardplan-configuration"
VERSION: Literal[1] = 1
_EDGES = ("start", "stop")


@dataclass(frozen=True)
class ConfigurationFile:
    """A configuration by itself: either in full or by its degrees.

    Attributes:
        format: always "shardplan-configuration".
        version: of this schema.
        configuration: in full; `start` and `stop` of a stage may be names of blocks.
        degrees: in the words of the field; what is left out has its default.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}

    format: Literal["shardplan-configuration"]
    version: Literal[1]
    configuration: Configuration | None = None
    degrees: Degrees | None = None


def configuration_document(configuration: Configuration | Degrees) -> dict[str, Any]:
    """A configuration as plain dicts and lists, fields with their default left out."""
    kind = "degrees" if isinstance(configuration, Degrees) else "configuration"
    return {"format": FORMAT, "version": VERSION, kind: files.plain(configuration)}


def dump_configuration(configuration: Configuration | Degrees) -> str:
    """A configuration as JSON text; the same one gives the same bytes."""
    return documents.pretty(configuration_document(configuration)) + "\n"


def configuration_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the file, descriptions taken from the types' docstrings."""
    schema = documents.described(documents.adapter(ConfigurationFile).json_schema())
    stage = schema["$defs"]["StageChoice"]["properties"]
    for edge in _EDGES:  # a name, too, becomes a number before the file is held against the type
        stage[edge] = {**stage[edge], "type": ["integer", "string"]}
    return schema


def load_configuration(path: str | Path, graph: Graph | None = None) -> Configuration | Degrees | Plan:
    """Read a file that says a configuration.

    Args:
        path: a configuration file or a plan file.
        graph: the model; needed where a configuration in full names its blocks.

    Returns:
        The configuration or its degrees; of a plan file the plan, which has the configuration and the shardings that
        its stages name by number.

    Raises:
        PlanError: the file is missing, unreadable or not as the schema says; `problems` holds every finding with line,
            column and path.
        JobError: the model has no block of a name, or several.
    """
    return parse_configuration(documents.read_bytes(path), graph, name=str(path))


def parse_configuration(
    text: str | bytes, graph: Graph | None = None, *, name: str = "configuration"
) -> Configuration | Degrees | Plan:
    """The same from JSON text; `name` is what errors call it.

    Raises:
        PlanError, JobError: as `load_configuration`.
    """
    content, document = documents.document(text, name)
    if document.get("format") == PLAN_FORMAT:
        return files.loads(content, name=name)
    documents.require_form(document, FORMAT, (VERSION,), name)
    edited = json.dumps(_numbered(document, graph)) if graph is not None else content
    read = documents.validated(edited, ConfigurationFile, name=name, shown=content)
    found = read.configuration or read.degrees
    if found is None or (read.configuration and read.degrees):
        raise PlanError(
            "a configuration is given in full or by its degrees", where=name,
            hint='give one of the keys "configuration" and "degrees"',
        )  # fmt: skip
    return found


def _numbered(document: dict[str, Any], graph: Graph) -> dict[str, Any]:
    """The document with the numbers of the blocks that its stages name.

    Raises:
        JobError: the model has no block of a name, or several.
    """
    configuration = document.get("configuration")
    stages = configuration.get("stages") if isinstance(configuration, dict) else None
    if not isinstance(configuration, dict) or not isinstance(stages, list):
        return document
    names = [block.name for block in build_chain(graph).blocks]
    known = [
        {**stage, **{key: block_number(stage[key], names) for key in _EDGES if isinstance(stage.get(key), str)}}
        if isinstance(stage, dict)
        else stage
        for stage in stages
    ]
    return {**document, "configuration": {**configuration, "stages": known}}

"""Plans and configurations as JSON files: strict to read, canonical to write.

A plan file of version 1 has no configuration section: the configuration is derived from its other parts; nothing else
differs. A configuration file has it in full, as a plan file does, or by its degrees of parallelism:

{"format": "shardplan-configuration", "version": 1, "degrees": {"tensor": 8, "pipeline": 4, "zero": 1}}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import planner.documents as documents
from planner.errors import PlanError, Problem, UsageError
from planner.files import write_whole
from planner.graph import Graph, build_chain
from planner.hardware.types import MOST_DEVICES
from planner.plans.figures import Predictions
from planner.plans.rank_schedule import lay_out
from planner.plans.types import FORMAT, SCHEMA_VERSION, Plan
from planner.play import Transfers
from planner.sharding import AxisRole
from planner.space.configuration import Configuration, StageChoice
from planner.space.layers import Layers
from planner.space.named import Degrees, block_number
from planner.space.types import Job

_WRITTEN_AT_DEFAULT: Mapping[type, frozenset[str]] = {
    Job: frozenset((
        "precision", "optimizer", "micro_batches", "schedules", "recompute", "zero", "max_stages", "devices",
        "fused_attention", "dropout", "assume_dropout", "overlap",
    )),
    Predictions: frozenset(("tried_bound_s",)),
}  # fmt: skip
"""Fields that are written even at their default value; all others are then left out of the file."""

UNHASHED = ("digest", "provenance")
"""Keys that the digest does not cover."""


def to_document(plan: Plan) -> dict[str, Any]:
    """The plan as plain dicts and lists in the order of the schema."""
    document: dict[str, Any] = plain(plan)
    return document


def plain(value: Any) -> Any:  # noqa: ANN401
    """Dataclasses as dicts, tuples as lists, without the fields that are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not left_out(value, field)
        }
    if isinstance(value, dict):
        return {key: plain(item) for key, item in sorted(value.items())}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, str) else value


def left_out(value: object, field: dataclasses.Field[Any]) -> bool:
    """Whether a field of a dataclass is not written, because it has its default."""
    written = field.name in _WRITTEN_AT_DEFAULT.get(type(value), ())
    return not written and getattr(value, field.name) == field.default


def digest_of(plan: Plan) -> str:
    """sha256 (hex) over everything but the digest itself and the provenance."""
    return _digest(to_document(plan))


def _digest(document: dict[str, Any], unhashed: tuple[str, ...] = ()) -> str:
    body = {key: value for key, value in document.items() if key not in (*UNHASHED, *unhashed)}
    return hashlib.sha256(documents.compact(body).encode()).hexdigest()


def seal(plan: Plan) -> Plan:
    """The plan with the digest of its content."""
    return dataclasses.replace(plan, digest=digest_of(plan))


def dumps(plan: Plan) -> str:
    """The plan as JSON text; the same plan gives the same bytes."""
    return documents.pretty(to_document(plan)) + "\n"


def loads(text: str | bytes, *, name: str = "plan") -> Plan:
    """Read a plan from JSON text; a plan of version 1 is converted to version 2.

    The digest is not compared: `validate` does that.

    Args:
        text: the JSON.
        name: what errors call it (a file name).

    Raises:
        PlanError: not JSON, of another format or version, or not as the schema says; `problems` holds every finding
            with line, column and path.
    """
    content, document = documents.document(text, name)
    documents.require_form(document, FORMAT, (VERSION1, SCHEMA_VERSION), name)
    old = document["version"] == VERSION1
    body = json.dumps(_as_version2(document, name)) if old else content
    plan = documents.validated(body, Plan, name=name, shown=content)
    require_sizes(plan, name)
    try:
        len(plan.block_table)
        for sharding in plan.shardings:
            for entry in sharding.blocks:
                entry.members()
    except PlanError as error:
        raise PlanError(error.problem.message, where=name, hint=error.problem.hint) from error
    return _with_configuration(plan) if old else plan


def _with_configuration(plan: Plan) -> Plan:
    """A plan read from version 1, with its configuration; sealed anew if its digest was right."""
    sealed = plan.digest == _digest({**to_document(plan), "version": VERSION1}, ("configuration",))
    plan = dataclasses.replace(plan, configuration=configuration_of(plan))
    return seal(plan) if sealed else plan


def read(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: the file is missing, unreadable or not a plan (see `loads`).
    """
    return loads(documents.read_bytes(path), name=str(path))


def write(plan: Plan, path: str | Path) -> None:
    """Write a plan file, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    write_whole(path, dumps(plan))


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the plan file, descriptions taken from the types' docstrings."""
    return documents.described(documents.adapter(Plan).json_schema())


MOST_MICRO_BATCHES = 1 << 24
"""Limit on the micro-batches of an iteration."""
MOST_ITERATIONS = 1 << 16
"""Limit on the iterations that orders span."""
MOST_PARTS = 1 << 12
"""Limit on the parts of a micro-batch."""


def require_sizes(plan: Plan, name: str) -> None:
    """Refuse a plan with more ranks, micro-batches or iterations than the limits, or with lists of unequal length.

    O(stages + orders + alternatives).

    Raises:
        PlanError: with every such finding.
    """
    problems = [Problem(message, f"{name}: {path}", hint) for path, message, hint in _findings(plan)]
    if problems:
        first = problems[0]
        raise PlanError(first.message, where=first.where, hint=first.hint, problems=problems)


def _findings(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(path, message, hint) for each such finding."""
    limits = (
        ("world_size", plan.world_size, 1, MOST_DEVICES),
        ("hardware.device_count", plan.hardware.device_count, 1, MOST_DEVICES),
        ("copies", plan.copies, 0, MOST_DEVICES),
        ("micro_batches.count", plan.micro_batches.count, 0, MOST_MICRO_BATCHES),
        ("schedule.iterations", plan.schedule.iterations, 1, MOST_ITERATIONS),
        ("schedule.parts", plan.schedule.parts, 1, MOST_PARTS),
        *([("headline.devices", plan.headline.device_count, 1, MOST_DEVICES)] if plan.headline else []),
    )
    for path, value, low, high in limits:
        if not low <= value <= high:
            yield path, f"is {value}", f"from {low} to {high:,} can be read"
    for i, order in enumerate(plan.schedule.orders):
        yield from _same_length(f"schedule.orders[{i}]", "first", order.first, "ranks", order.ranks)
    for i, other in enumerate(plan.alternatives):
        yield from _same_length(f"alternatives[{i}]", "replicas", other.replicas, "starts", other.starts)
        if not other.starts:
            yield f"alternatives[{i}].starts", "is empty", "a plan has at least one stage"


def _same_length(
    path: str, name: str, values: Sequence[int], other: str, others: Sequence[int]
) -> Iterator[tuple[str, str, str]]:
    if len(values) != len(others):
        yield f"{path}.{name}", f"has {len(values)} entries, {other} has {len(others)}", "each belongs to one of these"


VERSION1 = 1

_EMPTY_CONFIGURATION = plain(Configuration((), 1, 1, 1, ""))
"""Placeholder configuration until the other parts of the file are read."""


def _as_version2(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The document of a version 1 file as version 2, with an empty configuration.

    Raises:
        PlanError: it has a configuration already.
    """
    if "configuration" in document:
        raise PlanError(
            "unknown key 'configuration'", where=name, hint=f"a file that has it is not of version {VERSION1}"
        )
    return {**document, "version": SCHEMA_VERSION, "configuration": _EMPTY_CONFIGURATION}


def _dealing_sizes(plan: Plan, stage: int) -> tuple[int, int]:
    """Context-parallel and expert-parallel size of a stage's groups."""
    sharding = plan.sharding_of(stage)
    axes = {axis.name: axis.size for axis in sharding.axes} if sharding else {}
    return axes.get(AxisRole.CONTEXT, 1), axes.get(AxisRole.EXPERT, 1)


def configuration_of(plan: Plan) -> Configuration:
    """Derive the configuration from a plan's stages, groups of ranks, micro-batches and orders.

    Ranks that follow none of the placement rules are listed one by one. Where a rank has several stages, or the orders
    are the user's own, copies are assumed to follow each other.
    """
    copies, width = max(1, plan.copies), plan.world_size // max(1, plan.copies)
    numbers = {sharding.name: number for number, sharding in enumerate(plan.shardings, 1)}
    layers = Layers.of(plan.block_names)
    alone = all(len(plan.stages_of(rank)) < 2 for rank in range(plan.world_size))
    stages = tuple(
        StageChoice(
            *stage.blocks,
            max(1, len(stage.replicas) // copies) if alone else 1,
            stage.recompute,
            stage.group_ranks,
            numbers.get(stage.sharding, 0),
            *_dealing_sizes(plan, stage.index),
            repeats=stage.repeats,
            offload=stage.offload,
            layers=layers.recomputed(*stage.blocks, stage.kept_blocks) if stage.recompute else 0,
        )
        for stage in plan.stages
    )
    standard = Configuration(
        stages,
        copies,
        plan.micro_batches.size,
        plan.micro_batches.count // copies,
        plan.schedule.name,
        max((stage.zero for stage in plan.stages), default=0),
        slice_devices=width if plan.idle_ranks else 0,
        whole_stages=plan.options.whole_stages,
        transfers=Transfers(plan.schedule.transfers),
        exchange=plan.exchange.scheme if plan.exchange else "",
        shard_over=max((stage.shard_over for stage in plan.stages), default=0),
    )
    groups_in_file = [frozenset(stage.replicas) for stage in plan.stages]
    one_by_one = tuple(
        rank
        for copy in range(copies)
        for stage in plan.stages
        for group in stage.replicas[copy::copies]
        for rank in group
    )
    candidates = [dataclasses.replace(standard, adjacent=True)]
    candidates += [dataclasses.replace(standard, slice_devices=0, devices=one_by_one)] if alone else []
    return next((candidate for candidate in (standard, *candidates) if _places(candidate) == groups_in_file), standard)


def _places(configuration: Configuration) -> list[frozenset[tuple[int, ...]]]:
    """The groups of ranks of each stage that the schedule gives; empty where it is not registered."""
    try:
        return [frozenset(groups) for groups in lay_out(configuration).groups]
    except (UsageError, PlanError):
        return []


CONFIGURATION_FORMAT: Literal["shardplan-configuration"] = "shardplan-configuration"
CONFIGURATION_VERSION: Literal[1] = 1
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
    return {"format": CONFIGURATION_FORMAT, "version": CONFIGURATION_VERSION, kind: plain(configuration)}


def dump_configuration(configuration: Configuration | Degrees) -> str:
    """The configuration as JSON text; equal configurations give equal bytes."""
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
    """Read a configuration from JSON text, as `load_configuration`; `name` is what errors call it.

    Raises:
        PlanError, JobError: as `load_configuration`.
    """
    content, document = documents.document(text, name)
    if document.get("format") == FORMAT:
        return loads(content, name=name)
    documents.require_form(document, CONFIGURATION_FORMAT, (CONFIGURATION_VERSION,), name)
    edited = json.dumps(_numbered(document, graph)) if graph is not None else content
    read = documents.validated(edited, ConfigurationFile, name=name, shown=content)
    configuration = read.configuration or read.degrees
    if configuration is None or (read.configuration and read.degrees):
        raise PlanError(
            "a configuration is given in full or by its degrees", where=name,
            hint='give one of the keys "configuration" and "degrees"',
        )  # fmt: skip
    return configuration


def _numbered(document: dict[str, Any], graph: Graph) -> dict[str, Any]:
    """The document with block names in its stages replaced by block numbers.

    Raises:
        JobError: the model has no block of a name, or several.
    """
    configuration = document.get("configuration")
    stages = configuration.get("stages") if isinstance(configuration, dict) else None
    if not isinstance(configuration, dict) or not isinstance(stages, list):
        return document
    names = [block.name for block in build_chain(graph).blocks]
    numbered_stages = [
        {**stage, **{key: block_number(stage[key], names) for key in _EDGES if isinstance(stage.get(key), str)}}
        if isinstance(stage, dict)
        else stage
        for stage in stages
    ]
    return {**document, "configuration": {**configuration, "stages": numbered_stages}}

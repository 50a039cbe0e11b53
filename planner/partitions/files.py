"""Partition plans as JSON: strict to read, canonical to write."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
from pathlib import Path
from typing import Any

from planner.files import STANDARD, input_bytes, write_whole
from planner.partitions.types import FORMAT, SCHEMA_VERSION, ChoiceRun, Part, PartitionPlan, TrivialPlan
from planner.plans import documents

_HEAD_BYTES = 256
_SPARSE = (Part, ChoiceRun, TrivialPlan)
"""Types whose fields are left out of the file when they have their default."""


def _plain(value: Any) -> Any:  # noqa: ANN401
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not isinstance(value, _SPARSE) or getattr(value, field.name) != field.default
        }
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in sorted(value.items())}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def digest_of(plan: PartitionPlan) -> str:
    """sha256 (hex) over everything but the digest itself."""
    document = _plain(plan)
    del document["digest"]
    return hashlib.sha256(documents.compact(document).encode()).hexdigest()


def seal(plan: PartitionPlan) -> PartitionPlan:
    """The same plan with the digest that belongs to it."""
    return dataclasses.replace(plan, digest=digest_of(plan))


def dump_partition(plan: PartitionPlan) -> str:
    """The plan as JSON text; the same plan gives the same bytes."""
    return documents.pretty(_plain(plan)) + "\n"


def load_partition(text: str | bytes, *, name: str = "plan") -> PartitionPlan:
    """Read a plan from JSON text; its digest is not compared (`check_partition` does).

    Raises:
        PlanError: not JSON, of another format or version, or not as the schema says.
    """
    return documents.parse(text, PartitionPlan, FORMAT, SCHEMA_VERSION, name=name)


def read_partition(path: str | Path) -> PartitionPlan:
    """Read a plan file.

    Raises:
        PlanError: the file is missing, unreadable or not a partition plan.
    """
    return load_partition(documents.read_bytes(path), name=str(path))


def write_partition(plan: PartitionPlan, path: str | Path) -> None:
    """Write a plan file, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    write_whole(path, dump_partition(plan))


def is_partition_plan(source: str | Path | bytes) -> bool:
    """Whether a file, or what it holds, is JSON that says that it is a partition plan; else others will say what it is.

    Plans say their format first; only where the beginning does not, the whole file is read.
    """
    try:
        content = input_bytes() if str(source) == STANDARD else source
        with io.BytesIO(content) if isinstance(content, bytes) else Path(content).open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
            if b'"format"' in head:
                return f'"{FORMAT}"'.encode() in head
            document = json.loads(head + stream.read())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == FORMAT


def partition_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the file, descriptions taken from the types' docstrings."""
    return documents.described(documents.adapter(PartitionPlan).json_schema())

"""Published instances of partition problems: JSON documents, read as dataclasses with all faults of a file at once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le

from planner.documents import adapter
from planner.errors import ModelError
from planner.files import LARGEST_FIGURE
from planner.foreign_files import Door
from planner.importers.formats import Findings
from planner.json_text import readable

T = TypeVar("T")

MOST_INSTANCE_DEVICES = 4096
"""Devices of one kind that an instance of a partition problem may ask for: more could not be told apart in time."""

Figure = Annotated[float, Ge(0), Le(LARGEST_FIGURE)]
"""A time, size or rate of a file."""


def keyed(**keys: str) -> dict[str, Any]:
    """Configuration of a dataclass that is read from JSON: the file's keys by attribute, where they are other ones."""
    return {"strict": True, "allow_inf_nan": False, "alias_generator": lambda name: keys.get(name, name)}


def decoded(findings: Findings, document: object, kind: type[T]) -> T:
    """A JSON document as a dataclass; keys that it does not have are let pass.

    Raises:
        ModelError: fields that are missing, of the wrong kind or out of range, each with its path.
    """
    from pydantic import ValidationError

    try:
        target: Any = kind
        read: T = adapter(target).validate_json(json.dumps(document))
    except ValidationError as error:
        for each in error.errors(include_url=False):
            fault = f"{each['msg'].removeprefix('Input ')}, not {each['input']!r:.40}"
            findings.wrong(readable(each["loc"]), "is missing" if each["type"] == "missing" else fault)
        findings.stop()
        raise
    return read


def read_document(path: Path) -> tuple[Any, str]:
    """The document in a JSON file, and the file's sha256.

    Raises:
        ModelError: it cannot be read, or is no JSON that can be.
    """
    door = Door(str(path), ModelError, "export or copy the file again")
    content = door.content(path)
    return door.json(content), hashlib.sha256(content).hexdigest()

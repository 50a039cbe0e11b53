"""The plan file's JSON Schema with the types' docstrings spread over its properties."""

from __future__ import annotations

import inspect
import re
from typing import Any

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^ {4}([a-z_0-9]+): (.*)$")


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `$schema`, and every description split into what the object and what each property means."""
    result = {"$schema": _DIALECT, **_described(schema)}
    result["$defs"] = {name: _described(entry) for name, entry in schema.get("$defs", {}).items()}
    return result


def _described(entry: dict[str, Any]) -> dict[str, Any]:
    head, attributes = split_docstring(entry.get("description", ""))
    result = {key: value for key, value in entry.items() if key != "title"}
    if head:
        result["description"] = head
    if "properties" in entry:
        result["properties"] = {
            name: {
                **{key: value for key, value in field.items() if key != "title"},
                **({"description": attributes[name]} if name in attributes else {}),
            }
            for name, field in entry["properties"].items()
        }
    return result


def split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says before its `Attributes:`, on one line, and what it says of each attribute."""
    head, _, tail = inspect.cleandoc(text).partition("Attributes:")
    found: dict[str, str] = {}
    last = ""
    for line in tail.splitlines():
        match = _ATTRIBUTE.match(line)
        if match:
            last = match[1]
            found[last] = match[2]
        elif last and line.strip():
            found[last] += " " + line.strip()
    return " ".join(head.split()), found

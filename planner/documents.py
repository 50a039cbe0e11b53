"""JSON documents: strict reading with line and column of errors, readable writing, JSON Schema.

Reading refuses other formats and versions, and keys that are repeated or unknown. Writing puts short values on one
line, fills long lists to the line width, and gives floats in their shortest form.
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from planner.errors import PlanError, Problem
from planner.foreign_files import Door
from planner.json_text import KeyPath, nearest, positions, readable
from planner.registry import did_you_mean

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")

MAKE_AGAIN = "plan again with this version"


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a file; `-` is standard input.

    Raises:
        PlanError: it is missing or cannot be read.
    """
    return Door(str(path), PlanError, "name a file that `shardplan plan` wrote").content(path)


def parse(text: str | bytes, kind: type[T], form: str, version: int, *, name: str) -> T:
    """A document as an object of a dataclass type.

    Args:
        text: the JSON.
        kind: the dataclass.
        form: what its key `format` must say.
        version: what its key `version` must say.
        name: what errors call it (a file name).

    Raises:
        PlanError: not JSON, of another format or version, or not as the type says; `problems` holds every finding with
            line, column and path.
    """
    content, fields = document(text, name)
    require_form(fields, form, (version,), name)
    return validated(content, kind, name=name)


def require_form(fields: dict[str, Any], form: str, versions: Sequence[int], name: str) -> None:
    """Refuse a document of another format or version.

    Raises:
        PlanError: it names the format or version of the file and those that can be read.
    """
    if fields.get("format") != form:
        kind = form.removeprefix("shardplan-")
        raise PlanError(f"not a {kind} file", where=name, hint=f'a {kind} says "format": "{form}"')
    if fields.get("version") not in versions:
        raise PlanError(
            f"{form.removeprefix('shardplan-')} schema version {fields.get('version')!r} cannot be read, only "
            f"{' and '.join(map(str, versions))}",
            where=name, hint=MAKE_AGAIN,
        )  # fmt: skip


def validated(content: str, kind: type[T], *, name: str, shown: str = "") -> T:
    """JSON text as an object of a dataclass type.

    Args:
        content: the text.
        kind: the dataclass.
        name: what errors call it.
        shown: the text of the file, for lines and columns of errors, if `content` is not that text.

    Raises:
        PlanError: not as the type says; `problems` holds every finding with line, column and path.
    """
    from pydantic import ValidationError

    target: Any = kind
    try:
        read: T = adapter(target).validate_json(content, strict=True)
    except ValidationError as error:
        places = positions(shown or content)
        schema = adapter(target).json_schema()
        problems = [_problem(details, places, schema, name) for details in error.errors(include_url=False)]
        first = problems[0]
        raise PlanError(first.message, where=first.where, hint=first.hint, problems=problems) from error
    return read


@functools.cache
def adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401
    """The validator of a type."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def document(text: str | bytes, name: str, kind: str = "plan", hint: str = MAKE_AGAIN) -> tuple[str, dict[str, Any]]:
    """The decoded text and the JSON object in it.

    Args:
        text: the JSON.
        name: what errors call it (a file name).
        kind: what the file is to be, in errors.
        hint: how to come to a whole file.

    Raises:
        PlanError: no JSON object, or JSON that cannot be read (`Door.json`).
    """
    door = Door(name, PlanError, f"the file may be cut off; {hint}")
    content = door.text(text)
    read = door.json(content)
    if not isinstance(read, dict):
        door.refuse(f"not a {kind} file", hint=f"a {kind} file holds a JSON object")
    return content, read


def _problem(
    details: ErrorDetails, places: dict[KeyPath, tuple[int, int]], schema: Mapping[str, Any], name: str
) -> Problem:
    path = tuple(details["loc"])
    line, column = nearest(path, places)
    message, hint = f"{readable(path)}: {details['msg'][:1].lower()}{details['msg'][1:]}", ""
    if details["type"] == "unexpected_keyword_argument":
        message = f"unknown key {readable(path)!r}"
        hint = did_you_mean(str(path[-1]), schema_at(path[:-1], schema).get("properties", ()))
    elif details["type"] == "missing":
        message, hint = f"missing key {readable(path)!r}", "every key of the schema is required"
    return Problem(message, f"{name}:{line}:{column}", hint)


def schema_at(path: KeyPath, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a JSON Schema says of the value at a path; empty where it knows none."""
    node = schema
    for part in path:
        keyed = node.get("properties", {}).get(part) or node.get("additionalProperties")
        inner = _item(node, part) if isinstance(part, int) else keyed
        node = _resolved(inner if isinstance(inner, Mapping) else {}, schema)
    return node


def _item(node: Mapping[str, Any], index: int) -> object:
    """Schema of an item of a list, in JSON Schema draft 2020-12 or 7."""
    items = node.get("items")
    firsts = node.get("prefixItems") or (items if isinstance(items, list) else [])
    return firsts[index] if index < len(firsts) else items


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The definition that a part of a schema refers to; of alternatives the first that has keys."""
    while "$ref" in node or "anyOf" in node:
        keyed = [each for each in node.get("anyOf", ()) if each.keys() & {"$ref", "properties", "items"}]
        if "$ref" not in node and not keyed:
            break
        said = {key: text for key, text in node.items() if key == "description"}
        steps = node["$ref"].split("/")[1:] if "$ref" in node else ()
        node = {**(functools.reduce(operator.getitem, steps, schema) if steps else keyed[0]), **said}
    return node


WIDTH = 120
_OPEN_LEVELS = 2
"""Objects up to this depth have a line for each key; in deeper ones short values share lines."""
_FEW = 32
"""Longest list that shares a line with other items."""


def compact(value: Any) -> str:  # noqa: ANN401
    """Canonical JSON: keys sorted, no spaces, UTF-8 characters as they are."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def pretty(value: Any, indent: int = 0, used: int = 0) -> str:  # noqa: ANN401
    """JSON text with keys in the given order; `used` is the number of characters before it on its first line."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, (dict, list)) or not value or indent + used + len(line) < WIDTH:
        return line
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        body = _object_body(value, indent, pad)
        return "{\n" + body + "\n" + " " * indent + "}"
    if not all(map(_is_short, value)):
        body = ",\n".join(pad + pretty(item, indent + 1) for item in value)
    else:
        body = _filled([json.dumps(item, ensure_ascii=False, allow_nan=False) for item in value], pad)
    return "[\n" + body + "\n" + " " * indent + "]"


def _is_short(value: Any) -> bool:  # noqa: ANN401
    """True if a list item may share a line: a number, a text, or a short list of these (a rank group)."""
    if isinstance(value, list):
        return len(value) <= _FEW and not any(isinstance(item, (dict, list)) for item in value)
    return not isinstance(value, dict)


def _object_body(value: dict[str, Any], indent: int, pad: str) -> str:
    lines: list[str] = []
    short: list[str] = []
    for key, item in value.items():
        head = f"{json.dumps(key, ensure_ascii=False)}: "
        text = head + pretty(item, indent + 1, len(head))
        if indent >= _OPEN_LEVELS and "\n" not in text:
            short.append(text)
            continue
        lines += [_filled(short, pad)] if short else []
        short = []
        lines.append(pad + text)
    lines += [_filled(short, pad)] if short else []
    return ",\n".join(lines)


def _filled(words: list[str], pad: str) -> str:
    lines, line = [], pad + words[0]
    for word in words[1:]:
        if len(line) + len(word) + 3 > WIDTH:
            lines.append(line + ",")
            line = pad + word
        else:
            line += ", " + word
    return "\n".join([*lines, line])


_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^ {4}([a-z_0-9]+): (.*)$")


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with `$schema`, and docstrings split into descriptions of objects and of properties."""
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
    """(head, attributes) of a docstring: the text before `Attributes:` on one line, and the text of each attribute."""
    head, _, tail = inspect.cleandoc(text).partition("Attributes:")
    attributes: dict[str, str] = {}
    last = ""
    for line in tail.splitlines():
        match = _ATTRIBUTE.match(line)
        if match:
            last = match[1]
            attributes[last] = match[2]
        elif last and line.strip():
            attributes[last] += " " + line.strip()
    return " ".join(head.split()), attributes

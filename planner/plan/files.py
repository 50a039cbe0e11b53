"""Plans as JSON: strict to read, canonical to write."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PlanError, Problem
from planner.files import write_whole
from planner.plan import layout, locate
from planner.plan.blocks import BlockParameter
from planner.plan.types import FORMAT, SCHEMA_VERSION, Plan, PlanNote, Provenance
from planner.registry import did_you_mean

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

_SPARSE = (BlockParameter, PlanNote, Provenance)
"""Types whose fields are left out of the file when they have their default; all others are written whole."""

_UNHASHED = ("digest", "provenance")
_MAKE_AGAIN = "plan again with this version"


def to_document(plan: Plan) -> dict[str, Any]:
    """The plan as plain dicts and lists in the order of the schema."""
    document: dict[str, Any] = _plain(plan)
    return document


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
    return str(value) if isinstance(value, str) else value


def digest_of(plan: Plan) -> str:
    """sha256 (hex) over everything but the digest itself and the provenance."""
    document = to_document(plan)
    body = {key: value for key, value in document.items() if key not in _UNHASHED}
    return hashlib.sha256(layout.compact(body).encode()).hexdigest()


def seal(plan: Plan) -> Plan:
    """The same plan with the digest that belongs to it."""
    return dataclasses.replace(plan, digest=digest_of(plan))


def dumps(plan: Plan) -> str:
    """The plan as JSON text; the same plan gives the same bytes."""
    return layout.pretty(to_document(plan)) + "\n"


def loads(text: str | bytes, *, name: str = "plan") -> Plan:
    """Read a plan from JSON text. The digest is not compared: `validate` does that.

    Args:
        text: the JSON.
        name: what errors call it (a file name).

    Raises:
        PlanError: not JSON, of another format or version, or not as the schema says; `problems` holds every finding
        with
            line, column and path.
    """
    content = _decode(text, name)
    document = _parse(content, name)
    _check_version(document, name)
    from pydantic import ValidationError

    try:
        plan = _adapter().validate_json(content, strict=True)
    except ValidationError as error:
        places = locate.positions(content)
        problems = [_problem(details, places, name) for details in error.errors(include_url=False)]
        first = problems[0]
        raise PlanError(first.message, where=first.where, hint=first.hint, problems=problems) from error
    try:
        len(plan.block_table)
    except PlanError as error:
        raise PlanError(error.problem.message, where=name, hint=error.problem.hint) from error
    return plan


def read(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: the file is missing, unreadable or not a plan (see `loads`).
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(
            f"cannot read: {reason}", where=str(path), hint="name a file that `shardplan plan` wrote"
        ) from error
    return loads(data, name=str(path))


def write(plan: Plan, path: str | Path) -> None:
    """Write a plan file, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    write_whole(path, dumps(plan))


@functools.cache
def _adapter() -> TypeAdapter[Plan]:
    from pydantic import TypeAdapter

    return TypeAdapter(Plan)


def _decode(text: str | bytes, name: str) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise PlanError("not a text file", where=name, hint="a plan is a JSON file") from error


def _parse(text: str, name: str) -> dict[str, Any]:
    """The JSON's content, refused when keys repeat or numbers are not finite."""
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        repeated.extend(key for key, count in _counts(key for key, _ in items) if count > 1 and key in found)
        return found

    def refuse(literal: str) -> float:
        raise PlanError(f"{literal} is not JSON", where=name, hint=_MAKE_AGAIN)

    try:
        document = json.loads(text, object_pairs_hook=pairs, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"not JSON: {error.msg}", where=f"{name}:{error.lineno}:{error.colno}", hint="the file may be cut off"
        ) from error
    except RecursionError as error:
        raise PlanError("not a plan: nested too deeply", where=name, hint=_MAKE_AGAIN) from error
    if repeated:
        raise PlanError(f"key {repeated[0]!r} appears twice in one object", where=name, hint="remove one of them")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanError("not a plan file", where=name, hint=f'a plan says "format": "{FORMAT}"')
    return document


def _counts(keys: Iterable[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return list(counts.items())


def _check_version(document: dict[str, Any], name: str) -> None:
    version = document.get("version")
    if version != SCHEMA_VERSION:
        raise PlanError(
            f"plan schema version {version!r} cannot be read, only {SCHEMA_VERSION}", where=name, hint=_MAKE_AGAIN
        )


def _problem(details: ErrorDetails, places: dict[locate.Path, tuple[int, int]], name: str) -> Problem:
    path = tuple(details["loc"])
    line, column = locate.nearest(path, places)
    message, hint = f"{locate.readable(path)}: {_lower(details['msg'])}", ""
    if details["type"] == "unexpected_keyword_argument":
        message = f"unknown key {locate.readable(path)!r}"
        hint = did_you_mean(str(path[-1]), _known_keys(path[:-1]))
    elif details["type"] == "missing":
        message, hint = f"missing key {locate.readable(path)!r}", "every key of the schema is required"
    return Problem(message, f"{name}:{line}:{column}", hint)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _known_keys(path: locate.Path) -> tuple[str, ...]:
    """Keys that the schema knows at a path."""
    schema: Any = json_schema()
    node: Any = schema
    for part in path:
        node = node.get("items", {}) if isinstance(part, int) else node.get("properties", {}).get(part, {})
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
    return tuple(node.get("properties", ()))


def json_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of the plan file, descriptions taken from the types' docstrings."""
    from planner.plan.schema import described

    return described(_adapter().json_schema())

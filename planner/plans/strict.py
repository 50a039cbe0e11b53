"""Read JSON documents strictly: one format and version, no key twice or unknown, findings with line and column."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from planner.errors import PlanError, Problem
from planner.json_text import JsonError, Pairs, read_json
from planner.plans import locate
from planner.registry import did_you_mean

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")

MAKE_AGAIN = "plan again with this version"


def read_bytes(path: str | Path) -> bytes:
    """What a file holds.

    Raises:
        PlanError: it is missing or cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise PlanError(
            f"cannot read: {reason}", where=str(path), hint="name a file that `shardplan plan` wrote"
        ) from error


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
    content, found = document(text, name)
    require_form(found, form, (version,), name)
    return validated(content, kind, name=name)


def require_form(found: dict[str, Any], form: str, versions: Sequence[int], name: str) -> None:
    """Refuse a document of another format or version.

    Raises:
        PlanError: says what the file says and what can be read.
    """
    if found.get("format") != form:
        kind = form.removeprefix("shardplan-")
        raise PlanError(f"not a {kind} file", where=name, hint=f'a {kind} says "format": "{form}"')
    if found.get("version") not in versions:
        raise PlanError(
            f"{form.removeprefix('shardplan-')} schema version {found.get('version')!r} cannot be read, only "
            f"{' and '.join(map(str, versions))}",
            where=name, hint=MAKE_AGAIN,
        )  # fmt: skip


def validated(content: str, kind: type[T], *, name: str, shown: str = "") -> T:
    """JSON text as an object of a dataclass type.

    Args:
        content: the text.
        kind: the dataclass.
        name: what errors call it.
        shown: the text that lines and columns of errors are of, where `content` is not what stands in the file.

    Raises:
        PlanError: not as the type says; `problems` holds every finding with line, column and path.
    """
    from pydantic import ValidationError

    target: Any = kind
    try:
        read: T = adapter(target).validate_json(content, strict=True)
    except ValidationError as error:
        places = locate.positions(shown or content)
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


def _decode(text: str | bytes, name: str) -> str:
    if isinstance(text, str):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise PlanError("not a text file", where=name, hint="a plan is a JSON file") from error


def document(text: str | bytes, name: str) -> tuple[str, dict[str, Any]]:
    """The text and the JSON object that it is.

    Raises:
        PlanError: no JSON object, a key twice in one, or numbers out of range.
    """
    content, repeated = _decode(text, name), list[str]()

    def pairs(items: Pairs) -> dict[str, Any]:
        found = dict(items)
        repeated.extend(key for key, count in _counts(key for key, _ in items) if count > 1 and key in found)
        return found

    try:
        read = read_json(content, pairs=pairs)
    except JsonError as error:
        where, hint = f"{name}:{error.line}:{error.column}", f"the file may be cut off; {MAKE_AGAIN}"
        raise PlanError(error.message, where=where, hint=hint) from error
    if repeated:
        raise PlanError(f"key {repeated[0]!r} appears twice in one object", where=name, hint="remove one of them")
    if not isinstance(read, dict):
        raise PlanError("not a plan file", where=name, hint="a plan is a JSON object")
    return content, read


def _counts(keys: Iterable[str]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for key in keys:
        counts[key] = counts.get(key, 0) + 1
    return list(counts.items())


def _problem(
    details: ErrorDetails, places: dict[locate.Path, tuple[int, int]], schema: Mapping[str, Any], name: str
) -> Problem:
    path = tuple(details["loc"])
    line, column = locate.nearest(path, places)
    message, hint = f"{locate.readable(path)}: {_lower(details['msg'])}", ""
    if details["type"] == "unexpected_keyword_argument":
        message = f"unknown key {locate.readable(path)!r}"
        hint = did_you_mean(str(path[-1]), _known_keys(path[:-1], schema))
    elif details["type"] == "missing":
        message, hint = f"missing key {locate.readable(path)!r}", "every key of the schema is required"
    return Problem(message, f"{name}:{line}:{column}", hint)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _known_keys(path: locate.Path, schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys that a schema knows at a path."""
    node: Any = schema
    for part in path:
        node = node.get("items", {}) if isinstance(part, int) else node.get("properties", {}).get(part, {})
        node = next((each for each in node.get("anyOf", ()) if "$ref" in each), node)
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]] if "$ref" in node else node
    return tuple(node.get("properties", ()))

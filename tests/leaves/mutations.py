"""Every way in which one value of a document is changed: numbers, texts, truth values, lists, keys, nulls."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]
REMOVED = object()
"""In place of a value: the key is taken away."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A change of one value of a document.

    Attributes:
        path: of the value.
        what: the change in a word.
        value: what stands there afterwards; `REMOVED` for nothing.
    """

    path: Path
    what: str
    value: Any

    @property
    def names(self) -> tuple[str, ...]:
        """The path without places in lists."""
        return tuple(part for part in self.path if isinstance(part, str))

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))} {self.what}"

    def applied(self, document: dict[str, Any]) -> dict[str, Any]:
        """A copy of a document with the change; what is not on the path is shared."""
        changed: dict[str, Any] = copy.copy(document)
        at: Any = changed
        for part in self.path[:-1]:
            at[part] = copy.copy(at[part])
            at = at[part]
        if self.value is REMOVED:
            del at[self.path[-1]]
        else:
            at[self.path[-1]] = self.value
        return changed


def values(document: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All values of a document with their paths: leaves, lists and objects."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    if path:
        yield path, document
    for key, item in items:
        yield from values(item, (*path, key))


def mutations(document: dict[str, Any]) -> Iterator[Mutation]:
    """All changes of all values of a document."""
    for path, value in values(document):
        for what, other in _others(value):
            yield Mutation(path, what, other)
        if isinstance(path[-1], str):
            yield Mutation(path, "removed", REMOVED)


def _others(value: Any) -> Iterator[tuple[str, Any]]:
    """Other values in place of one, each with a word for the change."""
    if isinstance(value, bool):
        yield "flipped", not value
    elif isinstance(value, int):
        yield from (("one more", value + 1), ("one less", value - 1), ("doubled", 2 * value + 2), ("zero", 0))
    elif isinstance(value, float):
        others = ("a little more", value * (1 + 1e-4)), ("a third", value / 3), ("doubled", 2 * value), ("zero", 0.0)
        yield from others
        if abs(value) < 10:
            yield "half more", value + 0.5
    elif isinstance(value, str):
        yield from (("longer", f"{value}x"), ("shorter", value[:-1]), ("empty", ""))
    elif isinstance(value, list):
        yield from (("shorter", value[:-1]), ("without the first", value[1:]), ("reversed", value[::-1]))
        yield from (("longer", [*value, value[-1]]),) if value else (("one text", ["x"]), ("one number", [1]))
    elif value is None:
        yield from (("one", 1), ("a text", "x"))
    if value is not None:
        yield "null", None


def additions(document: Any, schema: dict[str, Any]) -> Iterator[Mutation]:
    """A value for every key that the schema knows and an object of a document lacks."""
    definitions = schema["$defs"]

    def walk(value: Any, kind: dict[str, Any], path: Path) -> Iterator[Mutation]:
        kinds = [definitions[k["$ref"].rpartition("/")[2]] if "$ref" in k else k for k in kind.get("anyOf", [kind])]
        for own in kinds:
            if isinstance(value, dict) and "properties" in own:
                for key, inner in own["properties"].items():
                    if key in value:
                        yield from walk(value[key], inner, (*path, key))
                    else:
                        yield from (Mutation((*path, key), "added", v) for v in _samples(inner, definitions))
            elif isinstance(value, list) and isinstance(own.get("items"), dict):
                for index, item in enumerate(value):
                    yield from walk(item, own["items"], (*path, index))

    yield from walk(document, schema, ())


def _samples(kind: dict[str, Any], definitions: dict[str, Any]) -> Iterator[Any]:
    """A value of a kind, unlike its default as a rule; nothing for objects with keys that must be there."""
    for own in kind.get("anyOf", [kind]):
        if "$ref" in own:
            yield from _samples(definitions[own["$ref"].rpartition("/")[2]], definitions)
        elif own.get("enum") or "const" in own:
            yield (own.get("enum") or [own["const"]])[-1]
        elif own.get("type") == "array":
            items = own.get("items")
            yield [next(_samples(items, definitions), "x")] if isinstance(items, dict) else ["x"]
        elif own.get("type") in _OF_TYPE:
            yield _OF_TYPE[own["type"]]


_OF_TYPE = {"integer": 3, "number": 0.5, "string": "x", "boolean": True}

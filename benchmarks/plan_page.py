"""The table of docs/plan.md that names every key of the file, taken from its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from planner.plans import plan_schema

HEAD = "| part of the file | what it is | keys |\n|---|---|---|"


def key_rows() -> str:
    """Every object of the plan file: where it stands first, what it is, and its keys."""
    schema = plan_schema()
    rows = [f"| the whole | {_sentence(schema)} | {_keys(schema)} |"]
    rows += [f"| `{path}` | {_sentence(kind)} | {_keys(kind)} |" for path, kind in _objects(schema)]
    return "\n".join([HEAD, *rows]) + "\n"


def _objects(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects with keys of their own by the place where they stand first, nearer ones before."""
    seen, level = set[str](), [("", schema)]
    while level:
        inner = []
        for path, kind in level:
            for key, value in kind["properties"].items():
                for name, place in _references(value, f"{path}{key}"):
                    own = schema["$defs"][name]
                    if "properties" in own and name not in seen:
                        seen.add(name)
                        yield place, own
                        inner.append((f"{place}.", own))
        level = inner


def _references(kind: dict[str, Any], place: str) -> Iterator[tuple[str, str]]:
    """Names of objects that a value may be, or hold, and where."""
    if "$ref" in kind:
        yield kind["$ref"].rpartition("/")[2], place
    for other in kind.get("anyOf", ()):
        yield from _references(other, place)
    if isinstance(kind.get("items"), dict):
        yield from _references(kind["items"], f"{place}[]")


def _sentence(kind: dict[str, Any]) -> str:
    """The first sentence of an object's description."""
    return " ".join(kind["description"].split("\n\n")[0].split()).partition(". ")[0].rstrip(".").replace("|", "\\|")


def _keys(kind: dict[str, Any]) -> str:
    return ", ".join(f"`{key}`" for key in kind["properties"])

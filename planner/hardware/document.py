"""YAML files as plain data with the position of each value, so that an error can point at its place in the file;
and the folder of the bundled profiles.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from planner.errors import HardwareError, Problem
from planner.escaping import source_line
from planner.foreign_files import Door

Location = tuple[str | int, ...]

_MAX_DEPTH = 32
_MAX_VALUES = 50_000
LONGEST = 160
"""Longest excerpt of a source line in a message, in characters."""
YAML_SUFFIXES = (".yaml", ".yml")
LARGEST = 2.0**63
"""Numbers are below this; a larger one is a typing error."""
_TOO_MUCH = "too deep or too large for a profile"
KINDS = ("cluster", "device", "stack")
"""The keys one of which names a profile."""
BEGINNING = "start with `cluster: NAME` for a cluster, `device: NAME` for a single device or `stack: NAME` for software"
"""What to do with a file that has none of them."""
_NAMED = re.compile(rf"[{{\s\ufeff]*[\"']?({'|'.join(KINDS)})[\"']?\s*:(\s|$)")


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a file: line and column from 0, and the number of characters to underline."""

    line: int
    column: int
    width: int = 1


@dataclass
class Document:
    """A parsed file.

    Attributes:
        name: name of the file in messages.
        lines: lines of the file.
        data: mappings, lists and scalars; of a duplicate key the first value.
        values: by path of keys and indices, the position of the value.
        keys: by path of a value, the position of its key.
        problems: errors of the YAML itself (syntax, duplicate keys, tags).
    """

    name: str
    lines: list[str]
    data: Any = None
    values: dict[Location, Position] = field(default_factory=dict)
    keys: dict[Location, Position] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def is_profile(self) -> bool:
        """Whether the file is meant as a profile: a key names it, or begins a line of a file with errors."""
        if isinstance(self.data, dict) and any(kind in self.data for kind in KINDS):
            return True
        return bool(self.problems) and any(map(_NAMED.match, self.lines))

    def problem(self, location: Location, message: str, hint: str = "", *, at_key: bool = False) -> Problem:
        """A problem at a path, or at the closest enclosing path that is in the file."""
        path = location
        while path:
            mark = (self.keys.get(path) if at_key else None) or self.values.get(path) or self.keys.get(path)
            if mark is not None:
                return self.problem_at(mark, message, hint)
            path = path[:-1]
        return self.problem_at(Position(0, 0), message, hint)

    def problem_at(self, mark: Position, message: str, hint: str = "") -> Problem:
        """A problem at a position: `file:line:col`, the source line, and a caret under it."""
        text = self.lines[mark.line] if mark.line < len(self.lines) else ""
        number = f"{mark.line + 1:>5} | "
        cut = max(0, mark.column - LONGEST // 2) if len(text) > LONGEST else 0
        text, column = text[cut : cut + LONGEST], mark.column - cut
        width = max(1, min(mark.width, len(text) - column))
        # Tabs are kept in front of the caret, so that it stands under its character at any tab width.
        lead = "".join("\t" if c == "\t" else " " for c in text[:column])
        excerpt = f"{number}{source_line(text)}\n{' ' * (len(number) - 2)}| {lead}{'^' * width}"
        return Problem(message, f"{self.name}:{mark.line + 1}:{mark.column + 1}", hint, excerpt)


def read_document(path: Path) -> Document:
    """Read a YAML 1.2 file; syntax errors are collected in `problems`, not raised.

    Raises:
        HardwareError: the file cannot be read, or is not text.
    """
    door = Door(str(path), HardwareError, "give a YAML file")
    return parse_document(door.text(door.content(path)), str(path))


def parse_document(text: str, name: str) -> Document:
    """Parse YAML 1.2 text; see `read_document`."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    document = Document(name, text.splitlines())
    try:
        root = YAML(typ="safe", pure=True).compose(io.StringIO(text))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = Position(mark.line, mark.column) if mark else Position(0, 0)
        what = error.problem or error.context or "cannot be parsed"
        what = f"{error.context} {what}" if what.startswith("but ") else what
        document.problems.append(document.problem_at(where, f"not valid YAML: {what}"))
        return document
    except YAMLError as error:
        document.problems.append(document.problem_at(Position(0, 0), f"not valid YAML: {str(error).splitlines()[0]}"))
        return document
    except RecursionError:
        document.problems.append(document.problem_at(Position(0, 0), _TOO_MUCH, "a profile is a few levels deep"))
        return document
    except Exception as error:  # of the library alone: it stumbles over text that is no YAML 1.1 or 1.2 in many ways
        what = " ".join(f"{type(error).__name__} {error}".split())
        document.problems.append(document.problem_at(Position(0, 0), f"not valid YAML: {what}", "write YAML 1.2"))
        return document
    if root is None:
        document.problems.append(document.problem_at(Position(0, 0), "the file is empty"))
        return document
    document.data = _construct(document, root, ())
    return document


def _construct(document: Document, node: Any, path: Location) -> Any:  # noqa: ANN401
    """Plain data of a YAML node; records the positions of it and of all nodes inside."""
    document.values.setdefault(path, _mark(node))
    if len(path) > _MAX_DEPTH or len(document.values) > _MAX_VALUES:
        if not any(p.message == _TOO_MUCH for p in document.problems):
            document.problems.append(document.problem_at(_mark(node), _TOO_MUCH, "write aliases out, without cycles"))
        return None
    kind = type(node).__name__
    if kind == "MappingNode":
        return _mapping(document, node, path)
    if kind == "SequenceNode":
        return [_construct(document, child, (*path, i)) for i, child in enumerate(node.value)]
    return _scalar(document, node)


def _mapping(document: Document, node: Any, path: Location) -> dict[str, Any]:  # noqa: ANN401
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if type(key_node).__name__ != "ScalarNode":
            document.problems.append(document.problem_at(_mark(key_node), "a key must be a plain word"))
            continue
        key = str(key_node.value)
        if key in mapping:
            first = document.keys[(*path, key)].line + 1
            hint = f"first given in line {first}: keep one"
            document.problems.append(document.problem_at(_mark(key_node), f"duplicate key {key!r}", hint))
            continue
        document.keys[(*path, key)] = _mark(key_node)
        if not value_node.value and value_node.start_mark.line != key_node.start_mark.line:
            # The value is empty: the parser would give the position of the next key.
            document.values[(*path, key)] = _mark(key_node)
        mapping[key] = _construct(document, value_node, (*path, key))
    return mapping


def _mark(node: Any) -> Position:  # noqa: ANN401
    start, end = node.start_mark, node.end_mark
    width = end.column - start.column if end.line == start.line else 1
    return Position(start.line, start.column, max(1, width))


def _scalar(document: Document, node: Any) -> str | int | float | bool | None:  # noqa: ANN401
    tag, text = str(node.tag).removeprefix("tag:yaml.org,2002:"), str(node.value)
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag in ("int", "float"):
        number = _number(text)
        if isinstance(number, int | float) and not abs(number) < LARGEST:
            shown = text if len(text) <= LONGEST // 4 else f"a number of {len(text)} characters"
            message = f"{shown} is beyond what can be read: whole numbers have 64 bits, others are finite"
            document.problems.append(document.problem_at(_mark(node), message))
        return number
    if tag.startswith("!"):
        document.problems.append(document.problem_at(_mark(node), f"tag {tag!r} has no meaning here", "remove it"))
    return text


def _number(text: str) -> str | int | float:
    for read in (int, lambda t: int(t, 0), float):
        try:
            return read(text.replace("_", ""))
        except ValueError:
            continue
    return text


_SOURCES = "sources.yaml"
_TABLES = (_SOURCES, "errors.yaml")
"""Files in the folder that describe no cluster."""


@cache
def profile_folder() -> Path:
    """The folder of the bundled profiles: in the installed package, or next to it in a checkout.

    Raises:
        HardwareError: there is no such folder.
    """
    return _folder_of(Path(__file__).resolve().parents[1])


def _folder_of(package: Path) -> Path:
    for folder in (package / "hardware_profiles", package.parent / "hardware_profiles"):
        if (folder / _SOURCES).is_file():
            return folder
    raise HardwareError("the bundled hardware profiles are missing", where=str(package), hint="install shardplan again")


def cluster_names() -> tuple[str, ...]:
    """Names of the bundled clusters, sorted."""
    return _names("")


def device_names() -> tuple[str, ...]:
    """Names of the bundled devices, sorted."""
    return _names("devices")


def stack_names() -> tuple[str, ...]:
    """Names of the bundled stacks, sorted."""
    return _names("stacks")


def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(p.stem for p in (profile_folder() / folder).glob("*.yaml") if p.name not in _TABLES))


def bundled_path(name: str) -> Path | None:
    """The file of a bundled cluster, device or stack; None when none has that name."""
    folders = ("", "devices", "stacks")
    return next((profile_folder() / folder / f"{name}.yaml" for folder in folders if name in _names(folder)), None)


@cache
def citations() -> dict[str, str]:
    """By short name, the citations that every profile may use."""
    data = read_document(profile_folder() / _SOURCES).data
    return {str(key): str(text) for key, text in data.items()}


def looks_like_path(text: str) -> bool:
    """Whether an argument is a path, not a name."""
    return text.endswith(YAML_SUFFIXES) or "/" in text or "\\" in text

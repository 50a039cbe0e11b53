"""Formats of model files: what an importer is, what it may be told, and which one reads a file.

Published instances of partition problems are JSON documents, read as dataclasses with all faults of a file at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Le

from planner.documents import adapter
from planner.errors import ModelError, Problem
from planner.files import LARGEST_FIGURE
from planner.foreign_files import Door
from planner.graph import Graph, Note, NoteLevel
from planner.json_text import readable
from planner.registry import Registry

HEAD_BYTES = 4096
"""How much of a file's beginning a format may look at to recognise it."""


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of model file.

    Attributes:
        title: what a person calls it.
        suffixes: file name endings that usually mean this format, lower case with the dot.
        sniff: whether a file with these first bytes (at most `HEAD_BYTES`) is of this format.
        load: reads the file; gets the path, sizes of symbolic axes and whether operators stay as the file
            has them (`load_graph`), and raises `ModelError`.
    """

    title: str
    suffixes: tuple[str, ...]
    sniff: Callable[[bytes], bool]
    load: Callable[[Path, Mapping[str, int], bool], Graph]


FORMATS: Registry[Format] = Registry("planner.importers", "model format")
"""All formats by name; a module of this package registers its own when first looked up."""


_NO_DIMS: Mapping[str, int] = {}


def load_graph(path: str | Path, *, dims: Mapping[str, int] | None = None, as_written: bool = False) -> Graph:
    """Read a model file as a graph; the format is chosen by content, then by file name.

    Args:
        path: the model file. Weight files beside it are not needed and never read.
        dims: sizes of symbolic axes by name (`{"batch": 8}`), and trip counts of loops that do not say theirs.
        as_written: keep the operators that the file has; else those that an exporter wrote out as many become one.

    Raises:
        ModelError: the file is missing, of no known format, damaged, or leaves a needed shape open.
    """
    file = Path(path)
    with in_file(file):
        return _format_of(file, _head(file)).load(file, dims or _NO_DIMS, as_written)


@contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Let errors of a model that name no place name a file."""
    try:
        yield
    except ModelError as error:
        problem = error.problem
        if problem.where:
            raise
        raise ModelError(problem.message, where=str(path), hint=problem.hint) from None


def some(items: Iterable[object], shown: int = 8) -> str:
    """The first of some things, and how many more there are."""
    texts = [str(item) for item in items]
    return ", ".join(texts[:shown]) + (f" and {len(texts) - shown} more" if len(texts) > shown else "")


def damaged(message: str) -> ModelError:
    """The error of a file that contradicts itself."""
    return ModelError(message, hint="the file is damaged: export it again")


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except FileNotFoundError:
        raise ModelError("no such model file", hint="check the path") from None
    except IsADirectoryError:
        raise ModelError("is a folder, not a model file", hint="name the file inside it") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"cannot be read: {reason}", hint="check path and permissions") from None
    if not head:
        raise ModelError("the file is empty", hint="export or copy the model again")
    return head


def _format_of(file: Path, head: bytes) -> Format:
    formats = [entry for _, entry in FORMATS.items()]
    for entry in formats:
        if entry.sniff(head):
            return entry
    for entry in formats:
        if file.suffix.lower() in entry.suffixes:
            return entry
    known = ", ".join(f"{entry.title} ({' '.join(entry.suffixes)})" for entry in formats)
    raise ModelError("not a model file of a known format", hint=f"formats that can be read: {known}")


T = TypeVar("T")

MOST_INSTANCE_DEVICES = 4096
"""Devices of one kind that an instance of a partition problem may ask for: more could not be told apart in time."""

Figure = Annotated[float, Ge(0), Le(LARGEST_FIGURE)]
"""A time, size or rate of a file."""


def keyed(**keys: str) -> dict[str, Any]:
    """Configuration of a dataclass that is read from JSON: the file's keys by attribute, where they are other ones."""
    return {"strict": True, "allow_inf_nan": False, "alias_generator": lambda name: keys.get(name, name)}


@dataclass
class Findings:
    """Faults of a file, which are raised together, and notes on what was assumed.

    Attributes:
        where: the file, for messages; may be empty.
        problems: what is wrong.
        notes: what was left out or assumed.
    """

    where: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def wrong(self, path: str, message: str, hint: str = "") -> None:
        """Add a fault of what lies at a path of the document."""
        self.problems.append(Problem(message, ": ".join(filter(None, (self.where, path))), hint))

    def stop(self) -> None:
        """Raise all faults so far, if there are any.

        Raises:
            ModelError: there are some.
        """
        if self.problems:
            first = self.problems[0]
            raise ModelError(first.message, where=first.where, hint=first.hint, problems=self.problems)

    def note(self, level: NoteLevel, code: str, message: str, where: str = "") -> None:
        """Add a note, by default on the whole file."""
        self.notes.append(Note(level, code, message, where or self.where))

    def decoded(self, document: object, kind: type[T]) -> T:
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
                self.wrong(readable(each["loc"]), "is missing" if each["type"] == "missing" else fault)
            self.stop()
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

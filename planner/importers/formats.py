"""Formats of model files: what an importer is, what it may be told, and which one reads a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from planner.errors import ModelError, Problem
from planner.graph import Graph, Note, NoteLevel
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

"""Formats of model files: what an importer is, what it may be told, and which one reads a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planner.errors import ModelError
from planner.graph import Graph
from planner.registry import Registry

HEAD_BYTES = 4096
"""How much of a file's beginning a format may look at to recognise it."""


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """Choices that a file leaves open.

    Attributes:
        ties: which separate weight tensors are copies of each other. "auto" decides by the conventions of known model
            families, "none" leaves all apart, and pairs of parameter names or labels `(copy, original)` say it exactly.
        keep_final_softmax: price a Softmax that ends the graph; else it is left out, since training works on logits.
        as_written: keep the operators that the file has; else those that an exporter wrote out as many become one.
    """

    ties: str | tuple[tuple[str, str], ...] = "auto"
    keep_final_softmax: bool = False
    as_written: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of model file.

    Attributes:
        title: what a person calls it.
        suffixes: file name endings that usually mean this format, lower case with the dot.
        sniff: whether a file with these first bytes (at most `HEAD_BYTES`) is of this format.
        load: reads the file; gets the path, sizes of symbolic axes and the options, and raises `ModelError`.
    """

    title: str
    suffixes: tuple[str, ...]
    sniff: Callable[[bytes], bool]
    load: Callable[[Path, Mapping[str, int], ImportOptions], Graph]


FORMATS: Registry[Format] = Registry("planner.importers", "model format")
"""All formats by name; a module of this package registers its own when first looked up."""


_NO_DIMS: Mapping[str, int] = {}


def load_graph(
    path: str | Path, *, dims: Mapping[str, int] | None = None, options: ImportOptions | None = None
) -> Graph:
    """Read a model file as a graph; the format is chosen by content, then by file name.

    Args:
        path: the model file. Weight files beside it are not needed and never read.
        dims: sizes of symbolic axes by name (`{"batch": 8}`), and trip counts of loops that do not say theirs.
        options: choices that the file leaves open.

    Raises:
        ModelError: the file is missing, of no known format, damaged, or leaves a needed shape open.
    """
    file = Path(path)
    with in_file(file):
        return _format_of(file, _head(file)).load(file, dims or _NO_DIMS, options or ImportOptions())


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

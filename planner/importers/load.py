"""Find the format of a model file and read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from planner.errors import ModelError
from planner.graph import Graph
from planner.importers.types import FORMATS, HEAD_BYTES, Format, ImportOptions

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
    head = _head(file)
    return _format_of(file, head).load(file, dims or _NO_DIMS, options or ImportOptions())


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            head = stream.read(HEAD_BYTES)
    except FileNotFoundError:
        raise ModelError("no such model file", where=str(file), hint="check the path") from None
    except IsADirectoryError:
        raise ModelError("is a folder, not a model file", where=str(file), hint="name the file inside it") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelError(f"cannot be read: {reason}", where=str(file), hint="check path and permissions") from None
    if not head:
        raise ModelError("the file is empty", where=str(file), hint="export or copy the model again")
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
    raise ModelError("not a model file of a known format", where=str(file), hint=f"formats that can be read: {known}")

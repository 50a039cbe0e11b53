"""Write files atomically; `-` is standard output, and standard input when reading."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, TextIO

from planner.errors import OutputError
from planner.processes import tidied

STANDARD = "-"
"""The name of standard output, and of standard input."""
_output: ContextVar[TextIO | None] = ContextVar("output", default=None)
"""The real standard output while `talk_aside` redirects prints to standard error."""


@contextlib.contextmanager
def talk_aside() -> Iterator[None]:
    """Redirect prints to standard error, so that standard output has only the file written to `-`."""
    token = _output.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _output.reset(token)


def input_bytes() -> bytes:
    """All of standard input; later calls return the same bytes."""
    return _all_of(sys.stdin.buffer)


@functools.lru_cache(maxsize=1)
def _all_of(stream: BinaryIO) -> bytes:
    return stream.read()


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a temporary file and rename it, so that a failure leaves no half-written file.

    `-` writes to standard output. A symbolic link is followed and its target replaced; an existing file keeps its
    permissions. A device or pipe is written to in place.

    Raises:
        OutputError: the folder is missing or the file cannot be written.
    """
    try:
        data = content.encode() if isinstance(content, str) else content
        if str(path) != STANDARD:
            _write_file(path, data)
            return
    except (OSError, ValueError) as error:  # a name with a null byte, or half a character in a text, is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(
            f"cannot write: {reason}", where=str(path), hint="choose a folder that exists and is writable"
        ) from error
    stream = _output.get() or sys.stdout
    stream.flush()
    stream.buffer.write(data)
    stream.flush()


def _write_file(path: str | Path, data: bytes) -> None:
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        with open(path, "wb") as special:
            special.write(data)
    else:
        _replace(Path(os.path.realpath(path)), data, mode)


def _mode(path: str | Path) -> int | None:
    """`st_mode` of the target of a path; None if it does not exist."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    """Replace or create a regular file, with the permissions `mode` of the old one."""
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError("the file is write-protected")
    with tidied():
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, stat.S_IMODE(mode) if mode is not None else 0o666 & ~_umask())
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


LARGEST_FIGURE = 1e18
"""Largest byte count, time or count that a figure of an instance may be; sums of a million of them stay exact enough
and far from the largest float."""


def is_figure(value: object) -> bool:
    """True if a value can be a size, a time or a count: a number from 0 to `LARGEST_FIGURE`, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST_FIGURE

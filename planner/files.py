"""Results written whole or not at all; `-` stands for standard output and standard input."""

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

STANDARD = "-"
"""The name of standard output, and of standard input."""
_output: ContextVar[TextIO | None] = ContextVar("output", default=None)
"""Standard output while what is printed goes elsewhere."""


@contextlib.contextmanager
def talk_aside() -> Iterator[None]:
    """Let what is printed go to standard error, so that standard output has nothing but the file named `-`."""
    token = _output.set(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _output.reset(token)


def input_bytes() -> bytes:
    """All of standard input, however often it is asked for."""
    return _all_of(sys.stdin.buffer)


@functools.lru_cache(maxsize=1)
def _all_of(stream: BinaryIO) -> bytes:
    return stream.read()


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file by way of a temporary one beside it, so that a failure leaves nothing half-written.

    `-` is standard output.
    A link is followed, and the file that it leads to is replaced; a file that is there keeps its permissions. What is
    no regular file (a device, a pipe) is written to as it is and never replaced.

    Raises:
        OutputError: the folder is missing or the file cannot be written.
    """
    try:
        data = content.encode() if isinstance(content, str) else content
        if str(path) == STANDARD:
            stream = _output.get() or sys.stdout
            stream.flush()
            stream.buffer.write(data)
            stream.flush()
            return
        mode = _mode(path)
        if mode is not None and not stat.S_ISREG(mode):
            with open(path, "wb") as special:
                special.write(data)
        else:
            _replace(Path(os.path.realpath(path)), data, mode)
    except (OSError, ValueError) as error:  # a name with a null byte, or half a character in a text, is a ValueError
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(
            f"cannot write: {reason}", where=str(path), hint="choose a folder that exists and is writable"
        ) from error


def _mode(path: str | Path) -> int | None:
    """Kind and permissions of what a path leads to; None where there is nothing."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    """Put a regular file in its place, with the permissions of the one before."""
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError("the file is write-protected")
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

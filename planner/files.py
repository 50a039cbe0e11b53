"""Write files atomically, and read JSON strictly.

`-` is standard output, and standard input when reading. JSON is refused where Python's reader accepts what no 64-bit
program can hold, and every error has its place.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, TextIO

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


MOST_DIGITS = 19
"""Maximum number of digits of a whole number of 64 bits."""
LARGEST_FIGURE = 1e18
"""Largest byte count, time or count that a figure of an instance may be; sums of a million of them stay exact enough
and far from the largest float."""

Pairs = list[tuple[str, Any]]


class JsonError(Exception):
    """An error in a JSON text, with its position.

    Args:
        message: what is wrong.
        line: its line, from 1.
        column: its column, from 1.
    """

    def __init__(self, message: str, line: int, column: int) -> None:
        self.message, self.line, self.column = message, line, column
        super().__init__(f"{message} (line {line}, column {column})")


def read_json(text: str | bytes, *, pairs: Callable[[Pairs], dict[str, Any]] = dict) -> Any:  # noqa: ANN401
    """The value of a JSON text.

    Args:
        text: the text; bytes are UTF-8, with or without a byte order mark.
        pairs: turns the keys and values of an object into a dict.

    Raises:
        JsonError: not JSON, not UTF-8, nested too deeply, a whole number of more than 64 bits, or a number that is not
            finite.
    """
    try:
        content = text if isinstance(text, str) else text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonError("not UTF-8 text", 1, error.start + 1) from None
    unreadable: list[str] = []

    def whole(digits: str) -> int:
        if len(digits.lstrip("-")) <= MOST_DIGITS and -(1 << 63) <= int(digits) < 1 << 63:
            return int(digits)
        unreadable.append(digits)
        return 0

    def real(digits: str) -> float:
        if not math.isfinite(float(digits)):
            unreadable.append(digits)
        return float(digits)

    def constant(name: str) -> float:
        unreadable.append(name)
        return 0.0

    try:
        value = json.loads(content, object_pairs_hook=pairs, parse_int=whole, parse_float=real, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise JsonError(f"not JSON: {error.msg}", error.lineno, error.colno) from None
    except RecursionError:
        raise JsonError("nested too deeply", 1, 1) from None
    if unreadable:
        raise _out_of_range(content, unreadable[0])
    return value


def _out_of_range(content: str, literal: str) -> JsonError:
    at = content.find(literal)
    line, column = content.count("\n", 0, at) + 1, at - content.rfind("\n", 0, at)
    if literal in ("NaN", "Infinity", "-Infinity"):
        return JsonError(f"{literal} is not JSON", line, column)
    shown = literal if len(literal) <= 2 * MOST_DIGITS else f"a number of {len(literal)} characters"
    return JsonError(f"{shown} is beyond what can be read: whole numbers have 64 bits, others are finite", line, column)


def is_figure(value: object) -> bool:
    """True if a value can be a size, a time or a count: a number from 0 to `LARGEST_FIGURE`, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST_FIGURE

"""Results written whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from planner.errors import OutputError


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file by way of a temporary one beside it, so that a failure leaves nothing half-written.

    A link is followed, and the file that it leads to is replaced; a file that is there keeps its permissions. What is
    no regular file (a device, a pipe) is written to as it is and never replaced.

    Raises:
        OutputError: the folder is missing or the file cannot be written.
    """
    try:
        data = content.encode() if isinstance(content, str) else content
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

"""Results written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from planner.errors import OutputError


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a file by way of a temporary one beside it, so that a failure leaves nothing half-written.

    Raises:
        OutputError: the folder is missing or the file cannot be written.
    """
    target = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        reason = error.strerror or str(error)
        raise OutputError(
            f"cannot write: {reason}", where=str(target), hint="choose a folder that exists and is writable"
        ) from error


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current

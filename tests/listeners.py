"""Processes of a test, and what they listen on: read from /proc, as `ss -ltnp` does."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

LISTENING = "0A"
needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc to read")


def tree(root: int) -> list[int]:
    """A process and all that it started, by number."""
    parents = {pid: parent for pid in _processes() if (parent := _parent(pid))}
    members = [root]
    for pid in members:
        members += [child for child, parent in parents.items() if parent == pid]
    return members


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _parent(pid: int) -> int:
    """The parent's number; 0 for a process that has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return 0
    return 0 if state in "ZX" else int(parent)


def is_running(pid: int) -> bool:
    """Whether a process has not ended."""
    return _parent(pid) > 0


def listeners(pids: list[int]) -> set[str]:
    """Addresses on which some processes listen for TCP connections."""
    sockets = {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in sockets:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def _sockets(pid: int) -> Iterator[str]:
    """Inodes of a process's sockets."""
    folder = f"/proc/{pid}/fd"
    try:
        links = [os.readlink(f"{folder}/{name}") for name in os.listdir(folder)]
    except OSError:
        return
    yield from (link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:["))


def _address(text: str) -> str:
    """An address of the kernel's tables: words of four bytes, each in the order of the machine."""
    raw = b"".join(bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8))
    return str(ipaddress.ip_address(raw))


def until(holds: Callable[[], object], seconds: float = 30.0) -> bool:
    """Wait until something holds; False if it does not within some seconds."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True

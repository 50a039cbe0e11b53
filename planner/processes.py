"""Processes and temporary folders of this program: none is left behind, however the program ends.

Processes that were started by `multiprocessing` end with the one that started them, also when that is killed. Temporary
folders are removed at the normal end, at an error, and at the signals that ask a program to end (SIGINT, SIGTERM,
SIGHUP).
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import NoReturn

from planner.errors import OutputError

ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
"""Signals that ask the program to end, beside SIGINT, which Python raises as `KeyboardInterrupt`."""
_Handler = Callable[[int, FrameType | None], NoReturn] | signal.Handlers
_PARENT_DEATH_SIGNAL = 1
"""`PR_SET_PDEATHSIG` of prctl(2)."""


class _EndedBySignalError(BaseException):
    """A signal asked the program to end; raised where the program is, so that its `finally` clauses run.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Handler of the signals: further ones are ignored until all is tidy."""
    _set_handlers(_handled(), signal.SIG_IGN)
    raise _EndedBySignalError(number)


def _handled() -> tuple[int, ...]:
    """The signals that raise where the program is, at the moment."""
    return tuple(number for number in ENDING if signal.getsignal(number) is _end)


def _set_handlers(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], NoReturn] | signal.Handlers
) -> None:
    for number in numbers:
        signal.signal(number, handler)


@contextlib.contextmanager
def tidied() -> Iterator[None]:
    """Context whose `finally` clauses run when a signal ends the program, which then ends by that signal.

    Signals that the caller ignores (`nohup`) or handles are left as they are, as are all outside the main thread.
    """
    own = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    if not own or threading.current_thread() is not threading.main_thread():
        yield
        return
    _set_handlers(own, _end)
    try:
        yield
    except _EndedBySignalError as ended:
        _set_handlers(own, signal.SIG_DFL)
        os.kill(os.getpid(), ended.number)
        raise
    finally:
        _set_handlers(own, signal.SIG_DFL)


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """A temporary folder that only this user can read, removed at the end of the context and at ending signals.

    Args:
        name: what it is for, a part of the folder's name.

    Raises:
        OutputError: it cannot be created.
    """
    folder = Path(tempfile.gettempdir()) / f"shardplan-{name}-{secrets.token_hex(8)}"  # known before it is there
    with tidied():
        try:
            try:
                folder.mkdir(mode=0o700)
            except OSError as error:
                message = f"cannot make a temporary folder: {error.strerror}"
                raise OutputError(message, where=str(folder), hint="make room, or set TMPDIR") from error
            yield folder
        finally:
            if folder.exists():
                shutil.rmtree(folder)


def end(processes: Collection[BaseProcess], *, grace_s: float = 0.0) -> None:
    """Wait some seconds, together, for processes to exit, and kill those that do not."""
    until = time.monotonic() + grace_s
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def end_with_parent() -> None:
    """Let this process, which `multiprocessing` started, be killed when the process that started it has ended.

    To be called first. SIGTERM and SIGHUP end the process at once, since what there is to tidy is the parent's; SIGINT,
    which a terminal sends to both, is left to the parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _set_handlers(_handled(), signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if sys.platform == "linux" and os.getppid() == parent.pid:
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent.pid:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: BaseProcess) -> None:
    """Wait for the end of the parent process, then kill this one."""
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)

"""One mutated input: made from a seed, read by the commands under limits, and judged."""

from __future__ import annotations

import contextlib
import io
import random
import resource
import signal
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from cli.main import main
from planner import ShardplanError
from tests.fuzz.formats import FORMATS, SLOW_FORMATS, Trial

CPU_S = 10.0
"""Seconds of computing that one command may take."""
MEMORY_BYTES = 1 << 30
"""Memory that a trial may take beyond what the process has."""
_ERRORS = ("strict", "backslashreplace")
"""How standard output and standard error treat what cannot be encoded."""


class _OvertimeError(BaseException):
    """A command took too long; no `except Exception` can swallow it."""


@dataclass(frozen=True)
class Fault:
    """What went wrong: the trial, the command line, the error, and where it was raised."""

    name: str
    line: Trial
    error: str
    where: str

    def __str__(self) -> str:
        return f"{self.name}: {self.error} at {self.where}: {self.line if callable(self.line) else ' '.join(self.line)}"


def trial(kind: str, seed: int) -> Fault | None:
    """Mutate a file of a format and read it; None where all commands end in a result or in an error of their own."""
    rng = random.Random(f"{kind} {seed}")
    form = (FORMATS | SLOW_FORMATS)[kind]
    with tempfile.TemporaryDirectory() as folder:
        for line in form.make(Path(folder) / f"mutated{form.suffix}", rng):
            fault = _run(f"{kind}:{seed}", line)
            if fault:
                return fault
    return None


def _run(name: str, line: Trial) -> Fault | None:
    before = signal.signal(signal.SIGPROF, _overtime)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors) for errors in _ERRORS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            line() if callable(line) else main([*line, "--debug"])
    except SystemExit as end:
        if end.code == 70:
            return Fault(name, line, "exit code 70", "cli")
    except ShardplanError as error:
        if "\n" in str(error):
            return Fault(name, line, f"an error of several lines: {str(error)[:200]!r}", _place(error))
    except (Exception, _OvertimeError) as error:
        return Fault(name, line, f"{type(error).__name__}: {str(error)[:200]}", _place(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return None


def _overtime(number: int, frame: FrameType | None) -> None:
    raise _OvertimeError(f"more than {CPU_S:g} s")


def _place(error: BaseException) -> str:
    """The last frame in the program's own code, and the last one of all."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/planner/" in f.filename or "/cli/" in f.filename]
    shown = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in [*own[-2:], *frames[-1:]]]
    return " > ".join(dict.fromkeys(shown))


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let this process take `MEMORY_BYTES` more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def names(count: int, first: int, kinds: tuple[str, ...]) -> list[tuple[str, int]]:
    """Format and seed of so many trials, formats by their shares."""
    forms = {kind: (FORMATS | SLOW_FORMATS)[kind] for kind in kinds}
    whole = sum(form.share for form in forms.values())
    return [(kind, first + i) for kind, form in forms.items() for i in range(round(count * form.share / whole))]

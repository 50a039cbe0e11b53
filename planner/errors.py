"""Every error that a user can cause: what went wrong, where, and what to do about it.

Each kind has an exit code of its own, so that scripts can tell a bad file from a model that does not fit.
Errors are raised by the library and turned into one line on standard error by the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LONGEST = 4000
"""Characters of an error's line at the most; what a file says may be of any length."""


def one_line(text: str) -> str:
    """A text with its control characters written out, and without its middle where it is too long for a line."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding inside a file or an option: where it is, what is wrong, and how to mend it."""

    message: str
    where: str = ""
    hint: str = ""
    excerpt: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return one_line(f"{text} ({self.hint})" if self.hint else text)


class ShardplanError(Exception):
    """Base of all errors a user can cause.

    Args:
        message: what is wrong, one line.
        where: file, file:line:column, node name or field path.
        hint: what to do about it.
        problems: further findings of the same kind, when a file has several.
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str = "", hint: str = "", problems: Sequence[Problem] = ()) -> None:
        self.problem = Problem(message, where, hint)
        self.problems = tuple(problems)
        super().__init__(str(self.problem))


class UsageError(ShardplanError):
    """An option or argument that cannot be used (exit code 2, as click's own)."""

    exit_code = 2


class ModelError(ShardplanError):
    """A model that cannot be read, or read far enough to price it (exit code 3)."""

    exit_code = 3


class HardwareError(ShardplanError):
    """A hardware profile that cannot be found or is wrong (exit code 4)."""

    exit_code = 4


class JobError(ShardplanError):
    """A job that makes no sense, such as a global batch that no micro-batch divides (exit code 5)."""

    exit_code = 5


class InfeasibleError(ShardplanError):
    """No plan fits: the smallest set of reasons, in the user's terms (exit code 6)."""

    exit_code = 6


class PlanError(ShardplanError):
    """A plan file that is malformed, inconsistent, or made for something else (exit code 7)."""

    exit_code = 7


class RunError(ShardplanError):
    """A run of a plan that failed, or whose gradients are not the model's (exit code 10)."""

    exit_code = 10


class OutputError(ShardplanError):
    """A result that cannot be written (exit code 8)."""

    exit_code = 8


def whole(least: int = 1, **values: float) -> None:
    """Refuse counts that are not whole numbers of at least `least`.

    Raises:
        UsageError: names the argument.
    """
    for name, value in values.items():
        if value != int(value) or value < least:
            raise UsageError(f"{name} is {value}", hint=f"use a whole number, {least} or more")


def positive(**values: float) -> None:
    """Refuse figures that are not above 0.

    Raises:
        UsageError: names the argument.
    """
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{name} is {value}", hint="use a value above 0")


def divides(of: str, whole_count: int, by: str, parts: int) -> None:
    """Refuse a count that cannot be cut in equal parts.

    Raises:
        UsageError: names both.
    """
    if parts < 1 or whole_count % parts:
        raise UsageError(f"{whole_count} {of} are not a multiple of {parts} {by}", hint=f"change {of} or {by}")


def same_length(**columns: Iterable[object]) -> int:
    """The common length of some columns.

    Raises:
        UsageError: they differ, or are empty.
    """
    lengths = {name: len(list(column)) for name, column in columns.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        told = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise UsageError(f"one figure for each is needed, not {told}", hint="give columns of equal length")
    return next(iter(lengths.values()))

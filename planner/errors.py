"""Errors that a user can cause: what went wrong, where, and what to do about it.

Each kind has an exit code of its own, so that scripts can tell a bad file from a model that does not fit.
Errors are raised by the library and turned into one line on standard error by the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.escaping import visible

LONGEST = 4000
"""Maximum number of characters of an error's line, since it may quote a file."""


def one_line(text: str) -> str:
    """A text as one visible line; its middle is cut out if it is longer than `LONGEST`."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"
    return visible(text)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in a file or an option: its place, what is wrong, and a remedy."""

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
        problems: further errors of the same kind, if a file has several.
    """

    exit_code = 1

    def __init__(self, message: str, *, where: str = "", hint: str = "", problems: Sequence[Problem] = ()) -> None:
        self.problem = Problem(message, where, hint)
        self.problems = tuple(problems)
        super().__init__(str(self.problem))


class UsageError(ShardplanError):
    """An option or argument is invalid (exit code 2, like click's own errors)."""

    exit_code = 2


class ModelError(ShardplanError):
    """A model cannot be read, or has a part that cannot be priced (exit code 3)."""

    exit_code = 3


class HardwareError(ShardplanError):
    """A hardware profile is missing or invalid (exit code 4)."""

    exit_code = 4


class JobError(ShardplanError):
    """A job contradicts itself, such as a global batch that no micro-batch divides (exit code 5)."""

    exit_code = 5


class InfeasibleError(ShardplanError):
    """No plan fits; the message has the smallest set of reasons, in the user's terms (exit code 6)."""

    exit_code = 6


class PlanError(ShardplanError):
    """A plan file is malformed, inconsistent, or made for another model or cluster (exit code 7)."""

    exit_code = 7


class RunError(ShardplanError):
    """A run of a plan failed, or its gradients differ from the model's (exit code 10)."""

    exit_code = 10


class OutputError(ShardplanError):
    """A result cannot be written (exit code 8)."""

    exit_code = 8


def whole(least: int = 1, **values: float) -> None:
    """Refuse values that are not whole numbers of at least `least`.

    Raises:
        UsageError: names the argument.
    """
    for name, value in values.items():
        if value != int(value) or value < least:
            raise UsageError(f"{name} is {value}", hint=f"use a whole number, {least} or more")


def positive(**values: float) -> None:
    """Refuse values that are not above 0.

    Raises:
        UsageError: names the argument.
    """
    for name, value in values.items():
        if not value > 0:
            raise UsageError(f"{name} is {value}", hint="use a value above 0")


def divides(of: str, whole_count: int, by: str, parts: int) -> None:
    """Refuse a count that is no multiple of a number of parts.

    Raises:
        UsageError: names both.
    """
    if parts < 1 or whole_count % parts:
        raise UsageError(f"{whole_count} {of} are not a multiple of {parts} {by}", hint=f"change {of} or {by}")


def same_length(**columns: Iterable[object]) -> int:
    """The common length of columns.

    Raises:
        UsageError: the lengths differ, or the columns are empty.
    """
    lengths = {name: len(list(column)) for name, column in columns.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        listed = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise UsageError(f"one figure for each is needed, not {listed}", hint="give columns of equal length")
    return next(iter(lengths.values()))

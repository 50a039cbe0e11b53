"""Checks of arguments that the closed forms share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from planner.errors import UsageError
from planner.registry import did_you_mean

T = TypeVar("T")


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


def chosen(what: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of that name.

    Raises:
        UsageError: there is none; the hint names the closest ones.
    """
    if name not in table:
        raise UsageError(f"unknown {what} {name!r}", hint=did_you_mean(name, table))
    return table[name]


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

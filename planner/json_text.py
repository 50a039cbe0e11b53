"""Read JSON strictly: refuse what Python's reader accepts but no 64-bit program can hold, and locate every error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

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

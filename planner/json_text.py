"""JSON as text: strict reading, and the line and column of what stands in it.

Refused is what Python's reader accepts and no other program can hold: numbers beyond 64 bits or not finite, halves of
characters, keys that stand twice in an object, and nesting that would exhaust the stack of whoever reads the value.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

MOST_DIGITS = 19
"""Maximum number of digits of a whole number of 64 bits."""
MOST_DEPTH = 64
"""Deepest nesting of lists and objects that is read."""

KeyPath = tuple[str | int, ...]
"""Keys and positions from the whole document to a value."""
_Pairs = list[tuple[str, Any]]

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')
"""A string, a bracket, a separator, or a number or word."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""The escape of half a character; the other half may follow."""


class JsonError(Exception):
    """An error in a JSON text, with its position.

    Args:
        message: what is wrong.
        line: its line, from 1.
        column: its column, from 1.
        hint: what to do about it; "" where the message says it.
    """

    def __init__(self, message: str, line: int, column: int, hint: str = "") -> None:
        self.message, self.line, self.column, self.hint = message, line, column, hint
        super().__init__(f"{message} (line {line}, column {column})")


def read_json(text: str, *, any_number: bool = False) -> Any:  # noqa: ANN401
    """The value of a JSON text.

    Args:
        text: the text.
        any_number: whole numbers of more than 64 bits are infinite, and `Infinity` and `NaN` are read, as Python's own
            writer has them: for files of which few keys are read.

    Raises:
        JsonError: not JSON, nested deeper than `MOST_DEPTH`, half a character, a key that stands twice in an object, or
            unless any number is taken a whole number of more than 64 bits or one that is not finite.
    """
    unreadable: list[str] = []
    repeated: list[str] = []

    def whole(digits: str) -> float:
        if len(digits.lstrip("-")) <= MOST_DIGITS and -(1 << 63) <= int(digits) < 1 << 63:
            return int(digits)
        unreadable.append(digits)
        return math.copysign(math.inf, -1 if digits[0] == "-" else 1)

    def real(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            unreadable.append(digits)
        return value

    def constant(name: str) -> float:
        unreadable.append(name)
        return float(name)

    def pairs(items: _Pairs) -> dict[str, Any]:
        by_key = dict(items)
        if len(by_key) < len(items):
            repeated.extend(key for key in by_key if sum(key == other for other, _ in items) > 1)
        return by_key

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_int=whole, parse_float=real, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise JsonError(f"not JSON: {error.msg}", error.lineno, error.colno) from None
    except RecursionError:
        _too_deep(text)
    if _is_deep(value):
        _too_deep(text)
    if unreadable and not any_number:
        _out_of_range(text, unreadable[0])
    if repeated:
        _twice(text, repeated[0])
    if _HALF.search(text):
        _refuse_halves(text)
    return value


def _is_deep(value: object) -> bool:
    """True if lists and objects are nested deeper than `MOST_DEPTH`; O(values), without recursion."""
    level: list[Any] = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_DEPTH):
        level = [
            child
            for holder in level
            for child in (holder.values() if type(holder) is dict else holder)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return False
    return True


def _too_deep(text: str) -> NoReturn:
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token[0] in "[{") - (token[0] in "]}")
        if depth > MOST_DEPTH:
            raise JsonError(f"nested deeper than {MOST_DEPTH} levels", *place(text, token.start())) from None
    raise JsonError(f"nested deeper than {MOST_DEPTH} levels", 1, 1) from None


def _out_of_range(text: str, literal: str) -> NoReturn:
    spot = place(text, _offset(text, lambda path, token: token == literal))
    if literal in ("NaN", "Infinity", "-Infinity"):
        raise JsonError(f"{literal} is not JSON", *spot)
    shown = literal if len(literal) <= 2 * MOST_DIGITS else f"a number of {len(literal)} characters"
    raise JsonError(f"{shown} is beyond what can be read: whole numbers have 64 bits, others are finite", *spot)


def _twice(text: str, key: str) -> NoReturn:
    seen: set[KeyPath] = set()

    def again(path: KeyPath, token: str) -> bool:
        known = path in seen and path[-1:] == (key,)
        seen.add(path)
        return known

    spot = place(text, _offset(text, again))
    raise JsonError(f"key {key!r} appears twice in one object", *spot, "remove one of them")


def _refuse_halves(text: str) -> None:
    """Refuse a text or key of which a character is only half there, which no encoding can write."""

    def half(path: KeyPath, token: str) -> bool:
        texts = [*(part for part in path[-1:] if isinstance(part, str)), json.loads(token) if token[0] == '"' else ""]
        return any("\ud800" <= char <= "\udfff" for content in texts for char in content)

    offset = _offset(text, half, -1)
    if offset >= 0:
        raise JsonError("half a character (an escape from \\ud800 to \\udfff)", *place(text, offset))


def _offset(text: str, wanted: Callable[[KeyPath, str], bool], otherwise: int = 0) -> int:
    """Offset of the first value whose path and first token are wanted."""
    return next((offset for path, offset, token in _values(text) if wanted(path, token)), otherwise)


def place(text: str, offset: int) -> tuple[int, int]:
    """(line, column), from 1, of a character of a text."""
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def positions(text: str) -> dict[KeyPath, tuple[int, int]]:
    """(line, column), from 1, of every value in a well-formed JSON text by its path. O(length)."""
    places: dict[KeyPath, tuple[int, int]] = {}
    line, start = 1, 0
    for path, offset, _ in _values(text):
        further = text.count("\n", start, offset)
        if further:
            line, start = line + further, text.rfind("\n", start, offset) + 1
        places.setdefault(path, (line, offset - start + 1))
    return places


def nearest(path: KeyPath, places: dict[KeyPath, tuple[int, int]]) -> tuple[int, int]:
    """Position of the value at a path, or of the deepest enclosing value where a key is missing."""
    while path and path not in places:
        path = path[:-1]
    return places.get(path, (1, 1))


def readable(path: Sequence[str | int]) -> str:
    """`stages[0].replicas` for ("stages", 0, "replicas")."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _values(text: str) -> Iterator[tuple[KeyPath, int, str]]:
    """Path, offset and first token of every value, in order of the text; iterative, so that depth is not limited."""
    path: list[str | int] = []
    numbers: list[int] = []
    key_next = False
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "}]":
            path.pop()
            numbers.pop()
            key_next = False
        elif token == ",":
            key_next = numbers[-1] < 0
            if not key_next:
                numbers[-1] += 1
                path[-1] = numbers[-1]
        elif token == ":":
            continue
        elif key_next:
            path[-1] = json.loads(token)
            key_next = False
        else:
            yield tuple(path), match.start(), token
            if token in "{[":
                key_next = token == "{"
                numbers.append(-1 if key_next else 0)
                path.append("" if key_next else 0)

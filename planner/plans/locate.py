"""Where in a JSON text the value at a path stands, for errors that name line and column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

Path = tuple[str | int, ...]


def positions(text: str) -> dict[Path, tuple[int, int]]:
    """(line, column), from 1, of every value in a well-formed JSON text by its path. O(length)."""
    starts = [0]
    for content in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(content))
    found: dict[Path, tuple[int, int]] = {}
    line = 0
    for path, offset in _values(text):
        while line + 1 < len(starts) and starts[line + 1] <= offset:
            line += 1
        found.setdefault(path, (line + 1, offset - starts[line] + 1))
    return found


def nearest(path: Path, places: dict[Path, tuple[int, int]]) -> tuple[int, int]:
    """Position of the deepest value on the way to a path: of the object that lacks a key, for a missing one."""
    while path and path not in places:
        path = path[:-1]
    return places.get(path, (1, 1))


def readable(path: Sequence[str | int]) -> str:
    """`stages[0].replicas` for ("stages", 0, "replicas")."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _values(text: str) -> Iterator[tuple[Path, int]]:
    """Every value's path and offset, in order of the text; iterative, so that depth is no limit."""
    decoder = json.JSONDecoder()
    path: list[str | int] = []
    numbers: list[int] = []
    key_next = False
    i = 0
    while i < len(text):
        char = text[i]
        if char in "}]":
            path.pop()
            numbers.pop()
            key_next = False
        elif char == ",":
            key_next = numbers[-1] < 0
            if not key_next:
                numbers[-1] += 1
                path[-1] = numbers[-1]
        elif char not in " \t\r\n:":
            if key_next:
                path[-1], i = decoder.raw_decode(text, i)
                key_next = False
                continue
            yield tuple(path), i
            if char not in "{[":
                i = decoder.raw_decode(text, i)[1]
                continue
            key_next = char == "{"
            numbers.append(-1 if key_next else 0)
            path.append("" if key_next else 0)
        i += 1

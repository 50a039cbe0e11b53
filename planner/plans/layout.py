"""JSON text for people: short things on one line, long lists filled to the line width, floats in shortest form."""

from __future__ import annotations

import json
from typing import Any

WIDTH = 120
_OPEN_LEVELS = 2
"""Objects this deep have a line for each key; in deeper ones short values share lines."""
_FEW = 32
"""Longest list that shares a line with other items."""


def compact(value: Any) -> str:  # noqa: ANN401
    """Canonical JSON: keys sorted, no spaces, UTF-8 characters as they are."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def pretty(value: Any, indent: int = 0, used: int = 0) -> str:  # noqa: ANN401
    """JSON text with keys in the given order; `used` characters of the first line are already taken."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, (dict, list)) or not value or indent + used + len(line) < WIDTH:
        return line
    pad = " " * (indent + 1)
    if isinstance(value, dict):
        body = _object_body(value, indent, pad)
        return "{\n" + body + "\n" + " " * indent + "}"
    if not all(map(_is_short, value)):
        body = ",\n".join(pad + pretty(item, indent + 1) for item in value)
    else:
        body = _filled([json.dumps(item, ensure_ascii=False, allow_nan=False) for item in value], pad)
    return "[\n" + body + "\n" + " " * indent + "]"


def _is_short(value: Any) -> bool:  # noqa: ANN401
    """Whether an item of a list shares lines with others: a number, a word, or a list of few of them (a rank group)."""
    if isinstance(value, list):
        return len(value) <= _FEW and not any(isinstance(item, (dict, list)) for item in value)
    return not isinstance(value, dict)


def _object_body(value: dict[str, Any], indent: int, pad: str) -> str:
    lines: list[str] = []
    short: list[str] = []
    for key, item in value.items():
        head = f"{json.dumps(key, ensure_ascii=False)}: "
        text = head + pretty(item, indent + 1, len(head))
        if indent >= _OPEN_LEVELS and "\n" not in text:
            short.append(text)
            continue
        lines += [_filled(short, pad)] if short else []
        short = []
        lines.append(pad + text)
    lines += [_filled(short, pad)] if short else []
    return ",\n".join(lines)


def _filled(words: list[str], pad: str) -> str:
    lines, line = [], pad + words[0]
    for word in words[1:]:
        if len(line) + len(word) + 3 > WIDTH:
            lines.append(line + ",")
            line = pad + word
        else:
            line += ", " + word
    return "\n".join([*lines, line])

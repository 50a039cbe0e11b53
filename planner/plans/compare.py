"""Two plans compared key by key, as their files have them: whatever the file says is compared, fields to come too."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from planner.plans.documents import KeyPath, readable
from planner.plans.files import to_document
from planner.plans.types import Plan
from planner.units import format_bytes, format_seconds

RELATIVE = 1e-6
"""Figures have nine digits; sums may differ in the last ones between machines."""

ROUNDED = 1e-8
"""Shares of a whole that follow from rounded figures."""

_LEFT_OUT = ("digest", "provenance")
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that is not what it should be; `...` stands for a key that one side lacks.

    Attributes:
        path: where in the file.
        said: in the file.
        right: worked out anew.
    """

    path: KeyPath
    said: Any
    right: Any

    def __str__(self) -> str:
        said, right = _excerpts(self.said, self.right) if _texts(self.said, self.right) else (self.said, self.right)
        key = next((str(part) for part in reversed(self.path) if isinstance(part, str)), "")
        return f"{readable(self.path)}: {_words(key, said)} in the file, {_words(key, right)} worked out anew"


def differences(plan: Plan, right: Plan) -> list[Difference]:
    """All values in which a plan's file differs from another's, digest and provenance left out; O(size of the file)."""
    said, document = to_document(plan), to_document(right)
    keys = [key for key in dict.fromkeys((*said, *document)) if key not in _LEFT_OUT]
    return [each for key in keys for each in compared((key,), said.get(key, ...), document.get(key, ...))]


def compared(path: KeyPath, said: Any, right: Any) -> Iterator[Difference]:  # noqa: ANN401
    """The values at and below a path in which a document differs from another."""
    if isinstance(said, dict) and isinstance(right, dict):
        for key in dict.fromkeys((*said, *right)):
            yield from compared((*path, key), said.get(key, ...), right.get(key, ...))
    elif isinstance(said, (list, tuple)) and isinstance(right, (list, tuple)) and len(said) == len(right):
        for index, pair in enumerate(zip(said, right, strict=True)):
            yield from compared((*path, index), *pair)
    elif not _same(str(path[-1]), said, right):
        yield Difference(path, said, right)


def _same(key: str, said: Any, right: Any) -> bool:  # noqa: ANN401
    """Whether two values are the same but for rounding: of whole bytes one, though no bytes are not some; of other
    figures the last digits."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (said, right))
    if not numbers or said == right:
        return bool(said == right) and type(said) is type(right)
    if key.endswith("bytes"):
        if isinstance(said, float) or isinstance(right, float):
            return math.isclose(said, right, rel_tol=RELATIVE)
        return bool(said and right) and math.isclose(said, right, rel_tol=RELATIVE * 1e-3, abs_tol=1.0)
    if isinstance(said, int) and isinstance(right, int):
        return False
    return math.isclose(said, right, rel_tol=RELATIVE, abs_tol=0.0 if key.endswith("_s") else ROUNDED)


def _texts(said: Any, right: Any) -> bool:  # noqa: ANN401
    return isinstance(said, str) and isinstance(right, str)


def _excerpts(said: str, right: str) -> tuple[str, str]:
    """Both texts from shortly before the first character that differs."""
    if max(len(said), len(right)) <= _SHOWN:
        return said, right
    same = next((i for i, (a, b) in enumerate(zip(said, right, strict=False)) if a != b), min(len(said), len(right)))
    start = max(0, same - _SHOWN // 3)
    return tuple(("... " if start else "") + text[start : start + _SHOWN] for text in (said, right))  # type: ignore[return-value]


def _words(key: str, value: Any) -> str:  # noqa: ANN401
    """A value for people."""
    if value is ...:
        return "nothing"
    if isinstance(value, list):
        return f"{len(value)} entries" if len(str(value)) > _SHOWN else json.dumps(value, ensure_ascii=False)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value:
        if key.endswith("bytes"):
            return f"{format_bytes(value)} ({value})" if value >= 0 else f"{value} bytes"
        if key.endswith("_s") and value > 0 and not key.endswith("per_s"):
            return f"{format_seconds(value)} ({value:.9g} s)"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]} ..."

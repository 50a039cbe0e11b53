"""Names that differ only in numbers which grow by constant steps, written once: `layers.{0+1i}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9])")
_SLOT = re.compile(r"\{([0-9]+)\+([0-9]+)i\}")

Names = tuple[str, ...]


def filled(text: str, copy: int) -> str:
    """A template's text for one copy (0, 1, ...): every `{b+si}` stands for b + s * copy.

    >>> filled("layers.{2+1i}", 3)
    'layers.5'
    """
    return _SLOT.sub(lambda match: str(int(match[1]) + int(match[2]) * copy), text)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in a text, in order."""
    return tuple(int(number) for number in _NUMBER.findall(text))


def outline(text: str) -> str:
    """The text with its numbers taken out."""
    return _NUMBER.sub("#", text)


def fits_template(text: str) -> bool:
    """Whether a text may stand in a template: a brace would be read as a slot."""
    return "{" not in text


def template(first: str, second: str) -> str:
    """The template of which two texts of equal outline are copies 0 and 1."""
    steps = iter([b - a for a, b in zip(numbers(first), numbers(second), strict=True)])

    def slot(match: re.Match[str]) -> str:
        step = next(steps)
        return f"{{{match.group()}+{step}i}}" if step else match.group()

    return _NUMBER.sub(slot, first)


def longest_run(rows: Sequence[Names]) -> int:
    """How many of the rows, from the first on, are copies of one template: numbers grow by constant steps."""
    if len(rows) < 2 or not all(map(fits_template, rows[0])):
        return min(len(rows), 1)
    shape = tuple(map(outline, rows[0]))
    start = [n for text in rows[0] for n in numbers(text)]
    steps: list[int] = []
    for count, row in enumerate(rows[1:], 1):
        if tuple(map(outline, row)) != shape or not all(map(fits_template, row)):
            return count
        here = [n for text in row for n in numbers(text)]
        steps = steps or [b - a for a, b in zip(start, here, strict=True)]
        if any(step < 0 for step in steps) or here != [a + s * count for a, s in zip(start, steps, strict=True)]:
            return count
    return len(rows)

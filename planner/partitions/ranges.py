"""Sets of whole numbers as ranges, both ends included."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def to_ranges(numbers: Iterable[int]) -> Ranges:
    """`((1, 3), (7, 7))` for 7, 1, 2, 3. O(n log n)."""
    return to_runs(sorted(numbers))


def to_runs(numbers: Iterable[int]) -> Ranges:
    """Ranges that give the numbers in the order they came: `((7, 7), (1, 3))` for 7, 1, 2, 3."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)


def from_ranges(ranges: Ranges, most: int) -> list[int] | None:
    """The numbers of ranges in the order given; None when there are more than `most` (no file makes a huge list)."""
    if sum(max(0, last - first + 1) for first, last in ranges) > most:
        return None
    return [number for first, last in ranges for number in range(first, last + 1)]


def in_words(ranges: Ranges, most: int = 6) -> str:
    """`1-3, 7`, cut short after `most` ranges."""
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most]]
    left = len(ranges) - most
    return ", ".join(shown) + (f", and {left} more" if left > 0 else "")

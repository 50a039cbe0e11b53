"""The ways in which a number of samples can be dealt out evenly."""

from __future__ import annotations

import math


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a whole number of at least one, ascending, in O(sqrt(number))."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))

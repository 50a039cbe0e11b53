"""Add floats in one order with one rounding a step, so that every version of Python finds the same sum."""

from __future__ import annotations

from collections.abc import Iterable


def float_sum(values: Iterable[float], start: float = 0) -> float:
    """The sum of floats from left to right, in the unit of the values; `start` where there are none.

    Each addition rounds as IEEE 754 says. The builtin `sum` did the same until Python 3.11 and has carried the rounding
    errors of floats along since 3.12: its last digits, and plans that hang on them, differ between the two.
    `make check` therefore refuses it for floats. Infinities add as usual; opposite ones are NaN.
    """
    total = start
    for value in values:
        total = total + value
    return total

"""Compare a need of memory with a capacity: the one comparison of judges, searches, integer models and checks.

A need is a sum of floats whose order differs from place to place, and so do its last digits. A need therefore fits up
to a billionth above the capacity: far more than the rounding, far less than a tensor (80 bytes of 80 GB).
"""

from __future__ import annotations

from typing import overload

import numpy as np

TOLERANCE = 1e-9
"""Fraction of a capacity by which a need may exceed it and still fit."""

UNLIMITED = 1 << 60
"""Result of `most_that_fit` for things that take no memory."""


@overload
def room_bytes(capacity_bytes: float) -> float: ...
@overload
def room_bytes(capacity_bytes: np.ndarray) -> np.ndarray: ...
def room_bytes(capacity_bytes: float | np.ndarray) -> float | np.ndarray:
    """The largest need that fits a capacity, in bytes."""
    return capacity_bytes * (1 + TOLERANCE)


@overload
def fits(needed_bytes: float, capacity_bytes: float) -> bool: ...
@overload
def fits(needed_bytes: np.ndarray, capacity_bytes: float | np.ndarray) -> np.ndarray: ...
def fits(needed_bytes: float | np.ndarray, capacity_bytes: float | np.ndarray) -> bool | np.ndarray:
    """Whether a need fits a capacity, elementwise for arrays: `needed <= room_bytes(capacity)`.

    The answer depends on the last bit of a need. A solver and a judge whose proof depends on it must compute needs by
    the same operations on correctly rounded sums.
    """
    return needed_bytes <= room_bytes(capacity_bytes)


def most_that_fit(fixed_bytes: np.ndarray, each_bytes: np.ndarray, capacity_bytes: float | np.ndarray) -> np.ndarray:
    """The largest n for which `fits(fixed + n * each, capacity)`, elementwise, int64.

    -1 where not even `fixed` fits, `UNLIMITED` where it does and `each` is 0. Finite counts are exact below 2^52.
    """
    free = np.asarray(room_bytes(capacity_bytes) - fixed_bytes, dtype=np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        count = np.divide(free, each_bytes, out=np.full(free.shape, np.inf), where=each_bytes > 0)
    count = np.floor(np.clip(count, 0, UNLIMITED))
    # The division may round to the wrong side of a whole number, so correct the count by the comparison.
    limited = count < UNLIMITED
    tried = np.where(limited, count, 0.0)
    tried += fits(fixed_bytes + (tried + 1) * each_bytes, capacity_bytes)
    taken = np.multiply(tried, each_bytes, out=np.zeros(free.shape), where=tried > 0)
    tried -= ~fits(fixed_bytes + taken, capacity_bytes)
    return np.where(limited, tried, np.where(free < 0, -1, UNLIMITED)).astype(np.int64)

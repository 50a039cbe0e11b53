"""The ways in which a number of samples can be dealt out evenly."""

from __future__ import annotations

import math

from planner.errors import JobError

MOST_SAMPLES = 10**12
"""Largest batch that is dealt out; its divisors are found in about a tenth of a second."""


def check_samples(batch: int) -> None:
    """Refuse a batch that is too large to be dealt out.

    Raises:
        JobError: there are more than `MOST_SAMPLES`.
    """
    if batch > MOST_SAMPLES:
        raise JobError(
            f"a global batch of {batch} samples; {MOST_SAMPLES:,} are the most that can be dealt out",
            hint="use a smaller global batch",
        )


def divisors(batch: int, most: int | None = None) -> tuple[int, ...]:
    """All divisors of a number of samples, at least one, ascending; those up to `most` where it is given.

    O(sqrt(batch)), or O(most) where that is less.

    Raises:
        JobError: there are more than `MOST_SAMPLES`.
    """
    check_samples(batch)
    root = math.isqrt(batch)
    if most is not None and most <= root:
        return tuple(d for d in range(1, most + 1) if batch % d == 0)
    small = [d for d in range(1, root + 1) if batch % d == 0]
    found = (*small, *(batch // d for d in reversed(small) if d * d != batch))
    return found if most is None else tuple(d for d in found if d <= most)

"""Whether something fits: the tolerance, on floats and on tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.memory import UNLIMITED, fits, most_that_fit, room_bytes


@pytest.mark.parametrize(
    ("needed", "capacity", "expected"),
    [
        (80e9, 80e9, True),
        (80e9 + 80, 80e9, True),  # a billionth of 80 GB
        (80e9 + 81, 80e9, False),
        (0.0, 0.0, True),
        (1e-300, 0.0, False),
        (1e300, math.inf, True),
    ],
)
def test_a_need_may_exceed_the_capacity_by_a_billionth(needed: float, capacity: float, expected: bool) -> None:
    assert fits(needed, capacity) is expected


def test_tables_are_compared_entry_by_entry() -> None:
    found = fits(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[2.0], [3.0]]))
    assert found.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize(
    ("fixed", "each", "capacity", "count"),
    [(1.0, 3.0, 10.0, 3), (1.0, 3.0, 9.9, 2), (11.0, 3.0, 10.0, -1), (10.0, 3.0, 10.0, 0), (0.0, 0.0, 10.0, UNLIMITED),
     (11.0, 0.0, 10.0, -1), (0.0, 2.0, math.inf, UNLIMITED)],
)  # fmt: skip
def test_how_many_fit(fixed: float, each: float, capacity: float, count: int) -> None:
    assert most_that_fit(np.array([fixed]), np.array([each]), capacity).tolist() == [count]


@given(
    st.floats(0, 1e12), st.floats(1e-3, 1e12), st.integers(0, 1000), st.sampled_from([0.0, 1e-16, -1e-16, -1e-9, 1e-9])
)
def test_the_count_is_the_last_that_fits(fixed: float, each: float, count: int, apart: float) -> None:
    capacity = (fixed + count * each) * (1 + apart)
    found = int(most_that_fit(np.array([fixed]), np.array([each]), capacity)[0])
    assert found < 0 or fits(fixed + found * each, capacity)
    assert not fits(fixed + (found + 1) * each, capacity)
    assert room_bytes(capacity) >= capacity

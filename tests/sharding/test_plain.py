"""Every strategy of every rule that cuts without exchanging data, executed on one axis and on two."""

from __future__ import annotations

import pytest

from planner.sharding import Options
from tests.sharding.execution import check
from tests.sharding.plain_cases import CASES

WITHOUT_RING = Options(coupled=False)


@pytest.mark.parametrize("name", CASES)
def test_on_one_axis(name: str) -> None:
    assert len(check(CASES[name](), (2,), WITHOUT_RING)) > 1, "nothing is cut"


@pytest.mark.parametrize("name", CASES)
def test_on_two_axes(name: str) -> None:
    check(CASES[name](), (2, 2), WITHOUT_RING)


@pytest.mark.parametrize("name", ["MatMul", "Gemm", "Add", "Split", "Concat", "Gather", "Gelu"])
def test_interleaved(name: str) -> None:
    check(CASES[name](), (2,), Options(coupled=False, blocks=(2,)))

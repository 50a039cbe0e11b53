"""Plans executed by processes on this machine: gradients are those of the whole model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from planner import runtime  # noqa: E402
from tests.runtime import cases  # noqa: E402

LARGEST_ERROR = 1e-12


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_gradients_are_the_whole_models(case: cases.Case) -> None:
    plan = cases.plan(case)
    found = runtime.run(plan, cases.model(case.model), steps=0, check=True).check
    assert found is not None
    assert found.largest < LARGEST_ERROR
    assert abs(found.loss - found.expected_loss) < LARGEST_ERROR
    assert {name for _, name, _ in found.errors} == {
        p.tied_to or p.name for b in plan.block_table for p in b.parameters
    }
    assert found.computed_whole == ()

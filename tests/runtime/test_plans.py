"""Plans executed by processes on this machine: gradients are those of the whole model."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from planner import runtime  # noqa: E402
from tests.runtime import cases, matrix  # noqa: E402


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_gradients_are_the_whole_models(case: cases.Case) -> None:
    plan = cases.plan(case)
    found = runtime.run(plan, cases.model(case.model), steps=0, check=True).check
    assert found is not None
    assert found.largest < case.limit
    assert found.loss == pytest.approx(found.expected_loss, rel=case.limit)
    named = {p.tied_to or p.name for b in plan.block_table for p in b.parameters if p.trainable}
    assert {name for _, name, _ in found.errors} == named
    assert matrix.row(case, plan, found) in matrix.PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_no_other_plans() -> None:
    listed = matrix.PAGE.read_text(encoding="utf-8").split("## All plans")[1]
    rows = [line for line in listed.splitlines() if line.startswith("| ")]
    assert len(rows) - 1 == len(cases.CASES)

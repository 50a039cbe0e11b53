"""The page of executed plans: `python -m tests.runtime.matrix` runs them all and writes it."""

from __future__ import annotations

from pathlib import Path

import planner
from planner import runtime
from tests.runtime import cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "runtime_matrix.md"
HEAD = """# Plans that are executed

Every row is a plan that the tests run: processes on one machine, exchanges by gloo, float64, an iteration of all its
micro-batches. The largest error is that of any weight's gradient against the whole, unpartitioned graph, as part of the
gradient's largest element. "Computed whole" counts operators that the plan cuts and every rank of a group computes
whole ([why](runtime.md#how-each-part-of-a-plan-is-executed)). "Way" is the number of the sharding among those that a
prediction tries. Written by `python -m tests.runtime.matrix`.

| plan | processes | schedule | needs | largest error | computed whole |
|---|---|---|---|---|---|
"""


def row(case: cases.Case, plan: planner.Plan, found: runtime.GradientCheck) -> str:
    """A plan's row in the page."""
    needs = ", ".join(flag.value for flag in plan.requires)
    whole = len(found.computed_whole)
    return f"| {case.name} | {plan.world_size} | {plan.schedule.name} | {needs} | < {case.limit:.0e} | {whole} |"


def main() -> None:
    """Run all plans and write the page."""
    rows = []
    for case in cases.CASES:
        plan = cases.plan(case)
        found = runtime.run(plan, cases.model(case.model), steps=0, check=True).check
        if found is None or not found.largest < case.limit:
            raise planner.RunError(f"error {found and found.largest}", where=case.name)
        rows.append(row(case, plan, found))
    PAGE.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

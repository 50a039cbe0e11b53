"""The page of executed plans: `python -m tests.runtime.matrix` runs them all and writes it."""

from __future__ import annotations

import math
from pathlib import Path

import planner
from planner import export, runtime
from tests.runtime import cases

PAGE = Path(__file__).resolve().parents[2] / "docs" / "runtime_matrix.md"
HEAD = """# Plans that are executed

Every plan is run by the tests: processes on one machine, exchanges by gloo, float64, an iteration of all its
micro-batches. An error is that of any weight's gradient against the whole, unpartitioned graph, as part of the
gradient's largest element. "Exported to" names the frameworks whose files express the plan
([what the others lack](export.md)). Plans with stale weights have no gradients of the whole model: PipeDream, 2BW,
HetPipe, PipeMare and pipelined backpropagation with each of its corrections are trained, and their weights held against
the papers' recurrences (`tests/runtime`; error below 1e-11). Written by `python -m tests.runtime.matrix`.

## By feature

Largest errors are those of the run that wrote this page, models with batch normalisation apart: there few samples make
small differences large.

| a plan that needs | plans | largest error | exported to |
|---|---|---|---|
"""
LIST = """
## All plans

"Shared" says how the ranks of a group share the operators, and which part of the weights each of them holds. "Computed
whole" counts operators that the plan cuts and every rank of a group computes whole
([why](runtime.md#how-each-part-of-a-plan-is-executed)).

| plan | processes | schedule | shared | needs | error | computed whole | exported to |
|---|---|---|---|---|---|---|---|
"""


def row(case: cases.Case, plan: planner.Plan, found: runtime.GradientCheck) -> str:
    """A plan's row in the page."""
    needs = ", ".join(flag.value for flag in plan.requires)
    whole = len(found.computed_whole)
    columns = case.name, plan.world_size, plan.schedule.name, _shared(plan), needs, f"< {case.limit:.0e}", whole
    return f"| {' | '.join(map(str, columns))} | {', '.join(exporters(case, plan))} |"


def exporters(case: cases.Case, plan: planner.Plan) -> tuple[str, ...]:
    """The frameworks whose files express a plan."""
    return tuple(name for name in export.names() if not export.lacking(plan, name, cases.graph(case.model)))


def _shared(plan: planner.Plan) -> str:
    """Mesh, boundaries, and the part of the first sharded stage's weights that a rank holds."""
    stage = next((stage for stage in plan.stages if stage.sharding), None)
    if stage is None:
        return "nothing"
    return f"{stage.sharding}; {stage.rank_parameters / stage.parameters:.0%} of the weights"


def _features(run: list[tuple[cases.Case, planner.Plan, float]]) -> list[str]:
    """For each feature: plans that need it, their largest error, and the exporters that take one of them."""
    rows = []
    named = {flag.value: [each for each in run if flag in each[1].requires] for flag in planner.plans.Requirement}
    for feature, own in {**named, "none of these": [each for each in run if not each[1].requires]}.items():
        exact = [error for case, _, error in own if case.model not in cases.ILL_CONDITIONED]
        takers = sorted({name for case, plan, _ in own for name in exporters(case, plan)})
        if own:
            largest = f"{max(exact):.0e}" if exact else "-"
            rows.append(f"| {feature} | {len(own)} | {largest} | {', '.join(takers) or 'none'} |")
    return rows


def main() -> None:
    """Run all plans and write the page."""
    rows, run = [], []
    for case in cases.CASES:
        plan = cases.plan(case)
        found = runtime.run(plan, cases.model(case.model), steps=0, check=True).check
        if found is None or not found.largest < case.limit or math.isnan(found.largest):
            raise planner.RunError(f"error {found and found.largest}", where=case.name)
        rows.append(row(case, plan, found))
        run.append((case, plan, found.largest))
    PAGE.write_text(HEAD + "\n".join(_features(run)) + "\n" + LIST + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Whatever a file says of groups of ranks, reading and checking it ends in a result or in an error with a reason."""

from __future__ import annotations

import functools
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.check import check_plan
from planner.errors import PlanError
from planner.plans import compare_plans, dumps, explain, loads, seal, validate
from planner.report import diff_report, explanation_report
from tests.plans.sharded_sample import language
from tests.plans.test_fuzz import leaves

values = st.sampled_from(
    [-1, 0, 1, 2, 7, 10**9, 0.5, "", "x", "R", "S0", "S1", "P", "n", "x{0+1i}", "forward", True, [], [0], ["x"], ["R"]]
)


@functools.cache
def text() -> str:
    return dumps(language().plan)


@functools.cache
def paths() -> list[tuple[Any, ...]]:
    return [path for path in leaves(json.loads(text())) if path[0] == "shardings"]


def changed(path: tuple[Any, ...], value: Any) -> str:
    document = json.loads(text())
    target: Any = document
    for key in path[:-1]:
        target = target[key]
    old = target[path[-1]]
    target[path[-1]] = float(value) if isinstance(old, float) and isinstance(value, int) else value
    return json.dumps(document)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_changed_value_is_found_even_under_a_new_digest(data: st.DataObject) -> None:
    sample = language()
    path, value = data.draw(st.sampled_from(paths())), data.draw(values)
    try:
        plan = seal(loads(changed(path, value)))
    except PlanError:
        return
    same = plan == sample.plan
    found = validate(plan, sample.graph) or check_plan(plan, sample.graph, sample.cluster).findings
    if path[-1] not in ("value", "gradient"):  # a tensor may rest before or after a collective: both are right
        assert bool(found) != same, (path, value)
    try:
        explanation_report(explain(plan))
        diff_report(compare_plans(sample.plan, plan), every_value=True)
    except PlanError:
        assert not same

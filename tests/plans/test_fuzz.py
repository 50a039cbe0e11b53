"""Whatever a file says, reading and checking it ends in a result or in an error with a reason."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.errors import PlanError
from planner.plans import compare_plans, dumps, explain, loads, validate
from planner.report import diff_report, explanation_report
from tests.plans.sample import cluster, decision, language_model, make_plan

PLAN = make_plan(chosen=decision((2, 1), (0, 3), copies=2, micro_batches=4))
TEXT = dumps(PLAN)
GRAPH = language_model()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for key, item in items for leaf in leaves(item, (*path, key))]
    return found or [path]


PATHS = [path for path in leaves(json.loads(TEXT)) if path[0] not in ("provenance", "format", "version")]


def changed(path: tuple[Any, ...], value: Any) -> str:
    document = json.loads(TEXT)
    target: Any = document
    for key in path[:-1]:
        target = target[key]
    if value is ... or (isinstance(target, list) and value == "drop"):
        del target[path[-1]]
    else:
        old = target[path[-1]]
        target[path[-1]] = type(old)(value) if isinstance(old, float) and isinstance(value, int) else value
    return json.dumps(document)


values = st.sampled_from(
    [..., "drop", -1, 0, 1, 2, 7, 10**9, 0.0, "", "x", "F0.0", "x{0+1i}", None, True, [], [0], ["x"]]
)


@example(("alternatives", 1, "replicas", 0), 0)
@given(st.sampled_from(PATHS), values)
@settings(deadline=None, max_examples=250)
def test_a_changed_value_ends_in_findings_or_in_a_plan_error(path: tuple[Any, ...], value: Any) -> None:
    try:
        plan = loads(changed(path, value))
    except PlanError:
        return
    same = plan == PLAN
    assert bool(validate(plan, GRAPH, cluster())) != same
    try:
        explanation_report(explain(plan))
        diff_report(compare_plans(PLAN, plan), every_value=True)
    except PlanError:
        assert not same

"""Differences between sharded plans: mesh, width, layouts, collectives, each told once for all blocks alike."""

from __future__ import annotations

import dataclasses

import pytest

from planner.plans import Area, Plan, compare_plans, diff
from planner.plans.diff import sharding_facts
from planner.report import diff_report, report_to_text
from tests.plans.sample import make_plan
from tests.plans.sharded_sample import language, leanest_by_sequence, mixture, sharded_plan


@pytest.fixture(scope="module")
def narrow() -> Plan:
    return sharded_plan("gpt2", (4,), pick=leanest_by_sequence).plan


def test_a_sharded_plan_does_not_differ_from_itself() -> None:
    for plan in (language().plan, mixture().plan):
        assert diff(plan, plan) == []


def test_another_mesh_is_told_by_stage(narrow: Plan) -> None:
    changes = {(c.area, c.path): (c.old, c.new) for c in diff(language().plan, narrow)}
    assert changes[Area.STAGES, ("stage 0", "mesh")] == ("tensor 8", "tensor 4")
    assert changes[Area.STAGES, ("stage 1", "width")] == (8, 4)
    assert (Area.STAGES, ("stage 0", "tensors between blocks")) not in changes
    assert changes[Area.BOUNDARIES, ("transformer.h.5.add", "rank_bytes")] == (196608, 393216)
    assert changes[Area.SHARDINGS, ("transformer", "parameters")] == (98304, 196608)


def test_a_change_in_all_layers_is_told_once() -> None:
    plan = language().plan
    (sharding,) = plan.shardings
    blocks = list(sharding.blocks)
    at = next(i for i, e in enumerate(blocks) if any(o.operator == "transformer.h.0.mlp.gelu" for o in e.operators))
    gelu = dataclasses.replace(
        next(o for o in blocks[at].operators if o.operator == "transformer.h.0.mlp.gelu"), splits=("d1",)
    )
    blocks[at] = dataclasses.replace(
        blocks[at], operators=tuple(gelu if o.operator == gelu.operator else o for o in blocks[at].operators)
    )
    other = dataclasses.replace(plan, shardings=(dataclasses.replace(sharding, blocks=tuple(blocks)),))
    (change,) = diff(plan, other)
    assert change.path == ("transformer.h.0[2/2] and 10 blocks like it", "transformer.h.0.mlp.gelu", "split")
    assert (change.old, change.new) == ("d2: S2 -> S2", "d1: S2 -> S2")


def test_going_back_swaps_old_and_new(narrow: Plan) -> None:
    for one, other in ((language().plan, narrow), (language().plan, mixture().plan), (narrow, make_plan())):
        there = {(c.area, c.path): (c.old, c.new) for c in diff(one, other)}
        assert there == {(c.area, c.path): (c.new, c.old) for c in diff(other, one)}


def test_from_no_groups_to_groups(narrow: Plan) -> None:
    assert sharding_facts(make_plan(), make_plan()) == ({}, {})
    changes = diff(make_plan(), narrow, ignore=[a for a in Area if a is not Area.SHARDINGS])
    assert all(c.old is None for c in changes)
    report = report_to_text(diff_report(compare_plans(make_plan(), narrow), every_value=True))
    assert "Inside groups of ranks" in report
    assert "tensor_parallel" in report

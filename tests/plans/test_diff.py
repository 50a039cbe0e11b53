"""Differences between plans, told by name."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from planner.errors import PlanError
from planner.plans import Area, Change, Plan, compare_plans, diff, dumps, loads, seal
from planner.report import diff_report, report_to_text
from tests.plans.sample import decision, language_model, make_plan
from tests.plans.test_files import plans


def faster(plan: Plan, factor: float) -> Plan:
    """The plan with its times of an iteration divided."""
    p = plan.predictions
    changed = dataclasses.replace(p, iteration_s=p.iteration_s / factor, samples_per_s=p.samples_per_s * factor)
    return seal(dataclasses.replace(plan, predictions=changed))


@given(plans())
@settings(deadline=None, max_examples=20)
def test_a_plan_does_not_differ_from_itself_written_and_read(plan: Plan) -> None:
    assert diff(plan, loads(dumps(plan))) == []


@given(plans(), plans())
@settings(deadline=None, max_examples=30)
def test_going_back_swaps_old_and_new(one: Plan, other: Plan) -> None:
    there = {(c.area, c.path): (c.old, c.new) for c in diff(one, other)}
    back = {(c.area, c.path): (c.new, c.old) for c in diff(other, one)}
    assert there == back
    assert bool(there) == (dataclasses.replace(one, provenance=other.provenance) != other)


def test_digest_and_provenance_do_not_count() -> None:
    plan = make_plan()
    other = dataclasses.replace(plan, digest="0", provenance=dataclasses.replace(plan.provenance, version="9"))
    assert diff(plan, other) == []


def test_a_moved_block_is_told_by_its_name() -> None:
    old, new = make_plan(), make_plan(chosen=decision(starts=(0, 3, 4)))
    changes = {(c.area, c.path): (c.old, c.new) for c in diff(old, new)}
    assert changes == {
        (Area.STAGES, ("stage 0", "modules")): (("embed", "layers.0"), ("embed", "layers.0-1")),
        (Area.STAGES, ("stage 0", "parameters")): (8, 12),
        (Area.STAGES, ("stage 1", "modules")): (("layers.1-2",), ("layers.2",)),
        (Area.STAGES, ("stage 1", "parameters")): (8, 4),
        (Area.BLOCKS, ("layers.1", "stage")): (1, 0),
        (Area.BOUNDARIES, ("h1",)): (
            ("from_stage: 0", "to_stages: 1", "shape: 4", "dtype: float32", "bytes: 16", "gradient: True"),
            None,
        ),
        (Area.BOUNDARIES, ("h2",)): (
            None,
            ("from_stage: 0", "to_stages: 1", "shape: 4", "dtype: float32", "bytes: 16", "gradient: True"),
        ),
    }
    text = report_to_text(diff_report(compare_plans(old, new), every_value=True))
    assert "- layers.1: stage 1 -> stage 0" in text


def test_an_inserted_layer_does_not_shift_what_is_told_of_the_others() -> None:
    """Blocks are compared by name: of those that both models have, only the ones in other stages are told."""
    old = make_plan(language_model(4), decision((1, 1), (0, 3), 6))
    new = make_plan(language_model(5), decision((1, 1), (0, 3), 7))
    changes = [c for c in diff(old, new) if c.area is Area.BLOCKS]
    assert [(c.path, c.old) for c in changes] == [(("layers.4",), None)]


def test_numbers_within_the_tolerance_are_equal_and_others_tell_by_how_much() -> None:
    old = make_plan()
    new = faster(old, 1.0 / 1.005)
    assert diff(old, new, tolerance=0.01) == []
    (change, _) = diff(old, new)
    assert change.path == ("iteration_s",)
    assert change.relative == pytest.approx(0.005)


def test_the_tolerance_does_not_hide_decisions() -> None:
    old, new = make_plan(), make_plan(chosen=decision(micro_batches=12))
    told = {c.path for c in diff(old, new, tolerance=10.0)}
    assert {("count",), ("global_batch",)} <= told


def test_parts_can_be_left_out() -> None:
    old = make_plan()
    assert diff(old, faster(old, 2.0), ignore=[Area.PREDICTIONS]) == []


def test_a_report_begins_with_three_sentences_and_lists_values_on_demand() -> None:
    old = make_plan()
    found = compare_plans(old, faster(old, 2.0))
    assert found.changes[0] == Change(Area.PREDICTIONS, ("iteration_s",), 0.5, 0.25, -0.5)
    assert report_to_text(diff_report(found, every_value=True)) == (
        "a step takes 500 ms -> 250 ms (-50.00%)\n"
        "\n"
        "Changed: none of model, hardware, options and tool.\n"
        "Planner: decides as before.\n"
        "Cost: a step 500 ms -> 250 ms (-50.00%), the fullest device 3 GiB (19%), as before.\n"
        "\n"
        "Figures\n"
        "  figure                     old           new   change\n"
        "  time of a step          500 ms        250 ms   -50.0%\n"
        "  throughput        12 samples/s  24 samples/s  +100.0%\n"
        "  fullest device     3 GiB (19%)   3 GiB (19%)    +0.0%\n"
        "  bubble                   95.7%         91.5%\n"
        "  gap to the bound           20%           20%\n"
        "\n"
        "Predictions\n"
        "  what           old     new      change\n"
        "  iteration_s    500 ms  250 ms   -50.0%\n"
        "  samples_per_s  12      24      +100.0%\n"
    )


def test_equal_plans_say_what_was_compared() -> None:
    found = compare_plans(make_plan(), make_plan())
    assert report_to_text(diff_report(found)) == "compared 3 stages, 15 operators: no changes\n"


def test_a_plan_in_pieces_is_not_compared() -> None:
    plan = make_plan()
    with pytest.raises(PlanError, match="no stages"):
        diff(plan, dataclasses.replace(plan, stages=()))

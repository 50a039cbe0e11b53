"""Explanations: the figures, and the words that are made of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import planner
from planner.errors import PlanError
from planner.plans import explain, with_simulation
from planner.report import Form, Report, Section, bar, explanation_report, report_to_markdown, report_to_text, table
from tests.plans.sample import decision, make_plan

GOLDEN = Path(__file__).parent / "golden" / "explain.txt"


def test_an_explanation_reads_like_this() -> None:
    plan = with_simulation(make_plan(chosen=decision((2, 1, 1))), 0.51)
    plan = dataclasses.replace(plan, not_modelled=("contention on links",))
    assert report_to_text(explanation_report(explain(plan))) == GOLDEN.read_text()


def test_shares_add_up_to_the_iteration() -> None:
    plan = make_plan()
    assert sum(explain(plan).time_parts.values()) == pytest.approx(plan.predictions.iteration_s)


def test_differences_of_alternatives_are_named() -> None:
    chosen = decision((2, 2), (0, 2), micro_batches=6)
    plan = make_plan(chosen=chosen)
    same = plan.alternatives[0]
    others = (
        dataclasses.replace(same, starts=(0, 3)),
        dataclasses.replace(same, starts=(0, 2), replicas=(3, 1), schedule="gpipe"),
        dataclasses.replace(same, starts=(0, 2), copies=2, micro_batch=2, zero=1, recompute=(0,)),
    )
    found = explain(dataclasses.replace(plan, alternatives=others)).rivals
    assert [rival.differs for rival in found] == [
        ("1 cut elsewhere",),
        ("DP 3-1 instead of 2", "gpipe instead of 1f1b"),
        (
            "DP 4 instead of 2",
            "micro-batch 2 instead of 1",
            "recompute in 1 stage instead of 0",
            "ZeRO-1 instead of ZeRO-0",
        ),
    ]


def test_a_proven_optimum_says_so() -> None:
    plan = make_plan()
    predictions = dataclasses.replace(plan.predictions, proven_optimal=True, gap=0.0, bound_s=0.5)
    text = report_to_text(explanation_report(explain(dataclasses.replace(plan, predictions=predictions))))
    assert "no plan of the searched space is faster" in text
    assert "No plan of the searched space is faster than 500 ms, which this one reaches." in text


def test_a_plan_in_pieces_is_not_explained() -> None:
    plan = make_plan()
    broken = dataclasses.replace(plan, predictions=dataclasses.replace(plan.predictions, stages=()))
    with pytest.raises(PlanError, match="predictions are for 0 stages"):
        explain(broken)


def test_markdown_tables_align_numbers_and_escape_bars() -> None:
    counts = table({"what": Form.TEXT, "count": Form.NUMBER}, [("a|b", 1)])
    report = Report("Title", (Section("Head", ("A line.",), ("an item",), table=counts),))
    assert report_to_markdown(report) == (
        "## Title\n\n### Head\n\nA line.\n\n- an item\n\n| what | count |\n|---|---:|\n| a\\|b | 1 |\n"
    )


@pytest.mark.parametrize(
    ("fraction", "text"), [(0.0, "····"), (0.5, "██··"), (0.6, "██▌·"), (1.0, "████"), (1.7, "████"), (-1.0, "····")]
)
def test_bars(fraction: float, text: str) -> None:
    assert bar(fraction, 4) == text


def test_a_single_stage_waits_for_no_other() -> None:
    plan = planner.plan(planner.load_graph("gpt2"), planner.load_cluster("dgx-a100"), planner.Job(global_batch=512))
    assert len(plan.stages) == 1
    assert not [name for name in explain(plan).time_parts if name.startswith("waiting")]

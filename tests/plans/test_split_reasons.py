"""Why operators are split as they are: rivals against brute force, and the words made of them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from planner.errors import PlanError, UsageError
from planner.plans import SplitReason, explain, rebuild, split_reasons
from planner.report import explanation_document, explanation_report, report_to_text
from planner.sharding import Strategy, evaluate, formulate
from tests.plans.sample import make_plan
from tests.plans.sharded_sample import language, mixture


@pytest.fixture(scope="module")
def reasons() -> tuple[SplitReason, ...]:
    sample = language()
    return split_reasons(sample.plan, sample.graph, sample.cluster)


def test_the_rivals_of_a_lone_lookup_are_the_best_of_all_its_answers(reasons: tuple[SplitReason, ...]) -> None:
    sample = language()
    (rebuilt,) = rebuild(sample.plan, sample.graph, sample.cluster)
    entry = rebuilt.sharding.blocks[0]
    assert [o.operator for o in entry.operators] == ["transformer.wte.gather"]
    setting, own = rebuilt.part(entry), rebuilt.decision(entry)
    free, chosen = formulate(setting, rebuilt.facts), evaluate(setting, own, facts=rebuilt.facts)
    best: dict[tuple[str, ...], float] = {}
    for answer in itertools.product(*map(range, free.sizes)):
        decision = free.decision(answer)
        split = decision["op:transformer.wte.gather"]
        assert isinstance(split, Strategy)
        if (
            decision["transformer.wte.gather"] != own["transformer.wte.gather"]
            or split == own["op:transformer.wte.gather"]
        ):
            continue
        verdict = evaluate(setting, decision, facts=rebuilt.facts)
        if verdict.weight_bytes <= chosen.weight_bytes and verdict.activation_bytes <= chosen.activation_bytes:
            best[split.splits] = min(best.get(split.splits, 1e9), verdict.seconds - chosen.seconds)
    (reason,) = [r for r in reasons if r.operator == "transformer.wte.gather"]
    assert {r.splits: pytest.approx(r.more_s, rel=1e-5) for r in reason.rivals} == best


def test_no_rival_that_holds_no_more_is_faster(reasons: tuple[SplitReason, ...]) -> None:
    for reason in reasons:
        assert all(rival.splits != reason.splits for rival in reason.rivals)
        for rival in reason.rivals:
            holds_more = rival.more_weight_bytes > 0 or rival.more_kept_bytes > 0
            assert holds_more or rival.more_s >= -1e-9
            assert rival.more_s == pytest.approx(rival.more_work_s + rival.more_communication_s, abs=1e-8)


def test_reasons_name_the_costliest_operators_of_each_kind_of_block(reasons: tuple[SplitReason, ...]) -> None:
    mlp = [r for r in reasons if r.block == 3]
    assert {"transformer.h.0.mlp.c_fc.matmul", "transformer.h.0.mlp.c_proj.matmul"} <= {r.operator for r in mlp}
    up = next(r for r in mlp if r.operator.endswith("c_fc.matmul"))
    assert (up.blocks, up.op, up.splits, up.share) == (11, "MatMul", ("n",), 0.125)
    assert up.what == "tensor cuts the weight's dimension 1; the result is cut along dimension 2"
    assert {("k",), ("m",)} <= {rival.splits for rival in up.rivals}


def test_figures_of_groups_add_up_to_the_predictions() -> None:
    plan = language().plan
    (group,) = explanation_document(explain(plan))["groups"]
    assert (group["ranks"], group["axes"], group["stages"]) == (8, [("tensor", 8)], (0, 1))
    inside = sum(b["communication_s"] * b["blocks"] for b in group["blocks"])
    assert inside == pytest.approx(sum(stage.inside_s for stage in plan.predictions.stages))
    assert sum(b["blocks"] for b in group["blocks"]) == len(plan.block_table)


def test_an_explanation_tells_of_groups() -> None:
    sample = language()
    found = explain(sample.plan, sample.graph, sample.cluster)
    assert sum(found.time_parts.values()) == pytest.approx(sample.plan.predictions.iteration_s)
    assert "communication inside a group" in found.time_parts
    text = report_to_text(explanation_report(found))
    assert "DP 1 x TP 8 x PP 2" in text
    assert "8 ranks share every operator of a replica (2 stages): mesh tensor 8" in " ".join(text.split())
    assert "Why operators are split as they are" in text
    assert "Why operators are split" not in report_to_text(explanation_report(explain(sample.plan)))
    mixed = " ".join(report_to_text(explanation_report(explain(mixture().plan))).split())
    assert "Of 8 experts of model.layers.0.mlp.experts.transpose_1 and 63 weights like it a rank holds" in mixed
    assert "Inside a group" not in report_to_text(explanation_report(explain(make_plan())))


def test_another_model_is_refused() -> None:
    sample = language()
    other = dataclasses.replace(sample.graph, fingerprint="0" * 64)
    with pytest.raises(UsageError, match="the plan is for another version of gpt2"):
        split_reasons(sample.plan, other, sample.cluster)


def test_a_split_that_cannot_be_is_refused() -> None:
    sample = language()
    (sharding,) = sample.plan.shardings
    entry = sharding.blocks[0]
    wrong = dataclasses.replace(entry, operators=(dataclasses.replace(entry.operators[0], splits=("i0",)),))
    changed = dataclasses.replace(sharding, blocks=(wrong, *sharding.blocks[1:]))
    plan = dataclasses.replace(sample.plan, shardings=(changed,))
    with pytest.raises(PlanError, match=r"'transformer.wte.gather' is sharded in a way that is not legal"):
        split_reasons(plan, sample.graph, sample.cluster)

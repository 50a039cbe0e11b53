"""Damaged plans are refused in a line that names the place, before torch is imported or a process starts."""

from __future__ import annotations

from typing import Any

import pytest

import models
import planner
from planner import runtime
from planner.plans import validate
from tests.models.graphs import gpt
from tests.runtime import cases, damaged


@pytest.mark.parametrize("base", damaged.BASES)
def test_the_plans_are_executed_as_they_are(base: str) -> None:
    runtime.require_executable(damaged.sound(base))


@pytest.mark.parametrize("damage", damaged.DAMAGES, ids=lambda d: f"{d.base} {d.path} {str(d.value)[:20]}")
def test_a_damaged_plan_is_refused_by_place(damage: damaged.Damage) -> None:
    with pytest.raises(planner.PlanError) as error:
        runtime.require_executable(damaged.plan_of(damage))
    assert damage.named in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("model.inputs.0.name", "ids", "no input 'ids'"),
        ("model.outputs.0.name", "logits", "no output 'logits'"),
        ("stages.1.outputs", [], "no output 'lm_head.matmul'"),
        ("model.outputs", [], "lists no output"),
        ("blocks.0.blocks.1.parameters.0.name", "table", "no weight 'table'"),
        ("boundaries.0.shape", [1, 8, 16, 1], "boundaries[0].shape"),
    ],
)
def test_a_plan_of_another_model_is_refused_before_a_process_starts(
    path: str, value: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr("multiprocessing.get_context", lambda kind: pytest.fail("a process is started"))
    plan = damaged.plan_of(damaged.Damage("pipeline", path, value, named))
    with pytest.raises(planner.ShardplanError) as error:
        runtime.run(plan, cases.model("gpt"))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


_OPERATOR = "shardings.0.blocks.3.operators."


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (_OPERATOR + "0.reads.0", "S1", "cannot be split"),
        (_OPERATOR + "0.reads.0", damaged.GONE, "cannot be split"),
        (_OPERATOR + "2.writes.0", "S1", "cannot be split"),
        (_OPERATOR + "2.writes.0", "S2~3", "cannot be split"),
        (_OPERATOR + "4.writes.0", "S1", "cannot be split"),
        (_OPERATOR + "4.writes", [], "cannot be split"),
        (_OPERATOR + "4.splits.0", "sideways", "cannot be split"),
        ("shardings.0.blocks.3.collectives", [], "needed but not listed"),
        ("shardings.0.blocks.3.tensors.2.value", "P", "ln_2.bias"),
        ("shardings.0.blocks.3.tensors.7.gradient", "S3", "c_fc.add"),
    ],
)
def test_layouts_that_the_model_does_not_allow_are_refused(
    path: str, value: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr("multiprocessing.get_context", lambda kind: pytest.fail("a process is started"))
    plan = damaged.plan_of(damaged.Damage("groups", path, value, named))
    with pytest.raises(planner.PlanError) as error:
        runtime.run(plan, cases.model("gpt, wide"))
    assert f"shardings: {plan.shardings[0].name!r}, block" in str(error.value)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_each_block_cuts_duplicated_operators_as_it_likes() -> None:
    plan = cases.plan(cases.Case("", "bert", 2, {"tensor": 2}, 2, way=3))
    places = {t.value for s in plan.shardings for e in s.blocks for t in e.tensors if t.tensor == "bert.unsqueeze_1"}
    assert "bert.unsqueeze_1" in plan.duplicated[0].nodes
    assert places == {"R", "S0"}
    assert not validate(plan, cases.graph("bert"))


def test_a_model_of_other_sizes_is_refused() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    wider = models.build_custom(gpt(8, 32, 4, 32, 8), batch=1, seq=8)
    with pytest.raises(planner.PlanError, match=r"weight 'transformer.wte.weight' is \[32, 32\], in the plan \[32, 16"):
        runtime.run(damaged.sound("pipeline"), wider)


def test_there_are_a_hundred_of_them() -> None:
    assert len({damaged.text_of(damage) for damage in damaged.DAMAGES}) >= 100

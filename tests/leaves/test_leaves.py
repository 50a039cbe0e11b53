"""Every value of a plan of each shape is checked: a seeded sample here, all of them by `make leaves`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.check import check_plan
from planner.plans import loads, plan_schema
from tests.leaves.checking import EXCEPTIONS, edited, missed, mutations_of, sampled, text_of
from tests.leaves.mutations import Mutation
from tests.leaves.shapes import SHAPES, inputs

DOCS = Path(__file__).parents[2] / "docs"
COUNT, SEED = 14, 1
SLOW = ("parts of sequences",)
"""Shapes of which plans take long to search; `make leaves` has them."""


@pytest.mark.parametrize("shape", [name for name in SHAPES if name not in SLOW])
def test_no_mutation_of_a_value_is_missed(shape: str) -> None:
    chosen = sampled(shape, COUNT, SEED)
    if SHAPES[shape].by == "search":  # another job takes another search: `make leaves`
        chosen = [mutation for mutation in chosen if mutation.names[0] != "options"]
    assert missed(shape, chosen) == []


def test_there_are_shapes_and_mutations_of_many_kinds() -> None:
    assert len(SHAPES) >= 14
    assert len(mutations_of("single device")) > 1000
    assert {mutation.what for mutation in mutations_of("single device")} >= {
        "a little more", "a third", "doubled", "zero", "one more", "one less", "flipped", "longer", "shorter", "empty",
        "reversed", "removed", "null", "added",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("free_choice", "iteration_s"), lambda v: v / 3),
        (("free_choice", "bound_s"), lambda v: v * 2),
        (("free_choice",), lambda _: None),
        (("headline",), lambda _: None),
        (("headline", "mfu"), lambda v: v * 1.01),
        (("headline", "iteration_s"), lambda v: v / 2),
        (("headline", "memory_bytes"), lambda v: v // 2),
        (("headline", "device_bytes"), lambda v: v * 2),
        (("headline", "devices"), lambda _: {"h100-sxm-80gb": 4}),
        (("headline", "sequence"), lambda v: v * 2),
        (("options", "headroom"), lambda _: 0.5),
    ],
)
def test_free_choice_and_headline_are_judged_from_the_file_alone(
    path: tuple[str, ...], value: Callable[[Any], Any]
) -> None:
    shape = "for frameworks, ZeRO-3"
    at = json.loads(text_of(shape))
    for part in path:
        at = at.get(part, 0.05) if isinstance(at, dict) else at
    plan = edited(shape, Mutation(path, "", value(at)))
    assert plan is not None
    assert any(path[0] in str(finding) or "headroom" in str(finding) for finding in check_plan(plan).findings)


@pytest.mark.parametrize("shape", ["for frameworks, ZeRO-3", "for no framework"])
def test_a_free_choice_is_what_a_new_search_finds(shape: str) -> None:
    assert check_plan(loads(text_of(shape)), *inputs(shape), search_s=60).findings == ()
    key = "summary" if loads(text_of(shape)).runs_on else "reason"
    plan = edited(shape, Mutation(("free_choice", key), "", "another"))
    assert plan is not None
    assert check_plan(plan).findings == ()
    found = check_plan(plan, *inputs(shape), search_s=60).findings
    assert [str(finding.message).partition(":")[0] for finding in found] == [f"free_choice.{key}"]


def test_exceptions_are_documented() -> None:
    page = (DOCS / "plan.md").read_text()
    for names, reason in EXCEPTIONS.items():
        assert f"`{'.'.join(names)}`" in page
        assert len(reason) > 20


def test_every_key_of_the_schema_has_a_description() -> None:
    schema = plan_schema()
    kinds = {"Plan": schema, **schema["$defs"]}
    assert [
        (name, key)
        for name, kind in kinds.items()
        for key, value in kind.get("properties", {}).items()
        if not value.get("description")
    ] == []


def test_the_page_names_every_key_of_the_schema() -> None:
    page = (DOCS / "plan.md").read_text()
    schema = plan_schema()
    kinds = [schema, *schema["$defs"].values()]
    keys = {key for kind in kinds for key in kind.get("properties", {})}
    assert sorted(key for key in keys if f"`{key}`" not in page and f'"{key}"' not in page) == []

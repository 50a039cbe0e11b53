"""Damaged plans are refused in a line that names the place, before torch is imported or a process starts."""

from __future__ import annotations

import pytest

import planner
from planner import runtime
from tests.runtime import damaged


@pytest.mark.parametrize("base", damaged.BASES)
def test_the_plans_are_executed_as_they_are(base: str) -> None:
    runtime.require_executable(damaged.sound(base))


@pytest.mark.parametrize("damage", damaged.DAMAGES, ids=lambda d: f"{d.base} {d.path} {str(d.value)[:20]}")
def test_a_damaged_plan_is_refused_by_place(damage: damaged.Damage) -> None:
    with pytest.raises(planner.PlanError) as error:
        runtime.require_executable(damaged.plan_of(damage))
    assert damage.named in str(error.value)
    assert "\n" not in str(error.value)


def test_there_are_a_hundred_of_them() -> None:
    assert len({damaged.text_of(damage) for damage in damaged.DAMAGES}) >= 100

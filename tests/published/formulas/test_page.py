"""docs/formulas.md against the code: every formula with an example that runs."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest

import planner
from benchmarks.formulas_page import GROUPS, SIMULATED, members, schedules_of
from planner import formulas

PAGE = Path(__file__).resolve().parents[3] / "docs" / "formulas.md"


def test_all_examples_of_the_page_run() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.failed == 0
    assert result.attempted > len(formulas.written())


@pytest.mark.parametrize("name", formulas.written())
def test_every_formula_has_a_docstring_with_an_example(name: str) -> None:
    text = getattr(formulas, name).__doc__
    assert f"formulas.{name}(" in text
    assert getattr(formulas, name).__name__ == name


def test_type_checkers_see_what_there_is() -> None:
    """The modules whose names they are shown are those of the formulas."""
    shown = {
        node.module
        for block in ast.parse(Path(formulas.__file__).read_text()).body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
    }
    assert shown == {function.__module__ for function in formulas.written().values()}


def test_every_formula_and_schedule_belongs_to_one_system() -> None:
    assert sorted(name for system in GROUPS for name in members(system)) == sorted(formulas.written())
    assert sorted(name for system in GROUPS for name in schedules_of(system)) == list(planner.schedules.names())
    assert all(members(system) or schedules_of(system) for system in GROUPS)
    assert set(SIMULATED) <= set(GROUPS)


def test_every_schedule_has_every_figure() -> None:
    assert formulas.names("gpipe_b") == ("gpipe_bubble", "gpipe_bubble_over_ideal")
    assert formulas.one_f_one_b_makespan_s(4, 8, 1, 2) == 33
    assert formulas.zb_h1_idle_s.__name__ == "zb_h1_idle_s"
    assert 'schedule_figures("v-half"' in formulas.v_half_in_flight.__doc__
    assert "chimera_weight_copies" in dir(formulas)


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("gpipe_buble", "gpipe_bubble"),
        ("bytep_shares", "did you mean 'byteps_shares'"),
        ("chimera_bubbles", "chimera_bubble"),
        ("zero_bytes", "zero_state_bytes"),
    ],
)
def test_a_misspelt_name_is_answered_with_near_ones(asked: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint):
        getattr(formulas, asked)


def test_packages_can_be_had_from_the_front_door() -> None:
    assert planner.formulas is formulas
    assert "gpipe" in planner.schedules.names()
    with pytest.raises(AttributeError, match="did you mean 'formulas'"):
        planner.formula  # noqa: B018
    with pytest.raises(AttributeError, match=r"it is planner\.formulas\.gpipe_bubble"):
        planner.gpipe_bubble  # noqa: B018

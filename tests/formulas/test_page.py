"""docs/formulas.md against the code: every formula with an example that runs."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

import pytest

import planner
from planner import formulas
from planner.formulas.page import SIMULATED, formulas_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "formulas.md"


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text() == formulas_page()


def test_all_examples_of_the_page_run() -> None:
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.failed == 0
    assert result.attempted > len(formulas.names())


@pytest.mark.parametrize("name", formulas.names())
def test_every_formula_has_a_docstring_with_an_example(name: str) -> None:
    text = getattr(formulas, name).__doc__
    assert f">>> formulas.{name}(" in text or f"formulas.{name}(" in text
    assert getattr(formulas, name).__name__ == name


def test_type_checkers_see_what_there_is() -> None:
    shown = {
        alias.asname: node.module
        for block in ast.parse(Path(formulas.__file__).read_text()).body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown == formulas._MODULE_OF


def test_simulations_belong_to_systems() -> None:
    assert set(SIMULATED) <= set(formulas.GROUPS)


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

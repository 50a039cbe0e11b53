"""Every example in a docstring prints what it shows."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import planner

ROOT = Path(__file__).parents[1]

SHOWN = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for top in ("planner", "cli", "models")
    for path in sorted((ROOT / top).rglob("*.py"))
    if "\n    >>> " in (text := path.read_text(encoding="utf-8")) or "\n>>> " in text
]


def test_there_are_examples() -> None:
    assert "planner.exchange.formulas" in SHOWN


@pytest.mark.parametrize("name", SHOWN)
def test_examples_print_what_they_show(name: str) -> None:
    """Examples use `planner`, and `formulas` for those of the package, which the exchange has of its own."""
    module = importlib.import_module(name)
    formulas = planner.exchange.formulas if name.startswith("planner.exchange") else planner.formulas
    result = doctest.testmod(module, extraglobs={"planner": planner, "formulas": formulas})
    assert result.attempted > 0
    assert result.failed == 0

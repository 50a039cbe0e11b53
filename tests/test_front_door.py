"""The names that `planner` exports: each exists, and type checkers see the same ones."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import planner

SOURCE = Path(planner.__file__)


@pytest.mark.parametrize("name", planner.__all__)
def test_every_exported_name_can_be_had(name: str) -> None:
    assert getattr(planner, name) is not None


def test_type_checkers_see_what_is_exported() -> None:
    shown = {
        alias.asname: node.module
        for block in ast.parse(SOURCE.read_text()).body
        if isinstance(block, ast.If)
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert shown == planner._EXPORTS


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        planner.plam  # noqa: B018

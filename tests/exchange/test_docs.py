"""docs/exchange.md and docstrings: what their examples print."""

from __future__ import annotations

import contextlib
import doctest
import io
from pathlib import Path
from types import ModuleType

import pytest

from planner import exchange

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "exchange.md").read_text()


def test_the_example_prints_what_is_shown() -> None:
    code = TEXT.split("```python\n")[1].split("```")[0]
    shown = TEXT.split("```text\n")[1].split("```")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/exchange.md", "exec"), {})
    assert printed.getvalue() == shown


@pytest.mark.parametrize("module", [exchange, exchange.formulas])
def test_the_examples_print_what_they_show(module: ModuleType) -> None:
    result = doctest.testmod(module, extraglobs={"formulas": exchange.formulas})
    assert result.attempted > 0
    assert result.failed == 0

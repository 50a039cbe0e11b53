"""docs/exchange.md: what its example prints."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "exchange.md").read_text()


def test_the_example_prints_what_is_shown() -> None:
    code = TEXT.split("```python\n")[1].split("```")[0]
    shown = TEXT.split("```text\n")[1].split("```")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/exchange.md", "exec"), {})
    assert printed.getvalue() == shown


def test_the_package_example_runs() -> None:
    import doctest

    import planner.exchange

    assert doctest.testmod(planner.exchange).failed == 0

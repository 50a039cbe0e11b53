"""docs/exchange.md against the code: its table of schemes and what its example prints."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from planner.exchange import SCHEMES

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "exchange.md").read_text()
HEADER = "| scheme | decides | time | bytes | memory of a rank | source |"


def _table() -> list[str]:
    lines = TEXT.splitlines()
    start = lines.index(HEADER) + 2
    return [line for line in lines[start : lines.index("", start)] if line]


def test_the_table_lists_every_scheme_with_its_facts() -> None:
    rows = []
    for name, scheme in SCHEMES.items():
        f = scheme.facts
        rows.append(f"| `{name}` | {f.decides} | {f.time} | {f.traffic} | {f.memory} | {f.source} |")
    assert _table() == rows


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

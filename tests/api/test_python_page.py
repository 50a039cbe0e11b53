"""docs/python.md: its blocks run one after the other, as a reader would type them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def test_every_block_runs_after_the_ones_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) >= 10
    known: dict[str, object] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, block in enumerate(BLOCKS):
            exec(compile(block, f"docs/python.md, block {number}", "exec"), known)
    said = printed.getvalue()
    assert "no mesh of 3 ranks lies alike everywhere on dgx-a100 (2 nodes) | " in said
    assert "[(0, " in said  # stages of the search over costs of one's own
    written = {"gpt2.plan.json", "own.json", "gpt2.svg", "gpt2.trace.json", "orders.csv"}
    assert {path.name for path in tmp_path.iterdir()} == written

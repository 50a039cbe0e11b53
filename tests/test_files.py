"""Whole-file writing."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import OutputError
from planner.files import write_whole


def test_content_replaces_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")
    write_whole(target, "new")
    assert target.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("relative", ["missing/a.txt", "folder"])
def test_failure_is_one_error_and_leaves_nothing(tmp_path: Path, relative: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="cannot write"):
        write_whole(tmp_path / relative, "x")
    assert [p.name for p in tmp_path.rglob("*")] == ["folder"]

"""Whole-file writing."""

from __future__ import annotations

import os
import stat
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


def test_what_is_no_regular_file_is_written_to_and_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "plan")
        assert os.read(reader, 10) == b"plan"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(os.lstat(pipe).st_mode)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["pipe"]


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link, ahead = tmp_path / "far" / "plan.json", tmp_path / "link.json", tmp_path / "ahead.json"
    target.write_text("old")
    link.symlink_to(target)
    ahead.symlink_to(tmp_path / "far" / "new.json")
    write_whole(link, "new")
    write_whole(ahead, "first")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert ahead.is_symlink()
    assert (tmp_path / "far" / "new.json").read_text() == "first"


def test_permissions_stay(tmp_path: Path) -> None:
    target = tmp_path / "secret.json"
    target.write_text("old")
    target.chmod(0o600)
    write_whole(target, "new")
    assert stat.S_IMODE(target.stat().st_mode) == 0o600

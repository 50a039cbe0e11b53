"""`shardplan migrate`: old plan files as files of this version."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from planner.plans import read
from tests.cli.plan_files import run

VERSION1 = Path(__file__).parents[1] / "plans" / "version1.json"


def test_an_old_file_is_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "new.plan.json"
    assert run("migrate", str(VERSION1), "-o", str(new)) == 0
    document = json.loads(new.read_text())
    assert document["version"] == 2
    assert [stage["replicas"] for stage in document["configuration"]["stages"]] == [2, 1]
    assert read(new) == read(VERSION1)
    assert run("check", str(new)) == run("check", str(VERSION1))
    before = new.read_bytes()
    capsys.readouterr()
    assert run("migrate", str(new)) == 0
    assert new.read_bytes() == before


def test_standard_input_goes_to_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(VERSION1.read_bytes())))
    assert run("migrate", "-") == 0
    assert json.loads(capsys.readouterr().out)["version"] == 2


@pytest.mark.parametrize(("content", "words"), [("{}", "not a plan file"), ("{", "not JSON"), (None, "cannot read")])
def test_what_is_no_plan_is_refused(
    content: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.json"
    if content is not None:
        path.write_text(content)
    assert run("migrate", str(path), "-o", str(tmp_path / "new.json")) == 7
    assert words in capsys.readouterr().err
    assert not (tmp_path / "new.json").exists()

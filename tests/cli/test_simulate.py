"""`shardplan simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.plans import write
from tests.cli.plan_files import run as command_line
from tests.simulate.plans import toy_plan


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "toy.plan.json"
    write(toy_plan(), path)
    return str(path)


def run(*arguments: str) -> int:
    return command_line("simulate", *arguments)


def test_text(plan_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan_file, "--width", "90") == 0
    text = capsys.readouterr().out
    assert "toy: 1f1b, 6 micro-batches, blocking transfers" in text
    assert "step 26.5 ms" in text
    assert "stage 2  rank 2 " in text
    assert "peak memory" in text
    assert "the plan predicts 500 ms" in text
    assert "\x1b" not in text


def test_json_pictures_and_traces(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    assert run(plan_file, "--format", "json", "--overlap-transfers", "--svg", str(svg), "--trace", str(trace)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["transfers"] == "overlapped"
    assert document["step_s"] == pytest.approx(0.0265)
    assert svg.read_text().startswith("<svg ")
    assert json.loads(trace.read_text())["otherData"]["schedule"] == "1f1b"


@pytest.mark.parametrize("option", ["--svg", "--trace"])
def test_unwritable_output(option: str, plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(plan_file, option, str(tmp_path / "absent" / "file")) == 8
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "cannot write" in captured.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["toy.plan.json"]


def test_not_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert run(str(path)) == 7
    assert "not a plan file" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "shardplan simulate model.plan.json --svg" in capsys.readouterr().out

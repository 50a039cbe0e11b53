"""`shardplan diff` as a user calls it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.diff import AREAS
from planner.plans import Area, seal
from tests.cli.plan_files import run, written
from tests.plans.sample import decision, make_plan


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    old = make_plan()
    p = old.predictions
    slower = dataclasses.replace(p, iteration_s=p.iteration_s * 1.005, samples_per_s=p.samples_per_s / 1.005)
    new = seal(dataclasses.replace(old, predictions=slower))
    return written(old, tmp_path, "old.json"), written(new, tmp_path, "new.json")


def test_equal_plans_exit_with_0(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", two[0], two[0]) == 0
    assert capsys.readouterr().out == "compared 3 stages, 15 operators: no changes\n"


def test_different_plans_exit_with_1(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", *two) == 1
    assert "a step takes 500 ms -> 502.5 ms (+0.50%)" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("--tolerance", "1%"), ("--tolerance", "0.01"), ("--ignore", "predictions")])
def test_small_changes_can_be_let_pass(arguments: tuple[str, ...], two: tuple[Path, Path]) -> None:
    assert run("diff", *two, *arguments) == 0


@pytest.mark.parametrize("arguments", [("--tolerance", "much"), ("--tolerance", "-1%"), ("--ignore", "weather")])
def test_what_is_no_tolerance_or_part_exits_with_2(arguments: tuple[str, ...], two: tuple[Path, Path]) -> None:
    assert run("diff", *two, *arguments) == 2


def test_json_and_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = written(make_plan(), tmp_path, "old.json")
    new = written(make_plan(chosen=decision(starts=(0, 3, 4))), tmp_path, "new.json")
    assert run("diff", old, new, "--format", "json") == 1
    changes = json.loads(capsys.readouterr().out)["changes"]
    moved = {"area": "blocks", "path": ["layers.1", "stage"], "old": 1, "new": 0, "relative": None}
    assert moved in changes
    assert run("diff", old, new, "--format", "markdown") == 1
    assert "- layers.1: stage 1 -> stage 0" in capsys.readouterr().out


def test_every_part_of_a_plan_can_be_ignored() -> None:
    assert set(AREAS) == set(Area)


def git(folder: Path, *arguments: str) -> None:
    """Run git as somebody."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository whose main branch has the old plan, and whose work tree has the new one."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "p.json").write_bytes(two[0].read_bytes())
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "plan")
    (folder / "p.json").write_bytes(two[1].read_bytes())
    monkeypatch.chdir(folder)
    return folder


def test_a_side_may_be_a_file_of_a_revision(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", "HEAD:p.json", "p.json") == 1
    assert "500 ms -> 502.5 ms" in capsys.readouterr().out
    assert run("diff", "HEAD:p.json", "HEAD:p.json") == 0
    capsys.readouterr()
    assert run("diff", "HEAD:q.json", "p.json") == 7
    assert "HEAD:q.json: path 'q.json' does not exist in 'HEAD'" in capsys.readouterr().err


def test_a_side_may_be_a_pipe_or_standard_input(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.write(writing, two[0].read_bytes())
    os.close(writing)
    assert run("diff", f"/dev/fd/{reading}", two[0]) == 0
    os.close(reading)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(two[0].read_bytes())))
    assert run("diff", "-", two[1]) == 1
    assert run("diff", "-", "-") == 2


@pytest.mark.parametrize(
    ("gates", "code"),
    [
        (("step_time:+3%",), 0),
        (("step_time:+0.1%",), 1),
        (("step_time:+3%", "peak_memory:10%"), 1),
        (("error",), 0),
        (("slower",), 1),
        (("weather",), 2),
        (("step_time:-3%",), 2),
    ],
)
def test_gates_alone_decide_the_exit_code(gates: tuple[str, ...], code: int, two: tuple[Path, Path]) -> None:
    assert run("diff", *two, *(word for gate in gates for word in ("--fail-on", gate))) == code


def test_gates_fail_closed(two: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text(two[1].read_text()[:-40])
    assert run("diff", two[0], tmp_path / "broken.json", "--fail-on", "error") == 7
    assert run("diff", two[0], tmp_path / "none.json", "--fail-on", "error") == 7
    (tmp_path / "rules").write_text("slower: severe\n")
    assert run("diff", *two, "--rules", tmp_path / "rules") == 2


def test_severities_of_ones_own_reach_the_gates(two: tuple[Path, Path], tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("slower: error\n")
    assert run("diff", *two, "--fail-on", "error", "--rules", rules) == 1


def test_github_annotations(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", *two, "--fail-on", "step_time:+0.1%", "--format", "github") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"::error file={two[1]},title=gate step_time%3A+0.1%25::step_time is 502.5 ms, +0.50%")
    assert lines[1].startswith(f"::warning file={two[1]},title=slower::")


def test_what_does_not_fit_is_an_answer_on_standard_output(
    two: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("plan", "gpt2-xl", "-H", "v100-pcie-4", "-b", "4", "--devices", "1", "--format", "json") == 6
    captured = capsys.readouterr()
    assert json.loads(captured.out)["format"] == "shardplan-infeasible"
    assert captured.err.startswith("shardplan: error: no plan")
    (tmp_path / "none.json").write_text(captured.out)
    assert run("diff", two[0], tmp_path / "none.json", "--fail-on", "faster") == 1
    assert "a plan that fits: finds no plan that fits" in capsys.readouterr().out


def test_all_lists_every_value(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    run("diff", *two)
    assert "samples_per_s" not in capsys.readouterr().out
    run("diff", *two, "--all")
    assert "samples_per_s" in capsys.readouterr().out

"""What cannot be written, and names that no file can have: own errors of one line, on every command."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

import cli
import planner
from tests.cli.plan_files import run, written
from tests.plans.sample import make_plan

FULL = Path("/dev/full")
LONG = "a" * 6000

needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


@needs_full_device
@pytest.mark.parametrize(
    "line",
    [
        ("--help",), ("plan", "--help"), ("--version",), ("models", "list"), ("hardware", "list"), ("schema", "plan"),
        ("hardware", "show", "dgx-a100"), ("hardware", "init"), ("hardware", "init", "-o", "-"), ("check", "PLAN"),
        ("explain", "PLAN"), ("simulate", "PLAN"), ("simulate", "PLAN", "--format", "json"),
        ("diff", "PLAN", "PLAN"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("buffering", [-1, 1])
def test_a_full_device_as_standard_output(
    line: tuple[str, ...],
    buffering: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = written(make_plan(), tmp_path)
    with open(FULL, "w", buffering=buffering, encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code = run(*(plan if word == "PLAN" else word for word in line))
    assert code == 8
    assert capsys.readouterr().err == (
        "shardplan: error: standard output: cannot write: No space left on device (make room, or use -o FILE)\n"
    )


@needs_full_device
@pytest.mark.parametrize(
    "line", [("hardware", "init", "-o", "/dev/full", "--force"), ("simulate", "PLAN", "--svg", "/dev/full")]
)
def test_a_full_device_as_a_file(line: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(make_plan(), tmp_path)
    assert run(*(plan if word == "PLAN" else word for word in line)) == 8
    assert "/dev/full: cannot write: No space left on device" in capsys.readouterr().err


@needs_full_device
def test_standard_error_on_a_full_device_leaves_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(FULL, "w", buffering=1, encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert run("check", "nowhere.plan.json") == 7


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (("plan", LONG, "-H", "dgx-a100"), 3),
        (("plan", "gpt2", "-H", f"{LONG}.yaml"), 4),
        (("profile", LONG, "-d", "t4-16gb"), 3),
        (("compare", LONG, "-H", "dgx-a100"), 3),
        (("check", LONG), 7),
        (("check", "PLAN", "--model", LONG), 3),
        (("check", "PLAN", "--hardware", f"./{LONG}"), 4),
        (("explain", LONG), 7),
        (("simulate", LONG), 7),
        (("simulate", "PLAN", "--svg", LONG), 8),
        (("diff", "PLAN", LONG), 7),
        (("hardware", "show", f"./{LONG}"), 4),
        (("hardware", "init", "-o", LONG), 8),
    ],
)
def test_paths_of_six_thousand_characters(
    line: tuple[str, ...], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = written(make_plan(), tmp_path)
    assert run(*(plan if word == "PLAN" else word for word in line)) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "internal error" not in said


def test_linting_a_path_of_six_thousand_characters(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hardware", "lint", LONG) == 4
    assert os.strerror(36) in "".join(capsys.readouterr())


def test_every_name_that_a_command_takes_of_the_package_is_there() -> None:
    """Commands import the package when they run, so that no import and no type check finds a name that is gone."""
    missing = []
    for path in Path(cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "planner":
                missing += [] if hasattr(planner, node.attr) else [f"{path.name}: planner.{node.attr}"]
    assert missing == []

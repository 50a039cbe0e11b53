"""`shardplan diff` as a user calls it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cli.diff import AREAS
from planner.plans import Area
from tests.cli.plan_files import run, written
from tests.plans.sample import decision, make_plan


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    old = make_plan()
    p = old.predictions
    slower = dataclasses.replace(p, iteration_s=p.iteration_s * 1.005, samples_per_s=p.samples_per_s / 1.005)
    new = dataclasses.replace(old, predictions=slower)
    return written(old, tmp_path, "old.json"), written(new, tmp_path, "new.json")


def test_equal_plans_exit_with_0(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", two[0], two[0]) == 0
    assert capsys.readouterr().out == "The plans say the same\n"


def test_different_plans_exit_with_1(two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", *two) == 1
    assert "Iteration 500 ms -> 502 ms (+0.5%)" in capsys.readouterr().out


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

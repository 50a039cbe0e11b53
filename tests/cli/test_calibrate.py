"""`shardplan calibrate` and `--stack` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.plan_files import run

RUNS = """global_batch,micro_batch,pp,dp,recompute,seconds,memory_gib
8,1,1,8,never,0.02,3
64,1,1,8,never,0.10,
64,4,1,8,never,0.08,
64,1,2,4,never,0.14,
"""
Capture = pytest.CaptureFixture[str]


def test_a_stack_is_fitted_written_and_used(tmp_path: Path, capsys: Capture) -> None:
    runs, stack, plan = tmp_path / "runs.csv", tmp_path / "mine.yaml", tmp_path / "plan.json"
    runs.write_text(RUNS)
    given = ("gpt2", "-H", "dgx-a100", "--dim", "seq=64")
    assert run("calibrate", *given, "--runs", runs, "-o", stack) == 0
    out = capsys.readouterr().out
    assert "mean error of 4 runs" in " ".join(out.split())
    assert "each left out in turn" in " ".join(out.split())
    assert "peak memory: measured" in out
    assert run("hardware", "lint", stack) == 0
    capsys.readouterr()
    assert run("predict", *given, "-b", 64, "--dp", 8, "--stack", stack, "-o", plan) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "stack mine" in out
    assert "runs of your own under mine, each predicted from the others: 4 runs" in out
    assert json.loads(plan.read_text())["hardware"]["stack"] == "mine"


def test_a_fit_is_written_as_json(tmp_path: Path, capsys: Capture) -> None:
    runs = tmp_path / "runs.csv"
    runs.write_text(RUNS)
    given = ("gpt2", "-H", "dgx-a100", "--dim", "seq=64", "--runs", runs)
    assert run("calibrate", *given, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["run"]["seconds"] for run in found["runs"]] == [0.02, 0.10, 0.08, 0.14]
    assert {factor["bounded"] for factor in found["factors"]} <= {True, False}


def test_an_interval_stands_beside_the_time(capsys: Capture) -> None:
    given = ("gpt2", "-H", "dgx-a100", "--dim", "seq=64", "-b", 64, "--zero", 3, "--stack", "fsdp-2023")
    assert run("predict", *given) == 0
    assert "fsdp-2023 on a100-sxm-80gb, weights shared, one stage: 14 runs" in capsys.readouterr().out
    assert run("predict", *given, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)["measured_error"]
    assert found["runs"] == 14
    assert found["low"] < 1 < found["high"]


def test_stacks_are_listed_and_an_unknown_one_is_named(capsys: Capture) -> None:
    assert run("hardware", "list", "--stacks") == 0
    assert "fsdp-2023" in capsys.readouterr().out
    assert run("predict", "gpt2", "-H", "dgx-a100", "-b", 8, "--stack", "fsdp-2032") == 4
    assert "fsdp-2023" in capsys.readouterr().err

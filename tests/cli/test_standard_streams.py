"""`-` is standard output and standard input in every command."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import planner
from planner.plans import dumps
from tests.cli.plan_files import run
from tests.plans.sample import make_plan

GPT2 = ("gpt2", "-H", "dgx-a100", "-b", 8, "--dim", "seq=128")


def test_a_plan_goes_to_standard_output_and_its_summary_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("predict", *GPT2, "-o", "-") == 0
    out, err = capsys.readouterr()
    assert planner.load_plan(out).micro_batches.global_batch == 8
    assert err.startswith("gpt2, 8 x a100-sxm-80gb, seq 128")
    assert list(tmp_path.iterdir()) == []


def test_every_command_that_reads_a_plan_takes_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, code, said in (("explain", 0, "toy, 3 x toy-gpu"), ("check", 7, "findings"), ("simulate", 0, "step")):
        content = io.BytesIO(dumps(make_plan()).encode())
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=content))
        assert run(command, "-") == code
        assert said in capsys.readouterr().out


def test_pictures_and_costs_go_to_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(dumps(make_plan()))
    assert run("simulate", "plan.json", "--svg", "-") == 0
    out, err = capsys.readouterr()
    assert out.startswith("<svg")
    assert "step" in err
    assert run("profile", "gpt2", "--device", "a100-sxm-80gb", "--dim", "seq=128", "-o", "-") == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict)
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_profile_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("hardware", "init", "-o", "-") == 0
    out, err = capsys.readouterr()
    assert "\ndevices: a100-sxm-80gb\n" in out
    assert err == ""

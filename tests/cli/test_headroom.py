"""`--headroom`: what it means to `predict` and to `plan`, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.hardware import HEADROOM
from tests.cli.plan_files import run

PREDICT = ("predict", "gpt2", "-H", "v100-pcie-4", "-b", "8", "--precision", "fp16", "--format", "json")


def _predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert run(*PREDICT, *arguments) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_predict_says_both_fits(capsys: pytest.CaptureFixture[str]) -> None:
    usual, most = _predicted(capsys), _predicted(capsys, "--headroom", "90%")
    assert (usual["headroom"], usual["fits"], usual["fits_with_headroom"]) == (HEADROOM, True, True)
    # 2 of 15.8 GiB are taken by the weights' 16 bytes a parameter alone: more than a tenth
    assert (most["headroom"], most["fits"], most["fits_with_headroom"]) == (0.9, True, False)
    assert usual["workers"] == most["workers"]


def test_a_plan_says_what_it_leaves_free(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "toy.plan.json"
    arguments = ("plan", "gpt2", "-H", "v100-pcie-4", "--devices", "1", "-b", "2", "-o", str(path))
    assert run(*arguments, "--headroom", "10%") == 0
    assert "a headroom of 10.0% of 15.8 GiB a device is left free" in capsys.readouterr().out
    plan = json.loads(path.read_text())
    assert plan["hardware"]["headroom"] == plan["options"]["headroom"] == 0.1
    assert plan["predictions"]["stages"][0]["capacity_bytes"] == int(0.9 * round(15.78 * 2**30))
    assert run("check", str(path), "--model", "gpt2", "-H", "v100-pcie-4") == 0


@pytest.mark.parametrize("text", ["100%", "2", "-5%", "much"])
def test_nothing_but_a_part_is_taken(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*PREDICT, "--headroom", text) == 2
    assert "--headroom" in capsys.readouterr().err

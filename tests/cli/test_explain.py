"""`shardplan explain` as a user calls it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.plan_files import run, written
from tests.plans.sample import make_plan


def test_text_markdown_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(make_plan(), tmp_path)
    assert run("explain", path) == 0
    text = capsys.readouterr().out
    line = "toy, 3 x toy-gpu, 6 samples a step: 500 ms, 4 samples/s/device, 18.0% MFU, 3 of 16 GiB, 5 of 8 devices idle"
    assert text.startswith(line)
    assert "toy on toy-box: DP 1 x TP 1 x PP 3, micro-batch 1 x 6, 1f1b\n" in text
    assert run("explain", path, "--format", "markdown") == 0
    markdown = capsys.readouterr().out
    assert markdown.startswith("## toy, 3 x toy-gpu, 6 samples a step: 500 ms")
    assert "| part | time | share |" in markdown
    assert run("explain", path, "--format", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["bottleneck"] == 2
    assert data["headline"]["mfu"] == pytest.approx(6 * 15 * 3e9 / 0.5 / 3e12)  # samples, operators, work, s, peak
    assert [rival["label"] for rival in data["rivals"]] == ["runner-up", "one device"]


def test_on_a_terminal_tables_keep_their_numbers_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert run("explain", written(make_plan(), tmp_path)) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert shown.count("  3 GiB") == shown.count("18.8%") == 3


def test_a_file_that_is_not_there_exits_with_7(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", tmp_path / "no.json") == 7
    assert "cannot read" in capsys.readouterr().err


def test_why_not_prices_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = tmp_path / "gpt2.json", ("gpt2", "-H", "dgx-a100", "--dim", "seq=128")
    assert run("plan", *model, "-b", 64, "--for", "any", "-q", "-o", path) == 0
    against = ("--model", *model)
    assert run("explain", path, *against, "--why-not", "tp=8,zero=0") == 0
    text = capsys.readouterr().out
    assert text.startswith("gpt2, 8 x a100-sxm-80gb, seq 128, 8,192 tokens a step: ")
    assert "tp=8,zero=0 is slower: " in text
    assert run("explain", path, *against, "--why-not", "tp=8,zero=0", "--format", "json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["iteration_s"] > data["plan_s"]
    assert run("explain", path, "--why-not", "tp=8,zero=0") == 0  # for what the plan names, sequence length included
    assert capsys.readouterr().out == text


def test_why_not_of_a_model_that_is_not_at_hand_says_how_to_name_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 96, "vocab_size": 100}
    model, plan = tmp_path / "Tiny" / "config.json", tmp_path / "tiny.json"
    model.parent.mkdir()
    model.write_text(json.dumps(config))
    assert run("plan", model, "-H", "dgx-a100", "-b", 64, "--dim", "seq=64", "--for", "any", "-q", "-o", plan) == 0
    assert run("explain", plan, "--why-not", "tp=2") == 2
    words = "the model of the plan, config.json, lies neither here nor beside it (name its file by --model"
    assert words in capsys.readouterr().err
    assert run("explain", plan, "--why-not", "pt=2") == 2
    assert "no choice 'pt' (did you mean 'tp'" in capsys.readouterr().err

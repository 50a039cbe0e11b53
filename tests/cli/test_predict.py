"""`shardplan predict`: what it prints, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.main import main

GPT2 = ["gpt2", "-H", "dgx-a100", "-b", "64", "--dim", "seq=128"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["predict", *arguments])
    out, err = capsys.readouterr()
    code = end.value.code
    assert isinstance(code, int)
    return code, out, err


def test_a_configuration_is_priced_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "named.plan.json"
    code, out, _ = run(capsys, *GPT2, "--pp", "4", "--interleave", "3", "--zero", "1", "-o", str(path))
    assert code == 0
    assert "schedule interleaved:chunks=3; 12 stages, 2 copies" in out
    assert "fullest worker (stages " in out
    assert path.exists()


def test_json_has_every_worker_and_what_it_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["gpt2-xl", "-H", "p3.16xlarge", "-b", "8", "--dim", "seq=128", "--format", "json"]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    found = json.loads(out)
    assert found["fits"] is False
    assert found["workers"][0]["missing_bytes"] > 0
    assert found["configuration"]["copies"] == 8


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--tp", "16"], 5, "needs 16 ranks"),
        (["--pp", "2", "--schedule", "zb-h"], 2, "did you mean"),
        (["--pp", "2", "--starts", "5,3"], 2, "not ascending"),
        (["--pp", "0"], 2, "range"),
    ],
)
def test_failures_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str) -> None:
    ended, out, err = run(capsys, *GPT2, *arguments)
    assert (ended, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1

"""`shardplan export` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.plan_files import run, written
from tests.export.plans import plan


def test_files_are_written_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = written(plan("llama3-8b", pipeline=2, zero=1), tmp_path), tmp_path / "out" / "megatron"
    assert run("export", path, "--to", "megatron", "-o", folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [f"wrote {folder / name}" for name in ("launch.sh", "arguments.txt", "EXPORT.md")]
    assert lines[3].endswith(f"not mapped: see {folder / 'EXPORT.md'}")
    assert "--pipeline-model-parallel-size 2" in (folder / "launch.sh").read_text()
    assert run("export", path, "--to", "megatron", "-o", folder, "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["files"] == [str(folder / name) for name in ("launch.sh", "arguments.txt", "EXPORT.md")]
    assert document["mapped"]["ZeRO-1"].startswith("`--use-distributed-optimizer")


def test_every_reason_to_refuse_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(plan("llama3-8b", pipeline=2, chunks=2, zero=1), tmp_path)
    assert run("export", path, "--to", "deepspeed", "-o", tmp_path / "out") == 7
    assert capsys.readouterr().err.splitlines() == [
        "shardplan: error: DeepSpeed lacks several stages on a rank (`shardplan plan --for deepspeed` does without)",
        "shardplan: error: DeepSpeed lacks the schedule interleaved (`shardplan plan --for deepspeed` does without)",
    ]
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(plan("llama3.2-1b", zero=1), tmp_path)
    assert run("export", path, "--to", "megatron", "-o", path / "below") == 8
    assert "cannot make the folder" in capsys.readouterr().err

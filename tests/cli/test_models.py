"""`shardplan models` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from planner import load_graph
from tests.cli.plan_files import run


def test_list_names_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "family", "parameters", "layers", "seq", "source"]
    rows = (line.split() for line in lines[1:])
    found = {row[0]: row[1:5] for row in rows if len(row) > 4}  # a long source goes on below
    assert found["llama3-70b"] == ["llama", "70.6B", "80", "8192"]
    assert found["megatron-1t"] == ["gpt", "1.01T", "128", "2048"]
    assert found["resnet50"] == ["resnet", "25.6M", "50", "-"]
    assert {family for family, *_ in found.values()} >= {"bert", "t5", "moe", "vit", "vgg", "gnmt", "dlrm"}


def test_list_of_one_family_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "list", "--family", "bert", "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == ["bert-base", "bert-large", "bert-48"]
    assert rows[2]["parameters"] == 669_790_012


def test_build_writes_a_readable_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "tiny.onnx"
    assert run("models", "build", "gpt2", "-o", target, "--batch", "3", "--seq", "16") == 0
    model = onnx.load(target, load_external_data=False)
    assert [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == [3, 16]
    assert "gpt2, batch 3, sequence 16" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.onnx"]


def test_a_family_is_listed_with_the_options_of_its_builders(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "list", "--family", "deepseek") == 0
    lines = capsys.readouterr().out.splitlines()
    (options,) = (line.split() for line in lines if line.startswith("options of deepseek_v3:"))
    assert {"--layers", "--hidden", "--experts", "--top-k", "--q-lora-rank"} <= set(options)
    assert run("models", "list", "--family", "phi") == 0  # a family without bundled models
    assert "options of phi3: --hidden --layers" in capsys.readouterr().out
    assert run("models", "list", "--family", "phi", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        (("llama3-8b", "--layers", "16"), 8_030_261_248 - 16 * 218_112_000),
        (
            ("--family", "llama", "--layers=2", "--hidden", "64", "--heads", "4", "--ffn", "96", "--vocab", "100"),
            2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64,
        ),
    ],
)
def test_build_takes_sizes_of_ones_own(
    sizes: tuple[str, ...], parameters: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "mine.onnx"
    assert run("models", "build", *sizes, "-o", target, "--seq", "16") == 0
    assert "sequence 16" in capsys.readouterr().out
    assert sum(p.elements for p in load_graph(target).parameters) == parameters


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("build", "--family", "llama", "--layer", "4", "-o", "x.onnx"), 2, "did you mean 'layers'"),
        (("build", "--family", "llama", "--layers", "4", "-o", "x.onnx"), 2, "they are --hidden --heads --ffn --vocab"),
        (("build", "--family", "lama", "-o", "x.onnx"), 2, "did you mean 'llama'"),
        (("build", "gpt2", "--layers", "-o", "x.onnx"), 2, "--layers lacks its value"),
        (("build", "gpt2", "4", "-o", "x.onnx"), 2, "'4' is not an option"),
        (("build", "-o", "x.onnx"), 2, "no model is named"),
        (("build", "lama3-70b", "-o", "x.onnx"), 2, "did you mean 'llama3-70b'"),
        (("build", "gpt2", "-o", "x.onnx", "--seq", "4096"), 2, "more than the 1024 positions of gpt2"),
        (("build", "resnet50", "-o", "x.onnx", "--seq", "8"), 2, "reads no sequence"),
        (("build", "gpt2", "-o", "absent/x.onnx"), 8, "cannot write"),
        (("list", "--family", "lama"), 2, "did you mean 'llama'"),
        (("build", "gpt2"), 2, "--output"),
        (("build", "llama3-8b", "--heads", "7", "--kv-heads", "7", "-o", "x.onnx"), 2, "not a multiple of 7 heads"),
        (("build", "gpt2", "-o", "x.onnx", "--batch", "0"), 2, "--batch"),
    ],
)
def test_errors_have_a_code_and_a_remedy_and_write_nothing(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("models", *arguments) == code
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

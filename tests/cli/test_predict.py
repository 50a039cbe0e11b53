"""`shardplan predict`: what it prints, and how it ends."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.cli.plan_files import run as command_line

GPT2 = ["gpt2", "-H", "dgx-a100", "-b", "64", "--dim", "seq=128"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = command_line("predict", *arguments)
    return code, *capsys.readouterr()


def test_a_configuration_is_priced_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "named.plan.json"
    code, out, _ = run(capsys, *GPT2, "--pp", "4", "--interleave", "3", "--zero", "1", "-o", str(path))
    assert code == 0
    assert "DP 2 x TP 1 x PP 4, 3 chunks a worker; schedule interleaved:chunks=3" in " ".join(out.split())
    assert "fullest worker (stages " in out
    assert path.exists()


def test_offload_is_named_by_option_or_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--pp", "2", "--recompute", "act", "--offload", "core_attn,mlp", "--format", "json")
    code, out, _ = run(capsys, *GPT2, *options)
    assert code == 0
    stages = json.loads(out)["configuration"]["stages"]
    assert [(stage["repeats"], stage["offload"]) for stage in stages] == [(["act"], ["core_attn", "mlp"])] * 2
    degrees = {"pipeline": 2, "repeats": ["act"], "offload": ["core_attn", "mlp"]}
    path = tmp_path / "named.json"
    path.write_text(json.dumps({"format": "shardplan-configuration", "version": 1, "degrees": degrees}))
    code, from_file, _ = run(capsys, *GPT2, "--config", str(path), "--format", "json")
    assert (code, json.loads(from_file)) == (0, json.loads(out))
    code, _, error = run(capsys, *GPT2, "--offload", "layer_input")
    assert code
    assert "recompute all layers, or name modules to offload" in error


def test_operators_are_shared_as_by_a_framework_or_in_the_fastest_way(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, model = tmp_path / "named.plan.json", ["llama3.2-1b", "--dim", "seq=512"]
    options = (*model, "-H", "dgx-h100", "-b", "64", "--tp", "8", "-o", str(path))
    taken = []
    for framework in ((), ("--for", "torchtitan")):
        assert run(capsys, *options, *framework)[0] == 0
        taken.append(command_line("check", str(path), "--for", "torchtitan", "--model", *model))
    assert taken == [9, 0]
    assert "did you mean 'torchtitan'" in run(capsys, *options, "--for", "torchtitn")[2]


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
        (["--pp", "0"], 2, "range"),
    ],
)
def test_failures_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str) -> None:
    ended, out, err = run(capsys, *GPT2, *arguments)
    assert (ended, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


DEGREES = '{"format": "shardplan-configuration", "version": 1, "degrees": {"pipeline": 2, "micro_batch": 4}}'


def test_a_configuration_comes_from_a_file_or_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, named, _ = run(capsys, *GPT2, "--pp", "2", "--micro-batch", "4", "--format", "json")
    path = tmp_path / "own.json"
    path.write_text(DEGREES)
    assert run(capsys, *GPT2, "--config", str(path), "--format", "json") == (0, named, "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(DEGREES.encode())))
    assert run(capsys, *GPT2, "--config", "-", "--format", "json")[1] == named
    document = json.loads(named)
    path.write_text(json.dumps({key: document[key] for key in ("format", "version", "configuration")}))
    without_batch = [option for option in GPT2 if option not in ("-b", "64")]
    assert run(capsys, *without_batch, "--config", str(path), "--format", "json")[1] == named


def test_a_plan_file_gives_its_configuration_and_formats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "own.plan.json"
    named = ["--tp", "2", "--pp", "2", "--precision", "fp16", "--optimizer", "sgd", "--format", "json"]
    _, said, _ = run(capsys, *GPT2, *named, "-o", str(path))
    code, again, _ = run(
        capsys, "gpt2", "-H", "dgx-a100", "--dim", "seq=128", "--config", str(path), "--format", "json"
    )
    assert code == 0
    assert json.loads(again) == json.loads(said)


def test_what_it_lacks_to_the_best_plan_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*GPT2, "--pp", "2", "--best"]
    found = json.loads(run(capsys, *arguments, "--format", "json")[1])
    assert found["lacks_s"] == pytest.approx(found["iteration_s"] - found["best_s"])
    assert found["ratio"] == pytest.approx(found["iteration_s"] / found["best_s"])
    assert found["best_s"] >= found["best_bound_s"] > 0
    assert "best plan: " in run(capsys, *arguments)[1]


@pytest.mark.parametrize(
    ("content", "more", "code", "words"),
    [
        (DEGREES, ["--pp", "2"], 2, "--pp does not apply to --config"),
        (DEGREES.replace("pipeline", "pipelne"), [], 7, "pipeline"),
        ("", [], 7, "not JSON"),
        (DEGREES.replace("2", "99", 1), [], 5, "takes 99 devices"),
    ],
)
def test_a_wrong_configuration_file_is_one_line(
    content: str, more: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "own.json"
    path.write_text(content)
    ended, out, err = run(capsys, *GPT2, "--config", str(path), *more)
    assert (ended, out) == (code, "")
    assert words in err


def test_degrees_need_a_global_batch(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "gpt2", "-H", "dgx-a100", "--pp", "2")
    assert code == 2
    assert "--global-batch" in err


def test_devices_that_may_be_used_bound_the_copies(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *GPT2, "--pp", "2", "--devices", "4", "--format", "json")
    assert json.loads(out)["configuration"]["copies"] == 2


def test_a_priced_configuration_claims_no_search(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "named.json")
    code, text, _ = run(capsys, *GPT2, "--zero", "3", "--shard-over", "4", "-o", path)
    assert code == 0
    assert "priced as it was given: nothing was searched" in text
    assert "best found" not in text
    assert "ZeRO-3 over 4" in text
    assert command_line("explain", path) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Nothing was searched; in any order of its work this configuration takes" in text
    assert "No plan of the searched space" not in text

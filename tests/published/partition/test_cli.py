"""Partition problems on the command line, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.plan_files import run
from tests.published.partition.instances import PIPEDREAM, operator_graph, piper, written

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    return written(operator_graph(), tmp_path / "small.json")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return written(PIPEDREAM, tmp_path / "small.graph.txt")


@pytest.fixture
def plan_file(graph: Path, tmp_path: Path) -> Path:
    path = tmp_path / "small.partition.json"
    assert run("plan", graph, "-q", "-o", path) == 0
    return path


def test_an_instance_is_planned_like_a_model(graph: Path, capsys: Capture) -> None:
    assert run("plan", graph) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("small: max-load 5.5 ms\n")
    assert "Proven optimal among contiguous plans" in captured.out
    assert "nothing written; add -o FILE to keep the plan" in captured.out
    assert captured.err == ""


def test_two_runs_write_the_same_bytes(graph: Path, tmp_path: Path, capsys: Capture) -> None:
    for name in ("a", "b"):
        assert run("plan", graph, "--non-contiguous", "-q", "-o", tmp_path / name) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert run("plan", graph, "--non-contiguous", "--format", "json") == 0
    assert capsys.readouterr().out == (tmp_path / "a").read_text()


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ((), 5.5),
        (("--objective", "max-load", "--time-limit", "20s"), 5.5),
        (("--devices", 1, "--memory", "1KB", "--cpus", 0), 10.0),
        (("--solver", "max-load-cp-sat", "--contiguous"), 5.5),
        (("--objective", "latency", "--memory", "1KB"), 10.0),
    ],
)
def test_options_reach_the_problem(graph: Path, options: tuple[object, ...], value: float, capsys: Capture) -> None:
    assert run("plan", graph, *options, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["objective"]["value"] == value


def test_pipers_batch_is_the_global_batch(tmp_path: Path, capsys: Capture) -> None:
    path = written(piper(), tmp_path / "two.json")
    assert run("plan", path, "-b", 4, "--objective", "iteration-time", "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["options"]["batch"], document["objective"]["value"]) == (4, 4.0)


def test_a_profile_is_a_model_unless_something_else_is_said(profile: Path, capsys: Capture) -> None:
    assert run("plan", profile, "-H", "dgx-a100", "-b", 8, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["format"] == "shardplan-plan"
    assert run("plan", profile, "-H", "dgx-a100", "--objective", "time-per-minibatch", "--format", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["format"], document["options"]["machines"]) == ("shardplan-partition", [8])
    assert run("plan", profile, "--machines", "2x2", "--bandwidth", "10GB/s,1GB/s", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["options"]["machines"] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("{graph}", "--precision", "bf16"), 2, "--precision does not apply to an instance of kind operator graph"),
        (("{graph}", "--machines", "4"), 2, "--machines does not apply to the objective max-load"),
        (("{graph}", "--hardware", "dgx-a100"), 2, "--hardware does not apply"),
        (("{graph}", "--nodes", 2), 2, "--nodes needs --hardware"),
        (("{graph}", "--objective", "time-per-sample"), 2, "use max-load or latency"),
        (("{graph}", "--solver", "max-lod"), 2, "did you mean 'max-load-"),
        (("{graph}", "--memory", "120B", "--cpus", 0), 6, "120 B a device is too little memory"),
        (("{graph}", "-o", "/nowhere/x.json"), 8, "cannot write"),
        (("{profile}", "--objective", "time-per-minibatch"), 2, "carries no machine: --machines is missing"),
        (("gpt2", "--cpus", 1), 2, "--cpus is for instances of partition problems"),
        (("gpt2",), 2, "Missing option '--hardware' / '-H'"),
        (("{broken}",), 3, "nodes[1].fpgaLatency: should be a valid number, not 'fast'"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line_with_a_code(
    arguments: tuple[object, ...], code: int, message: str, graph: Path, profile: Path, tmp_path: Path, capsys: Capture
) -> None:
    content = operator_graph()
    content["nodes"][1]["fpgaLatency"] = "fast"
    places = {"{graph}": graph, "{profile}": profile, "{broken}": written(content, tmp_path / "broken.json")}
    assert run("plan", *(places.get(str(a), a) for a in arguments)) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_check_judges_a_plan_against_its_instance(plan_file: Path, graph: Path, capsys: Capture) -> None:
    assert run("check", plan_file) == 0
    assert "not judged against its instance: name it with --model" in capsys.readouterr().out
    assert run("check", plan_file, "--model", graph) == 0
    assert capsys.readouterr().out == (f"{plan_file}: ok (3 parts, 4 nodes, max-load 5.5 ms), judged against {graph}\n")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"nodes": [[10, 11]]', '"nodes": [[10, 12]]', "parts: node 12 is placed twice"),
        ('"value": 5.5', '"value": 5.4', "value: the value is 5.5 ms, not 5.4"),
        ('"memory_bytes": 250.0', '"memory_bytes": 150.0', "memory: accelerator 0 needs 200 of 150 bytes"),
    ],
)
def test_check_exits_with_7_on_any_change(
    plan_file: Path, graph: Path, old: str, new: str, fault: str, capsys: Capture
) -> None:
    text = plan_file.read_text()
    assert old in text
    plan_file.write_text(text.replace(old, new, 1))
    assert run("check", plan_file, "--model", graph) == 7
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{plan_file}: digest: the content is not what was written"
    assert any(line.startswith(f"{plan_file}: {fault}") for line in lines)
    assert run("check", plan_file, "--model", graph, "--format", "json") == 7
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_check_takes_no_hardware(plan_file: Path, capsys: Capture) -> None:
    assert run("check", plan_file, "--hardware", "dgx-a100") == 2
    assert "--hardware does not apply to a partition plan" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["text", "markdown", "json"])
def test_explain_says_what_is_proven_and_who_sets_the_pace(plan_file: Path, form: str, capsys: Capture) -> None:
    assert run("explain", plan_file, "--format", form) == 0
    out = capsys.readouterr().out
    if form == "json":
        assert json.loads(out)["objective"]["proven_optimal"] is True
        return
    assert "Proven optimal among contiguous plans" in out
    assert "Part 0 (accelerator, nodes 10-11) sets the pace; the next one takes 5.5 ms." in out
    assert "one accelerator" in out


def test_diff_tells_two_plans_apart(plan_file: Path, graph: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run("diff", plan_file, plan_file) == 0
    assert capsys.readouterr().out == "The plans say the same\n"
    other = tmp_path / "other.json"
    assert run("plan", graph, "--devices", 1, "--memory", "1KB", "-q", "-o", other) == 0
    assert run("diff", plan_file, other) == 1
    out = capsys.readouterr().out
    assert "max-load 5.5 ms -> max-load 10 ms (+81.82%)" in out
    assert "options.devices" in out
    assert run("diff", plan_file, other, "--format", "json") == 1
    change = {"area": "options", "path": ["options", "devices"], "old": 2, "new": 1, "relative": -0.5}
    assert change in json.loads(capsys.readouterr().out)["changes"]


def test_diff_refuses_plans_of_two_kinds(plan_file: Path, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "plan.json"
    other.write_text("{}")
    assert run("diff", plan_file, other) == 7
    assert "is no partition plan, and the other one is" in capsys.readouterr().err


def test_the_schema_can_be_printed(capsys: Capture) -> None:
    assert run("schema", "partition") == 0
    assert json.loads(capsys.readouterr().out)["properties"]["format"]["const"] == "shardplan-partition"

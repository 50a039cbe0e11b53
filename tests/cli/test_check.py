"""`shardplan check` as a user calls it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from planner.plans import read
from tests.check.edits import EDITS, edited
from tests.check.plans import planned
from tests.cli.plan_files import run, written
from tests.plans.sample import make_plan


@pytest.fixture(scope="module")
def resnet_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "resnet50.plan.json"
    assert run("plan", "resnet50", "-H", "dgx-a100", "-b", 64, "--tp", 1, "-q", "-o", path) == 0
    return path


def test_a_good_plan_exits_with_0_and_says_what_was_not_checked(
    resnet_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", resnet_plan) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"{resnet_plan}: ok (1 stage, 8 ranks, 175 operators)", "not checked:"]
    assert all(line.startswith("  with ") for line in lines[2:])


def test_a_plan_is_checked_against_its_model_and_hardware(
    resnet_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", resnet_plan, "--model", "resnet50", "--hardware", "dgx-a100") == 0
    assert "checked against model resnet50 and hardware dgx-a100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--model", "vgg16"), "model: the plan is for resnet50"),
        (("--hardware", "dgx-h100"), "hardware: the plan is for dgx-a100"),
        (("--hardware", "dgx-a100", "--nodes", 2), "hardware: the plan is for dgx-a100"),
    ],
)
def test_a_plan_for_something_else_exits_with_7(
    arguments: tuple[object, ...], fault: str, resnet_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", resnet_plan, *arguments) == 7
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith(f"{resnet_plan}: {fault}")
    assert f"{resnet_plan}: 1 finding" in out


def test_findings_as_json_name_stage_rank_and_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(dataclasses.replace(planned("tied stages"), shared_parameters=()), tmp_path)
    assert run("check", path, "--format", "json") == 7
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["unchecked"]
    assert {finding["fault"] for finding in document["findings"]} == {"digest", "differs"}
    assert "transformer.wte.weight" in {finding["tensor"] for finding in document["findings"]}


def test_a_changed_figure_is_found_by_its_path(
    resnet_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = edited(read(resnet_plan), EDITS["workspace_bytes zero"])
    assert plan is not None
    path = written(plan, tmp_path)
    assert run("check", path, "--model", "resnet50", "-H", "dgx-a100", "--search", 0) == 7
    out = capsys.readouterr().out
    assert f"{path}: differs: predictions.stages[0].memory.workspace_bytes: 0 in the file, " in out
    assert run("check", path) == 7
    assert "headline.memory_bytes: " in capsys.readouterr().out  # which adds up the fullest device


@pytest.mark.parametrize(
    ("content", "message"), [("", "not JSON"), ("{}", "not a plan file"), ('{"format": "shardplan-plan"}', "version")]
)
def test_what_is_no_plan_exits_with_7_and_one_line(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert run("check", path) == 7
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"shardplan: error: {path}")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("--dim", "seq=8"), ("--nodes", 2)])
def test_options_that_need_another_one_exit_with_2(arguments: tuple[object, ...], tmp_path: Path) -> None:
    assert run("check", written(make_plan(), tmp_path), *arguments) == 2

"""Plans with groups of ranks on the command line: checked, explained, compared, simulated, summed up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import plan_report
from planner.plans import dumps, read
from planner.report import report_to_text
from planner.simulate import simulate
from tests.cli.plan_files import run
from tests.plans.sharded_sample import language, leanest_by_sequence, sharded_plan

AGAINST = ("--model", "gpt2", "--hardware", "dgx-a100", "--nodes", "2")


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded") / "gpt2.plan.json"
    path.write_text(dumps(language().plan))
    return path


def test_check(plan_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    against = (*AGAINST, "--search", "0")  # a decision of the test's own, not the fastest
    assert run("check", str(plan_file), *against) == 0
    assert "checked against model gpt2 and hardware dgx-a100" in capsys.readouterr().out
    damaged = tmp_path / "damaged.plan.json"
    damaged.write_text(plan_file.read_text().replace('"kind": "reduce_scatter"', '"kind": "all_reduce"'))
    assert run("check", str(damaged), *against, "--format", "json") == 7
    faults = {finding["fault"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert faults == {"digest", "differs"}


def test_explain(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", str(plan_file)) == 0
    short = capsys.readouterr().out
    assert "Inside a group: tensor 8, sequence" in short
    assert "Why operators" not in short
    assert run("explain", str(plan_file), *AGAINST) == 0
    assert "transformer.h.0.mlp.c_fc.matmul (MatMul) x 11" in capsys.readouterr().out
    assert run("explain", str(plan_file), *AGAINST, "--format", "json") == 0
    reasons = json.loads(capsys.readouterr().out)["reasons"]
    assert {"operator", "splits", "rivals", "what"} <= reasons[0].keys()
    assert run("explain", str(plan_file), "--model", "gpt2") == 2
    assert "--model and --hardware must be given together" in capsys.readouterr().err


def test_diff(plan_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "narrow.plan.json"
    other.write_text(dumps(sharded_plan("gpt2", (4,), pick=leanest_by_sequence).plan))
    assert run("diff", str(plan_file), str(other), "--all") == 1
    out = capsys.readouterr().out
    assert "stage 0 / mesh" in out
    assert "transformer.h.0[1/2] and 11 blocks like it" in out
    assert run("diff", str(plan_file), str(plan_file)) == 0


def test_groups_act_as_one_when_simulated(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = read(plan_file)
    played = simulate(plan)
    assert played.step_s == pytest.approx(plan.predictions.iteration_s)
    assert {rank for lane in played.lanes for rank in lane.ranks} == set(range(16))
    assert run("simulate", str(plan_file)) == 0
    out = capsys.readouterr().out
    assert "ranks 0-7" in out
    assert "the plan predicts the same" in out


def test_summary() -> None:
    out = " ".join(report_to_text(plan_report(language().plan)).split())
    assert "shared by groups of 8 ranks: mesh tensor 8; tensors between blocks cut by the sequence" in out
    assert "8-15" in out
    assert "inside" in out

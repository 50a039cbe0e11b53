"""`shardplan run` and the launcher's entry."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import onnx  # noqa: E402

import planner  # noqa: E402
from tests.cli.plan_files import run  # noqa: E402
from tests.plans.fixed_batch import model_file, plan_of  # noqa: E402
from tests.runtime import cases  # noqa: E402


def _files(folder: Path, *, gradient: bool = True) -> tuple[str, str]:
    """A plan of two stages and its model.

    Args:
        folder: for both.
        gradient: whether a gradient goes back to the first stage, as it should.
    """
    plan = cases.plan(cases.Case("", "gpt", 2, {"pipeline": 2}, 4))
    boundaries = tuple(dataclasses.replace(b, gradient=b.gradient and gradient) for b in plan.boundaries)
    plan = dataclasses.replace(plan, boundaries=boundaries)
    planner.write_plan(plan, folder / "plan.json")
    onnx.save(cases.model("gpt"), folder / "model.onnx")
    return str(folder / "plan.json"), str(folder / "model.onnx")


def test_run_checks_and_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, model = _files(tmp_path)
    code = run("run", plan, "--model", model, "--check", "--steps", "3", "--learning-rate", "0.1", "--format", "json")
    found = json.loads(capfd.readouterr().out)
    assert code == 0
    assert found["check"]["largest_error"] < 1e-12
    assert found["check"]["wrong"] == []
    assert len(found["losses"]) == 3
    assert {(t["stage"], t["kind"]) for t in found["times"]} == {
        (s, k) for s in (0, 1) for k in ("forward", "backward", "update")
    }


def test_run_says_where_gradients_part(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("planner.runtime.requirements._refuse", lambda findings: None)  # it would be refused before
    plan, model = _files(tmp_path, gradient=False)
    code = run("run", plan, "--model", model, "--check", "--steps", "0")
    assert code == 10
    out = capfd.readouterr().out
    assert "gradients differ" in out
    assert "transformer.wpe.weight of stage 0" in out


def test_run_refuses_a_plan_of_another_model_before_a_process_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multiprocessing.get_context", lambda kind: pytest.fail("a process is started"))
    plan, _ = _files(tmp_path)
    onnx.save(cases.model("gpt, untied"), tmp_path / "other.onnx")
    code = run("run", plan, "--model", str(tmp_path / "other.onnx"))
    assert code != 0
    assert "is this the model that the plan was made for" in capfd.readouterr().err


def _json(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = run("run", *arguments, "--format", "json")
    assert code == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_measure_shows_time_and_memory_beside_the_prediction(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, model = _files(tmp_path)
    trace, predicted = str(tmp_path / "run.json"), str(tmp_path / "simulated.json")
    code = run("run", plan, "--model", model, "--trace", trace)
    assert code == 0
    out = capfd.readouterr().out
    assert out.count("step ") == 3
    assert run("simulate", plan, "--trace", predicted) == 0
    capfd.readouterr()
    here, simulated = (json.loads(Path(file).read_text())["traceEvents"] for file in (trace, predicted))
    assert [e["name"] for e in here if e["ph"] != "C"] == [e["name"] for e in simulated if e["ph"] != "C"]
    assert "an iteration with a core for each rank" in out
    assert "memory by which a process grew" in out
    assert max(map(len, out.splitlines())) <= 100
    found = _json(capfd, plan, "--model", model, "--measure")
    assert [m["rank"] for m in found["memory"]] == [0, 1]
    assert all(m["measured_bytes"] > 0 for m in found["memory"])
    assert {t["kind"] for t in found["times"]} == {"forward", "backward", "update"}
    assert all(t["measured_s"] > 0 for t in found["times"])


def test_the_fullest_rank_runs_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, model = _files(tmp_path)
    stages = planner.read_plan(plan).predictions.stages
    fullest = max(range(2), key=lambda stage: stages[stage].memory.total_bytes)
    found = _json(capfd, plan, "--model", model, "--rank", "fullest", "--alone", "--steps", "2")
    assert found["alone"] == fullest
    assert len(found["step_s"]) == 2
    assert {t["stage"] for t in found["times"]} == {fullest}
    other = _json(capfd, plan, "--model", model, "--rank", str(1 - fullest), "--alone")
    assert {t["stage"] for t in other["times"]} == {1 - fullest}
    for wrong, named in (
        (["--alone"], "must be given together"),
        (["--rank", "0"], "must be given together"),
        (["--rank", "last", "--alone"], "'last' is no rank"),
        (["--rank", "9", "--alone"], "no stage runs on rank 9"),
        (["--rank", "0", "--alone", "--check"], "--check compares all ranks"),
    ):
        assert run("run", plan, "--model", model, *wrong) == 2
        assert named in capfd.readouterr().err


@pytest.mark.parametrize(
    "degrees", [{"tensor": 2, "pipeline": 2}, {"pipeline": 2, "zero": 3}, {"zero": 1, "tensor": 2}]
)
def test_ranks_that_share_work_run_alone(degrees: dict[str, int]) -> None:
    plan = cases.plan(cases.Case("", "gpt, wide", 4, degrees, 4))
    found = planner.runtime.run(plan, cases.model("gpt, wide"), steps=2, alone=3)
    assert [m.rank for m in found.memory] == [3]
    assert len(found.step_s) == 2
    assert {t.stage for t in found.times} == set(plan.stages_of(3))


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_a_file_of_another_batch_runs_from_plan_and_file(micro_batch: int, tmp_path: Path) -> None:
    path = model_file(tmp_path / "fixed.onnx")
    found = planner.runtime.run(plan_of(path, micro_batch), path, steps=1, check=True)
    assert found.check is not None
    assert found.check.largest < 1e-12
    silent = dataclasses.replace(plan_of(path, micro_batch).model, exported_batch=0)
    with pytest.raises(planner.ModelError, match="not exported at the plan's micro-batch"):
        planner.runtime.run(dataclasses.replace(plan_of(path, micro_batch), model=silent), path)


def test_torchrun_trains_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, model = _files(tmp_path)
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "planner.runtime",
    ]
    lines: list[str] = []
    for more in (["--steps", "1", "--save", str(tmp_path / "out")], ["--steps", "1", "--load", str(tmp_path / "out")]):
        done = subprocess.run([*start, plan, model, *more], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        lines += done.stdout.splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert run("run", plan, "--model", model, "--steps", "2", "--format", "json") == 0
    assert losses == pytest.approx(json.loads(capfd.readouterr().out)["losses"], rel=1e-5)

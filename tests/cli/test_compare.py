"""`shardplan compare`: tables in all formats, ranking and refusals."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

import planner
from cli.compare import command
from cli.main import main
from cli.plan_files import check, simulate
from planner import comparison_report
from planner.report import report_to_text
from planner.space import MemoryBytes
from planner.systems import Comparison, Semantics, SystemRow

GNMT = ["gnmt-8", "--hardware", "v100-pcie-4", "--precision", "fp32", "--global-batch", "64"]
FEW_SYSTEMS = ["--systems", "gpipe,pipedream-2bw,chimera,data-parallel,auto"]


SEARCH = planner.compare_systems


@pytest.fixture(autouse=True, scope="module")
def searched_once() -> Iterator[None]:
    """A comparison that is shown in several ways is made once."""
    made: dict[tuple[object, ...], Comparison] = {}

    def compare_systems(pricer: planner.Pricer, cluster: planner.Cluster, job: planner.Job, **asked: Any) -> Comparison:
        question = (pricer.graph.name, cluster.name, job, *asked.items())
        if question not in made:
            made[question] = SEARCH(pricer, cluster, job, **asked)
        return made[question]

    with mock.patch.object(planner, "compare_systems", compare_systems):
        yield


def run(*args: str) -> str:
    result = CliRunner().invoke(command, [*GNMT, *FEW_SYSTEMS, *args], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def document(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("--format", "json", *args))
    return found


def test_synchronous_systems_come_first_and_auto_is_the_best_of_them() -> None:
    rows = document()["rows"]
    assert rows[0]["system"] == "auto"
    assert rows[-1]["system"] == "pipedream-2bw"
    assert rows[-1]["semantics"] == "async"
    synchronous = [r["iteration_s"] for r in rows if r["semantics"] == "sync"]
    assert synchronous == sorted(synchronous)


def test_with_any_semantics_all_are_ranked_by_time() -> None:
    rows = document("--semantics", "any")["rows"]
    times = [r["iteration_s"] for r in rows if r["feasible"]]
    assert times == sorted(times)


def test_rows_add_up() -> None:
    for row in document()["rows"]:
        assert row["samples_per_s"] == pytest.approx(64 / row["iteration_s"])
        memory = row["memory"]
        parts = ("weights", "gradients", "optimizer", "activations", "workspace", "reserve")
        assert row["peak_memory_bytes"] == pytest.approx(sum(memory[part] for part in parts))
        assert row["peak_memory_bytes"] <= row["capacity_bytes"]
        assert 0 <= row["bubble"] < 1
        assert row["devices"] <= row["available"] == 4


def test_formats_and_files(tmp_path: Path) -> None:
    assert "changes" in run() or "asynchronous" in run()
    assert run("--format", "markdown").count("|---") >= 2
    table = list(csv.DictReader(io.StringIO(run("--format", "csv"))))
    assert {r["system"] for r in table} == {"gpipe", "pipedream-2bw", "chimera", "data-parallel", "auto"}
    picture, text = tmp_path / "x.svg", tmp_path / "x.md"
    run("--plot", str(picture), "--output", str(text), "--format", "markdown")
    assert picture.read_text().startswith("<svg")
    assert "auto" in text.read_text()


@pytest.mark.parametrize("width", [80, 100, 120, 150, 200])
def test_a_narrow_terminal_loses_nothing(width: int) -> None:
    memory = MemoryBytes(1e9, 2e9, 3e9, 4e9, 5e9, 6e8)
    done = SystemRow(
        "pipelined-backprop", "PB", Semantics.ASYNC, True, plan="words that say what was decided in full",
        iteration_s=1.5, samples_per_s=1234.0, memory=memory, capacity_bytes=16e9, bubble=0.123, sent_bytes=7e8,
        weight_versions=16, staleness=62, devices=896, available=1024, alters="rows [i, j] alone",
    )  # fmt: skip
    failed = SystemRow("tofu", "Tofu", Semantics.SYNC, False, reason="a shape [n, m] is in the way")
    plain = report_to_text(comparison_report(Comparison("model[x]", "box", 8, "sync", (done, failed))), width, width)
    flat = " ".join(plain.split())
    cells = ("pipelined-backprop*+", "1.5 s", "1,234", "14.5 GiB of 14.9 GiB", "12.3%", "668 MiB", "896 of 1024")
    for cell in (*cells, "16", "62", "model[x] on box", "shape [n, m]", "rows [i, j] alone"):
        assert cell in flat
    for word in done.plan.split():
        assert word in flat
    tables = [
        line for line in plain.splitlines() if "pipelined-backprop*+" in line or line.lstrip().startswith("system")
    ]
    assert max(len(line) for line in tables) <= width


def test_equal_runs_give_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run("--format", "json")
    monkeypatch.setattr(planner, "compare_systems", SEARCH)
    assert run("--format", "json") == first


def test_an_unknown_system_is_one_line_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *GNMT, "--systems", "gpip"])
    assert stop.value.code == 2
    assert "gpipe" in capsys.readouterr().err


def test_plans_of_the_rows_are_written_and_hold(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "plans"
    result = CliRunner().invoke(command, [*GNMT, *FEW_SYSTEMS, "--write-plans", str(folder)], catch_exceptions=False)
    assert f"wrote 5 plans to {folder}" in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == [
        "auto.plan.json", "chimera.plan.json", "data-parallel.plan.json", "gpipe.plan.json", "pipedream-2bw.plan.json",
    ]  # fmt: skip
    file = str(folder / "chimera.plan.json")
    checked = CliRunner().invoke(check, [file, "--model", "gnmt-8", "--hardware", "v100-pcie-4"])
    assert checked.exit_code == 0, checked.output
    played = CliRunner().invoke(simulate, [str(folder / "pipedream-2bw.plan.json")])
    assert "the plan predicts the same" in played.output

"""Sweeps: every combination planned once, kept, and marked where no other beats it."""

from __future__ import annotations

import csv
import io
import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import planner
from planner import UsageError
from planner.ask import Store, SweepRow, points_of, read_axes, run_point
from planner.plans import Headline
from tests.cli.plan_files import run
from tests.listeners import is_running, needs_proc, tree, until

GPT2 = (("model", "gpt2"), ("hardware", "dgx-a100"), ("seq", "128"), ("for", "any"))


def row(name: str, rate: float, dollars: float, gib: int) -> SweepRow:
    line = Headline(
        "toy",
        {"gpu": 1},
        1,
        1 / rate,
        rate,
        gib << 30,
        80 << 30,
        dollars_per_hour=1.0,
        dollars_per_mega_samples=dollars,
    )
    return SweepRow((("name", name),), line, "1 stage")


def test_every_combination_is_a_point_the_last_name_fastest() -> None:
    axes = read_axes(["devices=4,8", "network.bandwidth=100Gbit/s,200Gbit/s"])
    assert points_of(axes) == [
        (("devices", "4"), ("network.bandwidth", "100Gbit/s")),
        (("devices", "4"), ("network.bandwidth", "200Gbit/s")),
        (("devices", "8"), ("network.bandwidth", "100Gbit/s")),
        (("devices", "8"), ("network.bandwidth", "200Gbit/s")),
    ]


def test_a_point_is_the_plan_of_its_values() -> None:
    found = run_point((*GPT2, ("devices", "4"), ("batch", "64"), ("micro-batch", "4"), ("nvlink.bandwidth", "50GB/s")))
    cluster = planner.load_cluster("dgx-a100", devices=4, changes=["nvlink.bandwidth=50GB/s"])
    job = planner.Job(64, micro_batches=(4,), backends=("any",))
    plan = planner.plan(planner.load_graph("gpt2", dims={"seq": 128}), cluster, job)
    assert found.headline == plan.headline
    assert found.bound_s == plan.predictions.bound_s
    assert found.reason == ""


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("tp", "16"), "16 ranks"),
        (("batch", "many"), "'many' is no number for batch"),
        (("network.bandwith", "1GB/s"), "no field 'network.bandwith'"),
        (("precision", "bf17"), "bf17"),
    ],
)
def test_a_point_that_cannot_be_planned_says_why(extra: tuple[str, str], said: str) -> None:
    found = run_point((*GPT2, extra))
    assert found.headline is None
    assert said in found.reason


def test_points_that_none_beats_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"fast": (9.0, 5.0, 40), "cheap": (3.0, 1.0, 50), "small": (2.0, 2.0, 10), "beaten": (2.0, 3.0, 20)}
    made = {(("name", name),): row(name, *figures) for name, figures in rows.items()}
    monkeypatch.setattr("planner.ask.sweeps.run_point", made.get)
    found = planner.sweep(list(made), workers=1)
    assert [dict(each.point)["name"] for each in found if each.pareto] == ["fast", "cheap", "small"]


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [(("name", str(i)),) for i in range(4)]
    planned: list[str] = []

    def plan_it(point: tuple[tuple[str, str], ...]) -> SweepRow:
        planned.append(point[0][1])
        if len(planned) == 3:
            raise KeyboardInterrupt
        return row(point[0][1], 1.0 + int(point[0][1]), 1.0, 10)

    monkeypatch.setattr("planner.ask.sweeps.run_point", plan_it)
    store = Store(tmp_path / "sweep.sqlite")
    with pytest.raises(KeyboardInterrupt):
        planner.sweep(points, store=store, workers=1)
    store.close()
    store = Store(tmp_path / "sweep.sqlite")
    told: list[tuple[int, int]] = []
    found = planner.sweep(points, store=store, workers=1, progress=lambda done, total, _: told.append((done, total)))
    assert planned == ["0", "1", "2", "2", "3"]
    assert told == [(3, 4), (4, 4)]
    assert [each.headline and each.headline.samples_per_s for each in found] == [1.0, 2.0, 3.0, 4.0]
    dearer = planner.sweep(points, store=store, workers=1, price=2.0)
    assert [each.headline and each.headline.dollars_per_hour for each in dearer] == [2.0] * 4
    assert len(planned) == 5


def test_what_is_no_axis_and_no_file_of_a_sweep_is_said(tmp_path: Path) -> None:
    for text, said in (
        ("devcies=4", "did you mean 'devices'"),
        ("devices", "has no values"),
        ("devices=4,,8", "no values"),
    ):
        with pytest.raises(UsageError) as error:
            read_axes([text])
        assert said in str(error.value)
    with pytest.raises(UsageError, match="given twice"):
        read_axes(["tp=1", "tp=2"])
    (tmp_path / "text.sqlite").write_text("not a database, but a text that is long enough to be taken for one" * 20)
    with pytest.raises(UsageError, match="no file in which a sweep can be kept"):
        Store(tmp_path / "text.sqlite")


def test_the_command_prints_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("sweep", "gpt2", "-H", "dgx-h100", "--over", "seq=128", "--over", "batch=64", "--over", "for=any")
    picture, store = tmp_path / "sweep.svg", tmp_path / "sweep.sqlite"
    kept = ("--store", store, "--over", "devices=2,8", "--over", "tp=1,4")
    assert run(*asked, *kept, "-j", 2, "--svg", picture) == 0
    text = capsys.readouterr().out
    assert text.startswith("sweep: gpt2, dgx-h100, seq 128, batch 64, for any\n")
    assert "a mesh of 4 needs 4 ranks, of which there are 2" in text
    assert "4 points, 3 with a plan" in text
    begin = time.monotonic()
    assert run(*asked, *kept, "--format", "csv") == 0
    assert time.monotonic() - begin < 5  # nothing is planned again
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(each["devices"], each["tp"]) for each in rows] == [("2", "1"), ("2", "4"), ("8", "1"), ("8", "4")]
    assert float(rows[2]["iteration_s"]) < float(rows[0]["iteration_s"])
    assert rows[1]["reason"].startswith("a mesh of 4")
    assert run(*asked, *kept, "--format", "json") == 0
    assert [each["pareto"] for each in json.loads(capsys.readouterr().out)][1] is False
    circles = [each for each in ET.parse(picture).iter() if each.tag.endswith("circle") and len(each)]  # with a tooltip
    assert len(circles) == 3
    assert run(*asked, "--over", "tp=64") == 6


def test_options_of_plan_hold_for_all_points(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ("sweep", "gpt2", "-H", "dgx-h100", "-b", 64, "--dim", "seq=128", "--for", "any", "--tp", "1,2", "--pp", 1)
    assert run(*fixed, "--set", "nvlink.latency=9us", "--over", "devices=2,8") == 0
    title, _, _, *rows = capsys.readouterr().out.splitlines()
    assert title == "sweep: gpt2, dgx-h100, batch 64, for any, tp 1,2, pp 1, seq 128, nvlink.latency 9us"
    assert [row.split()[0] for row in rows[:2]] == ["2", "8"]
    assert all("PP 1" in row for row in rows[:2])
    assert run(*fixed, "--over", "tp=1,2") == 2
    assert "tp is given for all points and with --over" in capsys.readouterr().err
    assert run(*fixed, "--dim", "batch", "--over", "devices=2") == 2


def test_a_dask_scheduler_plans_points() -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster:
        points = [(*GPT2, ("devices", "2"), ("batch", "16")), (*GPT2, ("devices", "4"), ("batch", "16"))]
        found = planner.sweep(points, on=cluster.scheduler_address)
    assert [each.reason for each in found] == ["", ""]
    assert [each.headline and each.headline.device_count for each in found] == [2, 4]


def test_dask_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(UsageError, match="--on needs dask"):
        planner.sweep([GPT2], on="tcp://127.0.0.1:1")


SWEEP = """
import planner
if __name__ == "__main__":
    points = [(("model", "gpt2"), ("hardware", "dgx-a100"), ("batch", str(8 * k))) for k in range(1, 500)]
    planner.sweep(points, workers=2)
"""


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_sweep(number: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(SWEEP)
    with subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL) as process:
        assert until(lambda: len(tree(process.pid)) >= 4)  # itself, two workers, and a process that Python adds
        processes = tree(process.pid)
        time.sleep(2)
        process.send_signal(number)
        process.wait(20)
    assert until(lambda: not any(map(is_running, processes)))

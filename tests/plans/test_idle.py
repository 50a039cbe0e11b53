"""Devices that a plan leaves idle are said, with a batch or more replicas that use them; the gain holds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import planner
from planner.plans import seal
from tests.cli.plan_files import run
from tests.plans.sample import make_plan


@pytest.fixture(scope="module")
def graph() -> planner.Graph:
    return planner.load_graph("gpt2", dims={"seq": 128})


@pytest.fixture(scope="module")
def cluster() -> planner.hardware.Cluster:
    return planner.load_cluster("dgx-a100")


def pace(plan: planner.Plan) -> float:
    """Samples a second."""
    return plan.micro_batches.global_batch / plan.predictions.reached_s


def test_a_batch_that_does_not_divide(graph: planner.Graph, cluster: planner.hardware.Cluster) -> None:
    """65 samples divide by 5: three of eight devices have nothing. 64 is the nearest batch that eight divide."""
    plan = planner.plan(graph, cluster, planner.Job(65))
    line = plan.headline
    assert line is not None
    assert (line.device_count, line.available_devices, line.fuller_batch, line.fuller_data) == (5, 8, 64, 8)
    assert "3 of 8 devices idle (-b 64, DP 8: +" in str(line)
    at_64 = planner.plan(graph, cluster, planner.Job(64))
    assert line.fuller_gain == pytest.approx(pace(at_64) / pace(plan) - 1, abs=0.01)
    assert at_64.headline is not None
    assert at_64.headline.available_devices == 0
    assert "idle" not in str(at_64.headline)
    assert planner.check_plan(plan, graph, cluster).findings == ()
    flattering = dataclasses.replace(plan, headline=dataclasses.replace(line, fuller_gain=0.9))
    findings = planner.check_plan(seal(flattering), graph, cluster).findings
    assert any("fuller_gain" in str(finding) for finding in findings)


def test_a_batch_below_the_devices(graph: planner.Graph, cluster: planner.hardware.Cluster) -> None:
    line = planner.predict(graph, cluster, planner.Job(3), planner.Degrees(data=3)).plan.headline
    assert line is not None
    assert (line.available_devices - line.device_count, line.fuller_batch, line.fuller_data) == (5, 8, 8)


def test_named_degrees_that_use_two_of_eight(graph: planner.Graph, cluster: planner.hardware.Cluster) -> None:
    """The batch divides; what is missing is replicas. Their step is predicted as for --dp 8."""
    two, eight = (
        planner.predict(graph, cluster, planner.Job(64), planner.Degrees(data=data, micro_batch=4)).plan
        for data in (2, 8)
    )
    line = two.headline
    assert line is not None
    assert (line.available_devices, line.fuller_batch, line.fuller_data) == (8, 64, 8)
    assert line.fuller_gain == pytest.approx(pace(eight) / pace(two) - 1, rel=1e-6)
    assert line.idle_words == f"6 of 8 devices idle (DP 8: +{line.fuller_gain:.0%} samples/s)"


def test_a_pipeline_as_often_as_it_goes(graph: planner.Graph, cluster: planner.hardware.Cluster) -> None:
    one, two = (
        planner.predict(graph, cluster, planner.Job(64), planner.Degrees(pipeline=3, data=data)).plan for data in (1, 2)
    )
    line = one.headline
    assert line is not None
    assert (line.available_devices, line.device_count, line.fuller_data) == (8, 3, 2)
    assert line.fuller_gain == pytest.approx(pace(two) / pace(one) - 1, abs=0.02)


def test_all_devices_at_work_in_a_slower_shape(graph: planner.Graph, tmp_path: Path) -> None:
    """Seven devices and 64 samples: a pipeline of seven. 63 divide by seven, and each device has its own."""
    profile = tmp_path / "seven.yaml"
    node = ("--per-node", "7", "--inside", "nvlink:450GB/s")
    assert run("hardware", "init", "--device", "h100-sxm-80gb", *node, "-o", str(profile)) == 0
    seven = planner.load_cluster(profile)
    plan = planner.predict(graph, seven, planner.Job(64), planner.Degrees(pipeline=7)).plan
    assert plan.headline is not None
    assert plan.headline.idle_words == ""  # the shape was the user's
    llama = planner.load_graph("llama3-8b", dims={"seq": 1024})
    searched = planner.plan(llama, seven, planner.Job(64))
    line = searched.headline
    assert line is not None
    assert (line.device_count, line.available_devices) == (7, 7)
    at_63 = planner.plan(llama, seven, planner.Job(63))
    assert (line.fuller_batch, line.fuller_data) == (63, 7)
    assert line.fuller_gain == pytest.approx(pace(at_63) / pace(searched) - 1, abs=0.02)
    assert line.idle_words == f"-b 63, DP 7: +{line.fuller_gain:.0%} samples/s"


def test_devices_that_the_job_may_not_use_are_not_idle(graph: planner.Graph, cluster: planner.hardware.Cluster) -> None:
    line = planner.predict(graph, cluster, planner.Job(65, devices=5), planner.Degrees(data=5)).plan.headline
    assert line is not None
    assert line.available_devices == 0
    assert line.idle_words == ""


def test_without_another_price_the_count_is_said() -> None:
    """The toy is priced at one batch only."""
    line = make_plan().headline
    assert line is not None
    assert line.idle_words == "5 of 8 devices idle (--devices 3 is as fast)"


def test_every_form_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "idle.plan.json"
    job = ("gpt2", "-H", "dgx-a100", "--dim", "seq=128", "-b", "64", "--dp", "2")
    assert run("predict", *job, "-o", str(file)) == 0
    assert "6 of 8 devices idle" in capsys.readouterr().out.splitlines()[0]
    assert run("predict", *job, "--format", "json") == 0
    line = json.loads(capsys.readouterr().out)["headline"]
    assert (line["available_devices"], line["fuller_batch"], line["fuller_data"]) == (8, 64, 8)
    assert json.loads(file.read_text())["headline"]["available_devices"] == 8
    assert run("explain", str(file)) == 0
    assert "6 of 8 devices idle" in capsys.readouterr().out.splitlines()[0]


def test_a_system_proposes_nothing_beyond_its_rules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPipe does not replicate: its idle devices are counted, and more replicas are not its to propose."""
    file = tmp_path / "gpipe.plan.json"
    job = ("gpt2", "-H", "dgx-a100", "--dim", "seq=128", "-b", "65")
    assert run("plan", *job, "--system", "gpipe", "-o", str(file)) == 0
    assert "devices idle (--devices " in capsys.readouterr().out.splitlines()[0]
    assert "fuller_batch" not in json.loads(file.read_text())["headline"]
    assert run("compare", *job, "--systems", "gpipe") == 0
    assert "devices idle (--devices " in capsys.readouterr().out.splitlines()[0]

"""Measured iterations to figures of a stack: what is known is found again, and a wrong file is refused by its line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

import planner
from cli.main import app
from planner.calibration import Run, calibrate, calibrated_stack, parse_runs

HEADER = "tp,pp,dp,micro_batch,zero,recompute,global_batch,seconds,memory_gib\n"
DEGREES = (
    planner.Degrees(data=8, micro_batch=4, zero=1),
    planner.Degrees(tensor=2, pipeline=2, data=2, micro_batch=2),
    planner.Degrees(tensor=4, data=2, micro_batch=8),
    planner.Degrees(pipeline=4, data=2, micro_batch=4, recompute=True),
    planner.Degrees(data=8, micro_batch=1),
    planner.Degrees(tensor=8, micro_batch=16),
)


@pytest.fixture(scope="module")
def graph() -> planner.Graph:
    return planner.load_graph("gpt2", dims={"seq": 256})


def cluster_of(stack: planner.hardware.Stack) -> planner.Cluster:
    return planner.load_cluster("dgx-a100", stack=stack)


def test_figures_of_another_stack_are_found_again(graph: planner.Graph) -> None:
    """Runs as a slower machine with a slower host would take them, with 1 % of noise in turns up and down."""
    base, job = planner.load_stack("megatron-2021"), planner.Job(64)
    truth = dataclasses.replace(base, matrix_rate=0.85 * base.matrix_rate, launch_s=1.5 * base.launch_s)
    measured = planner.predict_many(graph, cluster_of(truth), job, DEGREES)
    noise = (1.01, 0.99, 1.01, 0.99, 1.01, 0.99)
    runs = [Run(degrees, 64, float(s) * k) for degrees, s, k in zip(DEGREES, measured.iteration_s, noise, strict=True)]
    found = calibrate(graph, cluster_of, base, job, runs)
    assert 2 <= len(found.factors) <= 3  # one for two runs
    assert "launch" in {factor.name for factor in found.factors}
    assert found.error("before_s") > 0.1
    assert found.error("after_s") < 0.03
    assert found.error("left_out_s") < 0.06
    assert found.memory is None
    for factor in found.factors:
        assert factor.low < factor.value < factor.high


def test_the_command_writes_a_stack_that_lints_and_plans(tmp_path: Path) -> None:
    runs, ours = tmp_path / "runs.csv", tmp_path / "ours.yaml"
    runs.write_text(
        HEADER + "1,1,8,4,1,never,64,0.05,4\n2,2,2,2,0,never,64,0.12,3\n4,1,2,8,0,never,64,0.09,\n8,1,1,8,0,,64,0.1,5\n"
    )
    options = ["gpt2", "-H", "dgx-a100", "--dim", "seq=256", "--runs", str(runs), "-o", str(ours)]
    done = CliRunner().invoke(app, ["calibrate", *options])
    assert done.exit_code == 0, done.output
    assert "mean error of 4 runs" in done.output
    assert CliRunner().invoke(app, ["hardware", "lint", str(ours)]).exit_code == 0
    stack = planner.load_stack(ours)
    assert stack.name == "ours"
    assert stack.allocator_cache != 1.0


def test_the_stack_file_keeps_what_was_not_fitted(graph: planner.Graph) -> None:
    base, job = planner.load_stack("megatron-2021"), planner.Job(64)
    measured = planner.predict_many(graph, cluster_of(base), job, DEGREES[:4])
    figures = zip(DEGREES[:4], measured.iteration_s, measured.peak_bytes, strict=True)
    runs = [Run(d, 64, float(s), 2 * float(p)) for d, s, p in figures]
    found = calibrate(graph, cluster_of, base, job, runs)
    assert [factor.value for factor in found.factors] == pytest.approx([1.0] * len(found.factors), abs=1e-6)
    text = calibrated_stack(found, "same", "gpt2", "dgx-a100")
    assert "base: megatron-2021" in text
    assert found.memory is not None
    assert found.memory[0] > 2.0  # the reserve is no part of what an allocator holds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp,zeroo,global_batch,seconds\n", "unknown column 'zeroo'"),
        ("tp,global_batch\n1,64\n", "no column 'seconds'"),
        ("tp,global_batch,seconds\nfour,64,1\n", "'four' is no number for tp"),
        ("tp,global_batch,seconds\n4,64,-1\n", "seconds is '-1'"),
        ("zero,global_batch,seconds\n4,64,1\n", "'4' is no number for zero"),
        ("tp,global_batch,seconds\n4,64\n", "not as many values"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(planner.UsageError, match=message) as caught:
        parse_runs(text, "runs.csv")
    assert (caught.value.problem.where or "").startswith("runs.csv:")


def test_a_run_that_cannot_be_is_refused_by_its_line(graph: planner.Graph) -> None:
    runs = parse_runs("tp,dp,global_batch,seconds\n1,8,64,1\n1,8,64,1\n3,4,64,1\n", "runs.csv")
    with pytest.raises(planner.JobError, match="line 4"):
        calibrate(graph, cluster_of, planner.load_stack(), planner.Job(1), runs)


def test_too_few_runs_are_refused(graph: planner.Graph) -> None:
    with pytest.raises(planner.UsageError, match="2 runs"):
        calibrate(graph, cluster_of, planner.load_stack(), planner.Job(1), [Run(d, 64, 1.0) for d in DEGREES[:2]])

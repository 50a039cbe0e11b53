"""Fitting a stack to measured iterations: what the runs were made with is found again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import planner
from planner import Job, UsageError

HEAD = "global_batch,micro_batch,pp,dp,recompute,seconds\n"
CONFIGURATIONS = (
    "64,1,1,8,never", "64,8,1,8,never", "64,4,1,8,never", "64,1,2,4,never", "64,2,4,2,always", "128,8,2,4,always",
)  # fmt: skip


def made_with(stack: planner.Stack, configurations: tuple[str, ...] = CONFIGURATIONS) -> str:
    """Runs as a machine with that stack would take, in CSV."""
    cluster = planner.load_cluster("dgx-a100", stack=stack)
    lines = []
    for line in configurations:
        run = planner.read_measured_runs(HEAD + f"{line},1\n" * 3)[0]
        found = planner.predict_many(graph(), cluster, Job(run.global_batch), [run.degrees])
        lines.append(f"{line},{found.iteration_s[0]:.9g}\n")
    return HEAD + "".join(lines)


def graph() -> planner.Graph:
    return planner.load_graph("gpt2", dims={"seq": 256})


def test_the_figures_that_runs_were_made_with_are_found_again() -> None:
    base = planner.load_stack("megatron-2021")
    true = replace(base, launch_s=2 * base.launch_s, matrix_rate=0.8 * base.matrix_rate)
    runs = planner.read_measured_runs(made_with(true))
    found = planner.calibrate(graph(), "dgx-a100", Job(1), runs, stack=base)
    factors = {each.key: each.factor for each in found.factors}
    assert factors["launch"] * factors["stretch"] == pytest.approx(2, rel=0.1)  # runs tell only the product
    before, after, left_out = (np.abs(np.array(r) - 1).mean() for r in (found.before, found.after, found.left_out))
    assert before > 0.15
    assert after < 0.02
    assert left_out < 0.05
    assert all(0 < each.deviation < 0.5 for each in found.factors)


def test_the_overlay_prices_as_it_was_fitted(tmp_path: Path) -> None:
    base = planner.load_stack("megatron-2021")
    runs = planner.read_measured_runs(made_with(replace(base, launch_s=1.5 * base.launch_s)))
    found = planner.calibrate(graph(), "dgx-a100", Job(1), runs, stack=base)
    path = tmp_path / "mine.yaml"
    path.write_text(planner.calibrated_yaml(found, "megatron-2021", "runs.csv"))
    stack = planner.load_stack(path)
    assert stack.name == "megatron-2021-calibrated"
    assert stack.launch_s == pytest.approx(found.stack.launch_s, rel=1e-3)
    assert stack.matrix_rate == pytest.approx(found.stack.matrix_rate, rel=1e-3)
    assert "6 measured runs" in stack.about


def test_runs_that_no_factor_explains_stop_at_the_bounds() -> None:
    base = planner.load_stack("megatron-2021")
    text = made_with(base)
    slow = HEAD + "".join(f"{line},{100 * float(line.split(',')[-1])}\n".replace(line, line.rpartition(",")[0], 1)
                          for line in text.splitlines()[1:])  # fmt: skip
    found = planner.calibrate(graph(), "dgx-a100", Job(1), planner.read_measured_runs(slow), stack=base)
    assert any(each.bounded for each in found.factors)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "64,1,1,8,never,1\n", "too few"),
        (HEAD.replace("pp", "pipeline") + "64,1,1,8,never,1\n" * 3, "unknown column 'pipeline'"),
        (HEAD + "64,1,one,8,never,1\n" * 3, "cannot read the run"),
        (HEAD + "64,1,1,8,never,0\n" * 3, "takes 0 seconds"),
    ],
)
def test_runs_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planner.read_measured_runs(text)


def test_a_configuration_that_makes_no_sense_is_named() -> None:
    runs = planner.read_measured_runs(HEAD + "64,1,1,8,never,1\n" * 2 + "64,7,1,8,never,1\n")
    with pytest.raises(UsageError, match="run 3 cannot be predicted"):
        planner.calibrate(graph(), "dgx-a100", Job(1), runs, stack=planner.load_stack())

"""The best stages for one schedule: limits that hold, and recomputation that an order does by itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import planner

JOB = planner.Job(global_batch=64, precision="fp32", micro_batches=(8,))


def planned(schedule: str | Path, **limits: Any) -> planner.Plan:
    graph, cluster = planner.load_graph("gpt3-125m", dims={"seq": 256}), planner.load_cluster("dgx-a100")
    return planner.plan_schedule(schedule, graph, cluster, dataclasses.replace(JOB, **limits))


@pytest.mark.parametrize("schedule", ["gpipe:recompute=true", "gpipe:recompute=true,early=true"])
def test_an_order_that_recomputes_is_charged_for_it_once(schedule: str) -> None:
    plan = planned(schedule, pipeline_stages=(4,), data_parallel=(1,))
    assert [stage.recompute for stage in plan.stages] == [True] * 4
    assert plan.predictions.iteration_s == pytest.approx(plan.predictions.simulated_iteration_s, rel=1e-6)
    for stage, figures in zip(plan.stages, plan.predictions.stages, strict=True):
        # all of the forward is repeated, and only what enters the stage is kept for each of the 8 micro-batches
        assert figures.recompute_s == pytest.approx(figures.forward_s, rel=1e-6)
        assert figures.backward_s > figures.recompute_s
        entering = 8 * 256 * 768 * 4 if stage.index else 8 * 256 * 8  # the residual stream; token numbers
        assert figures.unit_bytes == pytest.approx(entering, abs=8 * 256 * 8)
    assert planner.validate_plan(plan, None, planner.load_cluster("dgx-a100")) == []


@pytest.mark.parametrize(
    ("schedule", "buffers"),
    [("pipemare", 1), ("pipelined-backprop", 0), ("pipelined-backprop:mitigation=sc", 0),
     ("pipelined-backprop:mitigation=lwp", 1), ("pipelined-backprop:mitigation=spectrain", 1)],
)  # fmt: skip
def test_what_a_correction_of_delays_keeps_is_in_the_memory(schedule: str, buffers: int) -> None:
    """Adam in fp32 keeps twice the weights; the velocity (T2) or the predicted weights are as many again."""
    plan = planned(schedule, pipeline_stages=(4,), data_parallel=(1,))
    for stage, figures in zip(plan.stages, plan.predictions.stages, strict=True):
        assert figures.memory.weights_bytes == stage.parameters * 4
        assert figures.memory.optimizer_bytes == (2 + buffers) * stage.parameters * 4


def test_stages_that_the_order_does_not_recompute_keep_everything(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    first, second = ("F0.0 F0.1 R0.0 B0.0 R0.1 B0.1", "F1.0 B1.0 F1.1 B1.1")
    rows = [f"{worker},{word}" for worker, lane in enumerate((first, second)) for word in lane.split()]
    path.write_text("\n".join(["worker,action", *rows]) + "\n")
    plan = planned(path, global_batch=16)
    assert [stage.recompute for stage in plan.stages] == [True, False]
    assert [figures.recompute_s > 0 for figures in plan.predictions.stages] == [True, False]
    assert plan.predictions.iteration_s == pytest.approx(plan.predictions.simulated_iteration_s, rel=1e-6)


def test_exchanges_that_are_added_to_a_file_may_not_cross_its_own(tmp_path: Path) -> None:
    """The second worker has no exchange of stage 0: it comes at its end, where the first waits for stage 1's before."""
    path = tmp_path / "orders.json"
    path.write_text('{"lanes": ["F0.0 F1.0 B1.0 B0.0 S0 S1 U0 U1", "F0.1 F1.1 B1.1 B0.1 S1"]}')
    with pytest.raises(planner.PlanError, match=r"orders.json: the schedule deadlocks: worker 0 at S0 waits for S0 of"):
        planned(path)


def test_an_order_that_recomputes_is_not_planned_without() -> None:
    with pytest.raises(planner.JobError, match=r"with .*--recompute never"):
        planned("gpipe:recompute=true", recompute="never")


@pytest.mark.parametrize(
    ("schedule", "limits", "stages", "replicas"),
    [
        ("zb-h1", {"pipeline_stages": (4,)}, 4, None),
        ("zb-h1", {"data_parallel": (4,)}, None, 4),
        ("chimera", {"pipeline_stages": (2, 4), "data_parallel": (4,)}, None, 4),
        ("interleaved", {"pipeline_stages": (4,)}, 4, None),
        ("1f1b", {"pipeline_stages": (7,), "uniform": True, "tensor_parallel": (1, 2), "zero": (0, 1)}, 7, 1),
    ],
)
def test_limits_hold(schedule: str, limits: dict[str, object], stages: int | None, replicas: int | None) -> None:
    plan = planned(schedule, **limits)
    assert stages in (None, len(plan.stages))
    assert {len(stage.replicas) for stage in plan.stages} == {replicas or len(plan.stages[0].replicas)}


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"tensor_parallel": (2, 4)}, "--tp 2,4"),
        ({"zero": (1, 2)}, "--zero 1 --zero 2"),
        ({"meshes": ((2, 2),)}, "--mesh 2x2"),
        ({"forbid": ("MatMul:k",)}, "--forbid MatMul:k"),
        ({"overlap": 0.5}, "--overlap 0.5"),
        ({"keep": (("layer0", 0),)}, '--keep "layer0 on stage 0"'),
    ],
)
def test_limits_that_cannot_hold_are_refused(limits: dict[str, object], words: str) -> None:
    with pytest.raises(planner.UsageError) as refused:
        planned("zb-h1", **limits)
    assert f"cannot follow {words}" in str(refused.value)


def test_activations_that_are_moved_away_cost_time() -> None:
    graph, fast = planner.load_graph("gpt3-125m"), planner.load_cluster("v100-pcie-4")
    slow = [dataclasses.replace(level, byte_per_s=5e8, device_byte_per_s=5e8) for level in fast.levels]
    cluster = dataclasses.replace(fast, levels=tuple(slow))
    job = dataclasses.replace(JOB, precision="fp16", pipeline_stages=(4,), global_batch=128)
    moved, kept = (planner.plan_schedule(name, graph, cluster, job) for name in ("bpipe", "1f1b"))
    assert ">" in "".join(order.actions for order in moved.schedule.orders)
    assert moved.predictions.iteration_s == pytest.approx(moved.predictions.simulated_iteration_s, rel=1e-6)
    # where moving is slow, stages are cut so that little is moved: without its price they took 4.5 times as long
    assert moved.predictions.iteration_s < 1.05 * kept.predictions.iteration_s

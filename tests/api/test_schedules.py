"""Plans for one schedule or orders of one's own: limits that hold, and recomputation that an order does by itself."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import schedules

JOB = planner.Job(global_batch=64, precision="fp32", micro_batches=(8,))


def planned(schedule: str | Path, **limits: Any) -> planner.Plan:
    graph, cluster = planner.load_graph("gpt3-125m", dims={"seq": 256}), planner.load_cluster("dgx-a100")
    return best_stages(schedule, graph, cluster, dataclasses.replace(JOB, **limits))


def best_stages(schedule: str | Path, graph: Any, cluster: Any, job: planner.Job) -> planner.Plan:
    """The best stages of single devices for a schedule by its name, or orders in a file."""
    job = dataclasses.replace(job, tensor_parallel=job.tensor_parallel or (1,), zero=(0,), backends=("any",))
    if isinstance(schedule, Path):
        return planner.plan(graph, cluster, job, orders=schedule)
    return planner.plan(graph, cluster, dataclasses.replace(job, schedules=(schedule,)))


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
    assert planner.plans.validate(plan, None, planner.load_cluster("dgx-a100")) == []


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
        ("interleaved:chunks=2", {"pipeline_stages": (4,)}, 8, None),
        ("1f1b", {"pipeline_stages": (7,), "uniform": True}, 7, 1),
    ],
)
def test_limits_hold(schedule: str, limits: dict[str, object], stages: int | None, replicas: int | None) -> None:
    plan = planned(schedule, **limits)
    assert stages in (None, len(plan.stages))
    assert {len(stage.replicas) for stage in plan.stages} == {replicas or len(plan.stages[0].replicas)}


def test_activations_that_are_moved_away_cost_time() -> None:
    graph, fast = planner.load_graph("gpt3-125m"), planner.load_cluster("v100-pcie-4", stack="eager")
    slow = [dataclasses.replace(level, byte_per_s=5e8, device_byte_per_s=5e8) for level in fast.levels]
    cluster = dataclasses.replace(fast, levels=tuple(slow))
    job = dataclasses.replace(JOB, precision="fp16", pipeline_stages=(4,), global_batch=128)
    moved, kept = (best_stages(name, graph, cluster, job) for name in ("bpipe", "1f1b"))
    assert ">" in "".join(order.actions for order in moved.schedule.orders)
    assert moved.predictions.iteration_s == pytest.approx(moved.predictions.simulated_iteration_s, rel=1e-6)
    # where moving is slow, stages are cut so that little is moved: without its price they took 4.5 times as long
    assert moved.predictions.iteration_s < 1.05 * kept.predictions.iteration_s


SHORT = "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3"
GNMT_JOB = planner.Job(global_batch=64, precision="fp32", micro_batches=(8,))


@cache
def gnmt(model: str = "gnmt-8", hardware: str = "v100-pcie-4") -> tuple[Any, Any]:
    return planner.load_graph(model), planner.load_cluster(hardware)


@pytest.mark.parametrize("name", sorted(set(schedules.names()) - {"dualpipe-v"}))
def test_the_best_stages_for_any_schedule(name: str) -> None:
    graph, cluster = gnmt()
    plan = best_stages(name, graph, cluster, GNMT_JOB)
    assert plan.schedule.name.startswith(name)
    if not schedules.get(name).closed_form:
        assert plan.predictions.simulated_iteration_s == pytest.approx(plan.predictions.iteration_s)
    assert planner.plans.validate(plan, planner.rebatch(graph, 8), cluster) == []


def orders(folder: Path, *lanes: str) -> Path:
    path = folder / "mine.csv"
    rows = [f"{worker},{word}" for worker, lane in enumerate(lanes) for word in lane.split()]
    path.write_text("\n".join(["worker,action", *rows]) + "\n")
    return path


def test_orders_of_ones_own_are_planned_with(tmp_path: Path) -> None:
    """1F1B written by hand: as fast as the schedule of that name with the same stages and micro-batches."""
    graph, cluster = gnmt()
    job = planner.Job(global_batch=64, precision="fp32", micro_batches=(8,), recompute="never")
    own = best_stages(orders(tmp_path, *SHORT), graph, cluster, job)
    assert own.schedule.name == "mine"
    assert (len(own.stages), own.copies, own.micro_batches.count) == (2, 2, 8)
    assert [line.actions for line in own.schedule.orders] == [
        "F0.0-1 (B0.0 F0.2)*2 B0.2-3 S0 U0",
        "(F1.0 B1.0)*4 S1 U1",
    ]
    named = best_stages("1f1b", graph, cluster, dataclasses.replace(job, max_stages=2))
    assert named.copies == 1
    # copies of a worker may stand together here
    assert own.predictions.simulated_iteration_s == pytest.approx(named.predictions.simulated_iteration_s, rel=0.01)
    assert own.predictions.simulated_iteration_s <= named.predictions.simulated_iteration_s * (1 + 1e-9)


def test_orders_that_wait_for_each_other_show_the_cycle_and_the_line(tmp_path: Path) -> None:
    path = orders(tmp_path, "F0.0 B0.0 F0.1 B0.1", "F1.1 B1.1 F1.0 B1.0")
    with pytest.raises(
        planner.PlanError, match=r"mine.csv:3: .*worker 0 at B0.0 waits for B1.0; worker 1 at F1.1 waits for F0.1"
    ):
        best_stages(path, *gnmt(), GNMT_JOB)


def test_orders_that_do_not_fit_say_what_and_when(tmp_path: Path) -> None:
    with pytest.raises(planner.InfeasibleError, match=r"mine: stage \d needs .* of 14\.99 GiB at the least \(2 stages"):
        best_stages(orders(tmp_path, *SHORT), *gnmt("gpt3-13b"), GNMT_JOB)
    long = planner.Job(global_batch=4096, precision="fp32", recompute="never", devices=2)
    with pytest.raises(planner.InfeasibleError, match=r"at most \d+ samples; no single block fits with larger ones"):
        best_stages(orders(tmp_path, *SHORT), *gnmt(), long)
    with pytest.raises(planner.InfeasibleError, match=r"no plan fits: .*, with or without .*--schedule zb-h1"):
        best_stages("zb-h1", *gnmt("gpt3-13b"), GNMT_JOB)
    with pytest.raises(planner.JobError, match="2 stages on 2 workers and 4 micro-batches, which do not come out"):
        best_stages(orders(tmp_path, *SHORT), *gnmt(), planner.Job(global_batch=6, precision="fp32"))


def test_own_orders_that_read_old_weights_are_asynchronous(tmp_path: Path) -> None:
    lanes = "F0.0@0 F0.1@0 B0.0@0 U0.0 B0.1@0 U0.1", "F1.0@0 B1.0@0 U1.0 F1.1@1 B1.1@1 U1.1"
    job = planner.Job(global_batch=4, precision="fp32", devices=2)
    plan = best_stages(orders(tmp_path, *lanes), *gnmt(), job)
    assert plan.schedule.weight_policy == "stash"
    assert plan.schedule.versions == (2, 1)
    assert plan.schedule.staleness == (1, 0)

"""One view of a worker: the step of a device by part and its memory by kind, all its stages (chunks) together."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

import planner
from planner import schedules
from planner.errors import ShardplanError
from planner.plans import Plan, explain
from planner.plans.explain import plan_shape
from planner.plans.figures import FreeChoice
from planner.plans.rebuild import alternative_configuration
from planner.plans.sections import alternative_section
from planner.plans.step import plan_step
from planner.report import explanation_document, explanation_report, plan_page, report_to_text
from planner.report.plans import plan_report
from planner.simulate import simulate
from planner.space import Candidate, evaluate
from planner.space.steps import COMMUNICATION, Part, StepView
from planner.units import format_bytes
from tests.plans.sample import decision, make_plan
from tests.plans.sharded_sample import mixture

GRAPH = planner.load_graph("gpt2", dims={"seq": 128})
CLUSTER = planner.load_cluster("dgx-a100")
WORK = (Part.FORWARD, Part.BACKWARD, Part.RECOMPUTE, Part.UPDATE)
OTHER_SHARING = ("chimera", "bapipe-fbp", "dualpipe", "dualpipe-v")
"""Schedules of which the simulation counts what runs at the same time on a worker otherwise."""


def predicted(name: str, **degrees: object) -> planner.Prediction:
    """GPT-2 small on a pipeline of four workers."""
    asked = planner.Degrees(**{"pipeline": 4, "schedule": name, "micro_batch": 2, **degrees})
    return planner.predict(GRAPH, CLUSTER, planner.Job(64), asked)


def test_the_parts_of_a_step_are_worked_out_by_hand() -> None:
    # the sample's stages: 1 ms forward, 2 ms backward, 0.1 ms each way of transfer, 2 ms exposed, 0.5 ms update; one
    # stage of two replicas and two of one, six micro-batches in 0.5 s
    step = plan_step(make_plan(chosen=decision((2, 1, 1))))
    assert [(w.stages, w.devices) for w in step.workers] == [((0,), 2), ((1,), 1), ((2,), 1)]
    first, second, third = (dict(w.seconds) for w in step.workers)
    assert first == pytest.approx(
        {Part.FORWARD: 0.003, Part.BACKWARD: 0.006, Part.UPDATE: 0.0005, Part.SYNC: 0.002, Part.WAITING: 0.4885}
    )  # nothing is received before the first stage
    assert second == third == pytest.approx({
        Part.FORWARD: 0.006, Part.BACKWARD: 0.012, Part.UPDATE: 0.0005, Part.TRANSFER: 0.0012, Part.SYNC: 0.002,
        Part.WAITING: 0.4783,
    })  # fmt: skip
    assert step.bubble == pytest.approx((2 * 0.4885 + 2 * 0.4783) / (4 * 0.5))
    assert step.exposed == pytest.approx((2 * 0.002 + 2 * 0.0032) / (4 * 0.5))


def test_chunks_of_a_worker_add_up_to_a_device() -> None:
    # two workers with two chunks each; weights, gradients and state of both chunks, the larger workspace, one reserve
    plan = make_plan(chosen=decision((1, 1, 1, 1), (0, 1, 2, 4), schedule="interleaved", micro_batches=4))
    step = plan_step(plan)
    assert [w.stages for w in step.workers] == [(0, 2), (1, 3)]
    for worker in step.workers:
        assert worker.memory.weights == 2 * plan.predictions.stages[0].memory.weights_bytes
        assert worker.memory.optimizer == 2 * plan.predictions.stages[0].memory.optimizer_bytes
        assert worker.memory.workspace == plan.predictions.stages[0].memory.workspace_bytes
        assert worker.memory.reserve == plan.predictions.stages[0].memory.reserve_bytes
        assert worker.sum_of(Part.FORWARD) == pytest.approx(2 * 4 * 0.001)
        assert worker.sum_of(Part.SYNC) == pytest.approx(2 * 0.002)
    assert plan.headline is not None
    assert plan.headline.memory_bytes == max(round(w.memory.total) for w in step.workers)


@pytest.mark.parametrize("name", schedules.SCHEDULES.names())
@pytest.mark.parametrize("degrees", [{}, {"zero": 1, "data": 2}, {"tensor": 2}], ids=["plain", "zero-1", "tp"])
def test_parts_and_memory_of_every_schedule(name: str, degrees: dict[str, int]) -> None:
    prediction = predicted(name, **degrees)
    plan, timeline = prediction.plan, simulate(prediction.plan)
    step = plan_step(plan)
    for worker in step.workers:
        assert sum(worker.seconds.values()) == pytest.approx(step.iteration_s, rel=1e-6)
    assert sum(step.seconds.values()) == pytest.approx(plan.predictions.reached_s, rel=1e-6)
    assert step.seconds[Part.WAITING] / step.iteration_s == pytest.approx(plan.predictions.bubble_fraction, abs=1e-6)
    assert step.fullest.memory.total == pytest.approx(prediction.fullest.memory.total, abs=64)
    peaks = {lane.stages: lane.memory.peak_bytes for lane in timeline.lanes}
    assert max(peaks.values()) <= step.fullest.memory.total + 64
    if name in OTHER_SHARING:
        return
    assert step.bubble == pytest.approx(timeline.bubble_fraction, abs=1e-6)
    for lane in timeline.lanes:
        worker = next(w for w in step.workers if w.stages == lane.stages)
        assert worker.sum_of(Part.TRANSFER, Part.SYNC, Part.TIED) == pytest.approx(lane.communication_s, abs=1e-9)
        assert worker.sum_of(*WORK, Part.GROUP, Part.GROUP_SUM) == pytest.approx(lane.compute_s, rel=1e-6)


@pytest.mark.parametrize("name", ["interleaved:chunks=3", "chimera", "zb-v", "v-half", "v-min", "dualpipe-v", "hanayo"])
def test_outputs_tell_devices_not_chunks(name: str) -> None:
    prediction = predicted(name)
    plan, step = prediction.plan, plan_step(prediction.plan)
    found = explain(plan)
    document = json.loads(json.dumps(explanation_document(found), default=lambda v: dataclasses.asdict(v)))
    waits = sum(each["fraction"] for each in document["shares"] if each["name"].startswith("waiting"))
    assert waits == pytest.approx(document["bubble_fraction"]) == pytest.approx(step.bubble)
    assert sum(each["seconds"] for each in document["shares"]) == pytest.approx(plan.predictions.reached_s)
    assert max(each["memory_bytes"] for each in document["workers"]) == pytest.approx(prediction.fullest.memory.total)
    bubble = f"bubble {step.bubble:.1%}"
    texts = report_to_text(explanation_report(found), table_width=250), report_to_text(plan_report(plan))
    assert all(bubble in text.lower() for text in texts)
    largest = format_bytes(prediction.fullest.memory.total)
    assert all(largest in text for text in texts)
    assert plan_page(plan).count("waiting for other stages") >= len({w.stages for w in step.workers})


def test_every_row_has_the_memory_that_predict_says() -> None:
    job = planner.Job(64, pipeline_stages=(4,), tensor_parallel=(1,), schedules=("interleaved",), backends=("any",))
    plan = planner.plan(GRAPH, CLUSTER, job)
    rows = [other for other in plan.alternatives if not other.infeasible]
    assert any(len(other.starts) > 4 for other in rows)
    for other in rows:
        configuration = alternative_configuration(other, len(plan.block_names))
        found = planner.predict(GRAPH, CLUSTER, dataclasses.replace(plan.options, backends=()), configuration)
        assert other.memory_bytes == pytest.approx(found.fullest.memory.total, rel=1e-6), other.label


@pytest.mark.parametrize("name", schedules.SCHEDULES.names())
@pytest.mark.parametrize("degrees", [{"recompute": True}, {"data": 2, "zero": 2}], ids=["recompute", "zero-2"])
def test_an_alternative_has_the_memory_of_a_device(name: str, degrees: dict[str, int]) -> None:
    prediction = predicted(name, **degrees)
    pricer = planner.Pricer(GRAPH, CLUSTER, prediction.plan.options)
    judged = evaluate(pricer.costs(2), CLUSTER, prediction.plan.options, prediction.configuration)
    row = alternative_section(Candidate("runner-up", prediction.configuration, judged))
    assert row.memory_bytes == pytest.approx(prediction.fullest.memory.total, rel=1e-6)
    assert row.memory_bytes == pytest.approx(plan_step(prediction.plan).fullest.memory.total, rel=1e-6)


def one_stage(**degrees: object) -> tuple[Plan, StepView, str]:
    """GPT-2 small on four nodes with slow links between them, without a pipeline."""
    cluster = planner.load_cluster("dgx-a100", nodes=4)
    levels = (cluster.levels[0], dataclasses.replace(cluster.levels[1], byte_per_s=2e9, device_byte_per_s=2e9, fits=()))
    slow = dataclasses.replace(cluster, levels=levels)
    prediction = planner.predict(GRAPH, slow, planner.Job(256), planner.Degrees(micro_batch=4, **degrees))
    text = report_to_text(planner.report.prediction_report(prediction))
    return prediction.plan, plan_step(prediction.plan), text


@pytest.mark.parametrize("degrees", [{"zero": 3}, {"zero": 3, "shard_over": 8}, {"zero": 2}, {"zero": 1}, {"zero": 0}])
def test_a_job_without_a_pipeline_exposes_communication_and_has_no_bubble(degrees: dict[str, int]) -> None:
    plan, step, text = one_stage(**degrees)
    assert "bubble" not in text.lower()
    assert f"exposed communication {step.exposed:.1%}" in text
    assert plan.predictions.bubble_fraction == step.bubble == 0.0
    # all that is not exposed is work: that of a device that has no other to talk to
    alone = planner.predict(GRAPH, CLUSTER, planner.Job(8), planner.Degrees(data=1, micro_batch=4)).plan.predictions
    count, own = plan.micro_batches.count // 32, alone.stages[0]
    work_s = count * (own.forward_s + own.backward_s)
    assert step.exposed > 0.2
    assert step.exposed * step.iteration_s == pytest.approx(
        step.iteration_s - work_s - step.seconds[Part.UPDATE], rel=1e-6
    )
    in_passes = step.seconds.get(Part.PASS_EXCHANGE, 0.0)
    assert (in_passes > 0) == (degrees["zero"] >= 2 and in_passes != 0.0)
    assert sum(step.seconds.get(part, 0.0) for part in COMMUNICATION) == pytest.approx(step.exposed * step.iteration_s)


def test_gathers_and_reductions_are_exposed_alike() -> None:
    sharded, reduced = one_stage(zero=3)[1], one_stage(zero=1)[1]
    assert sharded.seconds[Part.PASS_EXCHANGE] > 0
    assert Part.PASS_EXCHANGE not in reduced.seconds
    assert reduced.seconds[Part.SYNC] > 0
    for view in (sharded, reduced):
        assert view.seconds[Part.FORWARD] == pytest.approx(sharded.seconds[Part.FORWARD], rel=1e-6)


def test_a_single_device_exposes_nothing() -> None:
    prediction = planner.predict(GRAPH, CLUSTER, planner.Job(8, devices=1), planner.Degrees(data=1, micro_batch=8))
    text = report_to_text(planner.report.prediction_report(prediction))
    assert "bubble" not in text.lower()
    assert "exposed communication" not in text


def test_copies_to_the_host_have_a_part_of_their_own() -> None:
    graph = planner.load_graph("gpt3-125m", dims={"seq": 256})
    degrees = planner.Degrees(pipeline=2, offload=("core_attn", "mlp"))
    plan = planner.predict(graph, CLUSTER, planner.Job(8), degrees).plan
    step = plan_step(plan)
    kept = plan_step(planner.predict(graph, CLUSTER, planner.Job(8), planner.Degrees(pipeline=2)).plan)
    assert step.seconds[Part.HOST] > 0
    for part in (Part.FORWARD, Part.BACKWARD):
        assert step.seconds[part] == pytest.approx(kept.seconds[part], rel=1e-6)


def test_a_plan_of_before_is_read_by_its_own_convention() -> None:
    plan = predicted("1f1b", tensor=2).plan
    stages = tuple(dataclasses.replace(t, exposed=type(t.exposed)()) for t in plan.predictions.stages)
    older = dataclasses.replace(plan, minor=0, predictions=dataclasses.replace(plan.predictions, stages=stages))
    assert plan_step(older).seconds[Part.GROUP] == pytest.approx(plan_step(plan).seconds[Part.GROUP], rel=1e-6)
    assert plan_step(older).bubble == pytest.approx(plan_step(plan).bubble)


def test_systems_are_compared_by_the_same_view() -> None:
    setting = planner.Pricer(GRAPH, CLUSTER, planner.Job(64))
    systems = ("gpipe", "chimera", "data-parallel", "gshard")
    found = planner.compare_systems(setting, CLUSTER, planner.Job(64), systems=systems)
    plans, _ = planner.systems.plans_of(found)
    rows = {row.system: row for row in found.rows if row.system in plans}
    assert rows["data-parallel"].bubble == 0.0
    assert rows["data-parallel"].exposed > 0.0
    for name, row in rows.items():
        step = plan_step(plans[name])
        assert row.bubble == pytest.approx(step.bubble, abs=1e-6), name
        assert row.exposed == pytest.approx(step.exposed, abs=1e-6), name
        assert row.memory is not None
        assert row.memory.total == pytest.approx(step.fullest.memory.total, rel=1e-6), name


def test_unknown_schedules_are_refused_with_a_remedy() -> None:
    plan = make_plan()
    unknown = dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, name="nothing-of-the-kind"))
    with pytest.raises(ShardplanError, match="nothing-of-the-kind"):
        plan_step(unknown)


def test_tensor_parallel_ranks_with_different_experts_are_expert_parallel_ranks() -> None:
    plan = mixture().plan  # Mixtral's 8 experts
    dealt = {
        name for s in plan.shardings for b in s.blocks for h in b.holdings if h.what == "experts" for name in h.axes
    }
    ranks = math.prod(axis.size for axis in plan.shardings[0].axes if axis.name in dealt)
    assert dealt
    assert plan.configuration.stages[0].expert == 1
    assert plan_shape(plan).startswith(f"DP 1 x TP 16 x PP 1, EP {ranks}, micro-batch")
    assert f"DP 1 x TP 16 x PP 1, EP {ranks};" in report_to_text(plan_report(plan))


def test_communication_inside_a_group_is_that_of_its_blocks() -> None:
    plan = mixture().plan
    step, count = plan_step(plan), plan.micro_batches.count
    inside_s = sum(entry.figures.communication_s for _, entry, _ in plan.sharded_blocks(0))
    assert step.seconds[Part.GROUP] == pytest.approx(count * inside_s)
    sums_s = sum(c.seconds for _, entry, _ in plan.sharded_blocks(0) for c in entry.collectives if c.phase == "step")
    assert step.seconds.get(Part.GROUP_SUM, 0.0) == pytest.approx(sums_s, rel=1e-6)


def test_what_the_free_choice_has_is_said_with_its_modules() -> None:
    needs = ("activations in the host's memory (core_attn, mlp)", "recomputation in some stages (2 of 8), or of others")
    free = FreeChoice("1 stage", 0.4, 0.3, needs)
    plan = dataclasses.replace(make_plan(), free_choice=free, runs_on=("megatron",))
    text = report_to_text(plan_report(plan), table_width=300)
    said = " ".join(text.split())
    assert "25.00% faster: activations in the host's memory (core_attn, mlp), recomputation in some stages" in said
    assert "(2 of 8)" not in said

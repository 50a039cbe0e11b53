"""One configuration priced by its degrees: against sums, the search, and the plan that comes out."""

from __future__ import annotations

import dataclasses
import math

import pytest

import planner
from planner import Configuration, Degrees, Job
from planner.errors import JobError, UsageError
from planner.plans import seal
from planner.space import StageChoice


@pytest.fixture(scope="module")
def small() -> tuple[planner.Graph, planner.Cluster]:
    return planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-a100")


def test_the_plan_of_a_prediction_is_whole_and_plays_as_predicted(small: tuple[planner.Graph, planner.Cluster]) -> None:
    graph, cluster = small
    found = planner.predict(graph, cluster, Job(64), Degrees(pipeline=4, chunks=3, zero=1))
    assert found.fits
    assert (len(found.configuration.stages), found.configuration.copies) == (12, 2)
    assert planner.plans.validate(found.plan, graph, cluster) == []
    said = found.plan.predictions
    assert said.simulated_iteration_s is not None
    assert planner.simulate_plan(found.plan).step_s == pytest.approx(said.simulated_iteration_s, rel=1e-6)
    assert said.bound_s <= said.simulated_iteration_s


def test_ranks_that_share_operators_hold_chunks_of_an_interleaved_pipeline() -> None:
    graph, cluster = planner.load_graph("gpt3-125m", dims={"seq": 128}), planner.load_cluster("dgx-a100")
    found = planner.predict(graph, cluster, Job(16), Degrees(tensor=2, pipeline=2, chunks=2, zero=1))
    assert [stage.group_ranks for stage in found.plan.stages] == [2, 2, 2, 2]
    assert found.plan.copies == 2
    assert [worker.stages for worker in found.workers] == [(0, 2), (1, 3)]
    assert planner.plans.validate(found.plan, graph, cluster) == []


def test_more_chunks_than_a_search_tries_can_be_named() -> None:
    graph, cluster = planner.load_graph("llama3-70b", dims={"seq": 128}), planner.load_cluster("dgx-h100", nodes=2)
    found = planner.predict(graph, cluster, Job(8), Degrees(tensor=8, pipeline=2, chunks=40))
    assert (found.configuration.schedule, len(found.configuration.stages)) == ("interleaved:chunks=40", 80)


def test_no_configuration_beats_the_bound_of_the_search(small: tuple[planner.Graph, planner.Cluster]) -> None:
    graph, cluster = small
    best = planner.plan(graph, cluster, Job(64, pipeline_stages=(2,), data_parallel=(4,), tensor_parallel=(1,)))
    found = planner.predict(graph, cluster, Job(64), Degrees(pipeline=2, data=4))
    assert found.plan.predictions.simulated_iteration_s is not None
    assert found.plan.predictions.simulated_iteration_s >= best.predictions.bound_s


def test_what_does_not_fit_is_priced_and_what_is_missing_said() -> None:
    graph, cluster = planner.load_graph("gpt2-xl"), planner.load_cluster("p3.16xlarge")
    found = planner.predict(graph, cluster, Job(8), Degrees(data=8))
    assert not found.fits
    assert math.isfinite(found.plan.predictions.iteration_s)
    missing = found.fullest.memory.total - found.fullest.capacity_bytes
    # 1.5576 G parameters with Adam in mixed precision take 16 bytes each: 24.9 GB of 16 GiB without any activation.
    assert missing > 16 * 1.5576e9 - 16 * 2**30
    assert "GiB" in found.problems[0]


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (Degrees(tensor=8, pipeline=2), "takes 16 devices of 8"),
        (Degrees(pipeline=2, data=8), "takes 16 devices of 8"),
        (Degrees(pipeline=8, micro_batch=48), "does not divide a global batch of 64"),
        (Degrees(pipeline=8, chunks=7), "56 stages"),
        (Degrees(pipeline=3, chunks=2, data=1), "do not make groups of 3"),
        (Degrees(pipeline=2, starts=(3, 5)), "3 stages are given"),
        (Degrees(pipeline=2, starts=("lm_hed",)), "no block of the name 'lm_hed'"),
        (Degrees(replicas=0), "a degree is below 1"),
        (Degrees(data=-1), "a degree is below 1"),
    ],
)
def test_degrees_that_do_not_come_out_are_named(
    small: tuple[planner.Graph, planner.Cluster], degrees: Degrees, words: str
) -> None:
    with pytest.raises(JobError) as error:
        planner.predict(*small, Job(64), degrees)
    assert words in str(error.value)


def test_an_unknown_schedule_is_named(small: tuple[planner.Graph, planner.Cluster]) -> None:
    with pytest.raises(UsageError, match="zb-h1"):
        planner.predict(*small, Job(64), Degrees(pipeline=2, schedule="zb-h"))


def one(**changes: object) -> Configuration:
    stages = (StageChoice(0, 14, 2), StageChoice(14, 27, 2))
    return dataclasses.replace(Configuration(stages, 2, 1, 32, "1f1b"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("configuration", "words"),
    [
        (one(copies=9), "9 devices side by side, but there are 8"),
        (one(devices=(0, 1, 2)), "3 devices are given for 8 ranks of all workers"),
        (one(devices=(0, 1, 2, 3, 4, 5, 6, 6)), "8 devices are given for 8 ranks"),
        (one(micro_batches=31), "not a global batch of 64"),
        (one(stages=(StageChoice(0, 26, 1),)), "stages end at block 26 of 27"),
        (one(stages=(StageChoice(0, 14, 1, ranks=2), StageChoice(14, 27, 1))), "stages of 1, 2 ranks"),
        (one(stages=(StageChoice(0, 27, 1, ranks=2, sharding=1),)), "names a sharding"),
        (one(stages=()), "stages of no ranks"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(
    small: tuple[planner.Graph, planner.Cluster], configuration: Configuration, words: str
) -> None:
    with pytest.raises(JobError) as error:
        planner.predict(*small, Job(64), configuration)
    assert words in str(error.value)


def test_a_configuration_in_full_is_priced_as_its_degrees_are(small: tuple[planner.Graph, planner.Cluster]) -> None:
    degrees = planner.predict(*small, Job(64), Degrees(2, 2, replicas=2, zero=1, starts=("lm_head",)))
    assert [len(stage.replicas) for stage in degrees.plan.stages] == [2, 2]
    assert degrees.configuration.stages[1].start == 26
    whole = tuple(dataclasses.replace(stage, sharding=0) for stage in degrees.configuration.stages)
    full = planner.predict(*small, Job(64), dataclasses.replace(degrees.configuration, stages=whole))
    assert full.plan == dataclasses.replace(degrees.plan, provenance=full.plan.provenance)


def test_degrees_take_no_words_for_numbers() -> None:
    for field, value in (("recompute", "never"), ("tensor", "8"), ("tensor", True), ("starts", [3])):
        with pytest.raises(planner.JobError, match=f"{field} is "):
            Degrees(**{field: value})  # type: ignore[arg-type]


def test_a_plan_is_predicted_as_it_was_planned_with_its_own_shardings(
    small: tuple[planner.Graph, planner.Cluster],
) -> None:
    graph, cluster = small
    plan = planner.plan(graph, cluster, Job(64, tensor_parallel=(2,), pipeline_stages=(2,), backends=("any",)))
    found = planner.predict(graph, cluster, plan.options, plan)
    assert found.iteration_s == pytest.approx(plan.predictions.reached_s, rel=1e-8)
    assert found.configuration == plan.configuration
    assert found.plan.shardings == plan.shardings
    best, lacks_s, ratio = planner.compare_to_best(found, graph, cluster, Job(64))
    assert best.predictions.reached_s + lacks_s == pytest.approx(found.iteration_s)
    assert ratio >= best.predictions.bound_s / best.predictions.reached_s


def test_ranks_may_be_asked_to_hold_the_fewest_weights() -> None:
    graph, cluster = planner.load_graph("gpt3-125m", dims={"seq": 128}), planner.load_cluster("dgx-a100")
    fast, lean = (
        planner.predict(graph, cluster, Job(16), Degrees(tensor=8), fewest_weights=fewest) for fewest in (False, True)
    )
    assert lean.fullest.memory.weights <= fast.fullest.memory.weights
    # all matrices are cut: an eighth of the parameters of 2 bytes each, and whole norms and biases
    assert lean.fullest.memory.weights == pytest.approx(2 * graph.parameter_count() / 8, rel=0.02)


def test_the_check_of_a_prediction_leaves_nothing_unchecked(small: tuple[planner.Graph, planner.Cluster]) -> None:
    graph, cluster = small
    plan = planner.predict(graph, cluster, Job(64), Degrees(pipeline=2, schedule="zb-h1")).plan
    assert planner.check_plan(plan, graph, cluster) == planner.check.CheckReport(())
    predictions = dataclasses.replace(plan.predictions, bound_s=0.5 * plan.predictions.bound_s, gap=0.5)
    changed = seal(dataclasses.replace(plan, predictions=predictions))
    assert any("bound_s" in finding.message for finding in planner.check_plan(changed, graph, cluster).findings)


def test_gradients_travel_by_the_scheme_that_is_named() -> None:
    """n = 2 machines of one port, 2 (n-1)/n = 1 of the gradients out of each; what `check` finds anew is the same."""
    graph, cluster = planner.load_graph("bert-large", dims={"seq": 128}), planner.load_cluster("ethernet-25g", nodes=2)
    prediction = planner.predict(graph, cluster, Job(16), Degrees(exchange="byteps"))
    exchange = prediction.plan.exchange
    assert exchange is not None
    assert exchange.scheme == "byteps"
    gradient_bytes = sum(tensor.bytes for tensor in exchange.tensors)
    assert exchange.links[-1].out_bytes == pytest.approx(gradient_bytes, rel=1e-6)
    assert planner.check_plan(prediction.plan, graph, cluster) == planner.check.CheckReport(())
    with pytest.raises(UsageError, match="byteps"):
        planner.predict(graph, cluster, Job(16), Degrees(exchange="bytep"))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_many_take_what_fits_of_the_shardings_with_the_fewest_weights(schedule: str) -> None:
    """LLaMA-3.1 405B on 8,192 H100: the fastest way keeps more than a device has, a slower one less."""
    graph, cluster = planner.load_graph("llama3.1-405b"), planner.load_cluster("dgx-h100", nodes=1024)
    chunks = 8 if schedule == "interleaved" else 1
    degrees = Degrees(tensor=8, pipeline=16, chunks=chunks, schedule=schedule, zero=1)
    alone = planner.predict(graph, cluster, Job(2048), degrees, fewest_weights=True)
    many = planner.predict_many(graph, cluster, Job(2048), [degrees], fewest_weights=True)
    assert not alone.fits
    assert many.peak_bytes[0] < alone.fullest.memory.total
    assert many.iteration_s[0] > alone.iteration_s

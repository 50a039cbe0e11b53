"""One configuration priced by its degrees: against sums, the search, and the plan that comes out."""

from __future__ import annotations

import math

import pytest

import planner
from planner import Degrees, Job
from planner.errors import JobError, UsageError


@pytest.fixture(scope="module")
def small() -> tuple[planner.Graph, planner.Cluster]:
    return planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-a100")


def test_the_plan_of_a_prediction_is_whole_and_plays_as_predicted(small: tuple[planner.Graph, planner.Cluster]) -> None:
    graph, cluster = small
    found = planner.predict(graph, cluster, Job(64), Degrees(pipeline=4, chunks=3, zero=1))
    assert found.fits
    assert (len(found.configuration.stages), found.configuration.copies) == (12, 2)
    assert planner.validate_plan(found.plan, graph, cluster) == []
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
    assert planner.validate_plan(found.plan, graph, cluster) == []


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

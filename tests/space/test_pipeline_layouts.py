"""Pipelines cut as Megatron writes it: what each stage of a layout holds, and what cannot be."""

from __future__ import annotations

import itertools

import pytest

import planner
from planner import Degrees, Job
from planner.errors import JobError


def stages(
    graph: planner.Graph, degrees: Degrees, *, batch: int = 64, cluster: str = "dgx-a100"
) -> list[tuple[int, int]]:
    """First and last block (exclusive) of each stage."""
    found = planner.predict(graph, planner.load_cluster(cluster), Job(batch), degrees)
    return [(stage.start, stage.stop) for stage in found.configuration.stages]


@pytest.fixture(scope="module")
def gpt() -> planner.Graph:
    """GPT-2: words, positions, two blocks for each of 12 layers, and the head."""
    return planner.load_graph("gpt2", dims={"seq": 128})


@pytest.mark.parametrize(
    ("layout", "pipeline", "edges"),
    [
        ("Et*6|t*6L", 2, [0, 14, 27]),
        ("E|tttt|tttt|ttttL", 2, [0, 2, 10, 18, 27]),
        ("Et*5|(t*3|)*2tL", 4, [0, 12, 18, 24, 27]),
        ("Et*11 | t, | L", 3, None),
        ("Et*11|t|L", 3, [0, 24, 26, 27]),
    ],
)
def test_a_layout_names_the_blocks_of_each_stage(
    gpt: planner.Graph, layout: str, pipeline: int, edges: list[int] | None
) -> None:
    found = stages(gpt, Degrees(pipeline=pipeline, layout=layout, data=1))
    wanted = edges or [0, 24, 26, 27]
    assert found == list(itertools.pairwise(wanted))


def test_chunks_of_a_layout_go_round_the_workers(gpt: planner.Graph) -> None:
    degrees = Degrees(pipeline=2, layout="Ettt|ttt|ttt|tttL")
    found = planner.predict(gpt, planner.load_cluster("dgx-a100"), Job(64), degrees)
    assert found.configuration.schedule == "interleaved"
    assert [worker.stages for worker in found.workers] == [(0, 2), (1, 3)]


def test_first_and_last_workers_have_other_numbers_of_layers(gpt: planner.Graph) -> None:
    assert stages(gpt, Degrees(pipeline=4, first_layers=2, last_layers=2)) == [(0, 6), (6, 14), (14, 22), (22, 27)]
    chunked = stages(gpt, Degrees(pipeline=2, chunks=2, first_layers=4, last_layers=8))
    assert chunked == [(0, 6), (6, 14), (14, 18), (18, 27)]


def test_the_predictor_of_a_further_token_goes_with_the_loss() -> None:
    graph = planner.load_graph("deepseek-v3-mtp")
    degrees = Degrees(pipeline=2, layout="Et*4|(t*4|)*14tmL", data=1)
    found = planner.predict(graph, planner.load_cluster("dgx-h100"), Job(4), degrees)
    names = found.plan.stages[-1].modules
    assert len(found.configuration.stages) == 16
    assert {"model.layers.60", "mtp.layers.0", "lm_head"} <= {name.partition("[")[0] for name in names}
    with pytest.raises(JobError, match="0 predictors of further tokens"):
        stages(graph, Degrees(pipeline=2, layout="Et*30|t*31L", data=1), batch=4)
    with pytest.raises(JobError, match="ends with m"):
        stages(graph, Degrees(pipeline=2, layout="Et*61m|L", data=1), batch=4)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (Degrees(pipeline=2, layout="Et*6|t*5L"), "11 layers .t., the model 12"),
        (Degrees(pipeline=2, layout="t*6|t*6L"), "0 embeddings"),
        (Degrees(pipeline=2, layout="Et*6|t*6mL"), "1 predictors of further tokens .m., the model 0"),
        (Degrees(pipeline=2, layout="Et*6||t*6L"), "a stage is empty"),
        (Degrees(pipeline=2, layout="Et*6|x*6L"), "cannot be read"),
        (Degrees(pipeline=2, layout="E(t*9999)*9999L"), "cannot be read"),
        (Degrees(pipeline=2, layout="tE|L"), "cannot be read"),
        (Degrees(pipeline=4, layout="Et*6|t*6L"), "2 stages for 4 workers"),
        (Degrees(pipeline=2, chunks=2, layout="Et*6|t*6L"), "of 2 chunks"),
        (Degrees(pipeline=2, starts=(3,), layout="Et*6|t*6L"), "by starts and by layout"),
        (Degrees(pipeline=4, first_layers=2), "do not come out"),
        (Degrees(pipeline=2, first_layers=12), "do not come out"),
        (Degrees(pipeline=2, chunks=2, first_layers=5, last_layers=7), "do not come out"),
    ],
)
def test_what_the_layers_cannot_fill_is_refused_by_name(gpt: planner.Graph, degrees: Degrees, words: str) -> None:
    with pytest.raises(JobError, match=words) as refused:
        stages(gpt, degrees)
    assert refused.value.problem.hint


def test_the_search_lets_the_logits_stand_alone_where_they_weigh_as_much_as_layers() -> None:
    """A head of 128,256 words weighs as much as four layers of 2048: equal layers make the last worker the slowest."""
    graph, cluster = planner.load_graph("llama3.2-1b", dims={"seq": 512}), planner.load_cluster("dgx-h100")
    job = Job(
        16, schedules=("interleaved",), pipeline_stages=(4, 8), data_parallel=(2,), tensor_parallel=(1,),
        zero=(1,), micro_batches=(1,), recompute="never",
    )  # fmt: skip
    searched = planner.plan(graph, cluster, job)
    equal = planner.predict(graph, cluster, Job(16), Degrees(pipeline=4, chunks=2, data=2, zero=1))
    assert searched.stages[-1].modules == ("lm_head",)
    assert searched.predictions.reached_s < 0.9 * equal.iteration_s

"""Many predictions at once come out as each by itself."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import planner
from planner import Configuration, Degrees, Job, JobError
from planner.space import StageChoice


@pytest.fixture(scope="module")
def small() -> tuple[planner.Graph, planner.Cluster]:
    return planner.load_graph("gpt2", dims={"seq": 128}), planner.load_cluster("dgx-a100", nodes=2)


def test_each_is_what_predict_says(small: tuple[planner.Graph, planner.Cluster]) -> None:
    graph, cluster = small
    asked: list[Degrees | Configuration] = [
        Degrees(tensor, pipeline, micro_batch=4, zero=zero, recompute=bool(zero))
        for tensor, pipeline, zero in itertools.product((1, 2), (2, 4), (0, 1, 3))
    ]
    asked += [Degrees(pipeline=4, chunks=3, micro_batch=2), Degrees(pipeline=4, schedule="zb-h1"), Degrees(2, 2, 2, 3)]
    asked.append(Configuration((StageChoice(0, 9, 2), StageChoice(9, 27, 6)), 2, 1, 48, "1f1b", zero=1))
    found = planner.predict_many(graph, cluster, Job(96), asked)
    assert found.reasons == ("",) * len(asked)
    for at, configuration in enumerate(asked):
        right = planner.predict(graph, cluster, Job(96), configuration)
        # a plan file has nine digits
        assert found.iteration_s[at] == pytest.approx(right.plan.predictions.iteration_s, rel=1e-8)
        assert found.peak_bytes[at] == pytest.approx(right.fullest.memory.total, rel=1e-12)
        assert found.capacity_bytes[at] == right.fullest.capacity_bytes
        assert found.fits[at] == right.fits


def test_what_does_not_come_out_is_told_beside_the_others(small: tuple[planner.Graph, planner.Cluster]) -> None:
    asked = [Degrees(pipeline=2), Degrees(pipeline=7, data=9), Degrees(schedule="zb-h"), Degrees(pipeline=3, chunks=2)]
    found = planner.predict_many(*small, Job(64), asked)
    assert np.isfinite(found.iteration_s).tolist() == [True, False, False, False]
    assert "takes 63 devices of 16" in found.reasons[1]
    assert "zb-h" in found.reasons[2]
    assert found.reasons[3]


def test_what_does_not_fit_is_priced() -> None:
    graph, cluster = planner.load_graph("gpt2-xl"), planner.load_cluster("p3.16xlarge")
    found = planner.predict_many(graph, cluster, Job(8), [Degrees(data=8)])
    assert not found.fits[0]
    # 1.5576 G parameters with Adam in mixed precision take 16 bytes each
    assert found.peak_bytes[0] > 16 * 1.5576e9 > found.capacity_bytes[0]


def test_nothing_asked_is_nothing_answered(small: tuple[planner.Graph, planner.Cluster]) -> None:
    assert planner.predict_many(*small, Job(64), []).iteration_s.shape == (0,)


def test_formats_and_overlap_of_a_configuration_are_priced(small: tuple[planner.Graph, planner.Cluster]) -> None:
    graph, cluster = small
    plain = planner.predict(graph, cluster, Job(64, precision="fp16"), Degrees(data=4)).configuration
    bare = dataclasses.replace(plain, stages=tuple(dataclasses.replace(s, sharding=0) for s in plain.stages))
    asked = [bare, dataclasses.replace(bare, precision="fp32"), dataclasses.replace(bare, overlap=0.5)]
    jobs = [Job(64, precision="fp16"), Job(64, precision="fp32"), Job(64, precision="fp16", overlap=0.5)]
    expected = [planner.predict(graph, cluster, job, bare).iteration_s for job in jobs]
    assert len(set(expected)) == 3
    found = [planner.predict(graph, cluster, jobs[0], configuration).iteration_s for configuration in asked]
    assert found == expected
    assert planner.predict_many(graph, cluster, jobs[0], asked).iteration_s == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offload": ("layer_input",)}, "keeps more than layer_input"),
    ],
)
def test_choices_that_contradict_each_other_are_named(
    small: tuple[planner.Graph, planner.Cluster], change: dict[str, Any], said: str
) -> None:
    plain = planner.predict(*small, Job(64), Degrees(data=4)).configuration
    stages = (dataclasses.replace(plain.stages[0], sharding=0, **change),)
    configuration = dataclasses.replace(plain, stages=stages)
    with pytest.raises(JobError, match=said):
        planner.predict(*small, Job(64), configuration)
    assert said in planner.predict_many(*small, Job(64), [configuration]).reasons[0]

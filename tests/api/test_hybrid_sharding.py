"""State that is sharded over a part of a stage's replicas (HSDP): prices, memory, plans and frameworks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import planner
from planner import Degrees, Job
from planner.errors import JobError, PlanError
from planner.exchange import Group, Neighbours, Phase, groups_of, parts_of, recipe_of, sent_bytes
from planner.exchange.recipe import PayloadBytes
from planner.hardware import Collective
from planner.runtime.requirements import require_executable

JOB = Job(64, precision="bf16", optimizer="adam", dropout=False)


@pytest.fixture(scope="module")
def small() -> tuple[planner.Graph, planner.Cluster]:
    return planner.load_graph("gpt3-125m", dims={"seq": 256}), planner.load_cluster("dgx-a100", nodes=2)


def hybrid(small: tuple[planner.Graph, planner.Cluster], **changes: int) -> planner.Prediction:
    return planner.predict(*small, JOB, Degrees(**{"data": 16, "zero": 3, **changes}))


def test_neighbours_hold_a_whole_and_equal_shards_are_summed_across_them() -> None:
    ranks = np.arange(8) * 2
    assert groups_of(ranks, ranks, Neighbours(4)).tolist() == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert groups_of(ranks, ranks, Neighbours(4, across=True)).tolist() == [[0, 8], [2, 10], [4, 12], [6, 14]]
    recipe = recipe_of(3, 4)
    assert recipe.held == (Neighbours(4),) * 3
    steps = [(step.collective, step.phase, step.group) for step in recipe.steps]
    assert steps == [
        (Collective.ALL_GATHER, Phase.FORWARD, Neighbours(4)),
        (Collective.ALL_GATHER, Phase.BACKWARD, Neighbours(4)),
        (Collective.REDUCE_SCATTER, Phase.BACKWARD, Neighbours(4)),
        (Collective.ALL_REDUCE, Phase.END, Neighbours(4, across=True)),
    ]
    assert recipe_of(0, 4) == recipe_of(0)


def test_bytes_of_a_rank_by_hand() -> None:
    # 8 ranks in groups of 4: two gathers and a scatter move 3/4 of 100; 1/4 is summed over 2 ranks, 2 * 1/2 of it.
    counts = {Neighbours(4): 4, Neighbours(4, across=True): 2, Group.REPLICAS: 8}
    sent = sent_bytes(recipe_of(3, 4), PayloadBytes(1.0, 1.0), counts.__getitem__, 100.0)
    assert sent == pytest.approx(3 * 75 + 25)


def test_memory_is_that_of_the_group_and_a_machine_keeps_its_gathers_inside(
    small: tuple[planner.Graph, planner.Cluster],
) -> None:
    full, half, quarter = hybrid(small), hybrid(small, shard_over=8), hybrid(small, shard_over=4)
    weights = [found.plan.predictions.stages[0].memory.optimizer_bytes for found in (full, half, quarter)]
    assert weights[1] == pytest.approx(2 * weights[0], rel=1e-6)
    assert weights[2] == pytest.approx(4 * weights[0], rel=1e-6)
    # Inside a machine of 8 NVLinks carry the gathers, which cross the network where 16 ranks shard.
    assert half.iteration_s < full.iteration_s
    assert hybrid(small, shard_over=16).plan.configuration == full.plan.configuration


def test_judge_and_many_agree_and_the_plan_is_checked(small: tuple[planner.Graph, planner.Cluster]) -> None:
    found = hybrid(small, shard_over=8)
    many = planner.predict_many(*small, JOB, [Degrees(data=16, zero=3, shard_over=over) for over in (0, 8)])
    assert many.iteration_s[1] == pytest.approx(found.iteration_s, rel=1e-9)
    assert many.iteration_s[0] == pytest.approx(hybrid(small).iteration_s, rel=1e-9)
    plan = planner.plans.loads(planner.plans.dumps(found.plan))
    assert plan == found.plan
    assert (plan.configuration.shard_over, plan.stages[0].shard_over) == (8, 8)
    assert planner.plans.validate(plan, *small) == []
    kinds = [(c.kind, c.ranks, c.groups) for c in plan.predictions.stages[0].collectives]
    assert kinds == [("all_gather", 8, 2), ("all_gather", 8, 2), ("reduce_scatter", 8, 2), ("all_reduce", 2, 8)]


@pytest.mark.parametrize(("over", "zero"), [(5, 3), (1, 3), (8, 0)])
def test_groups_that_make_no_sense_are_refused(
    small: tuple[planner.Graph, planner.Cluster], over: int, zero: int
) -> None:
    with pytest.raises(JobError, match=f"sharded over {over} of"):
        hybrid(small, shard_over=over, zero=zero)


def test_frameworks_have_their_own_word_for_it_and_the_runtime_refuses(
    small: tuple[planner.Graph, planner.Cluster],
) -> None:
    llama = planner.load_graph("llama3-8b", dims={"seq": 256})
    jobs = {1: JOB, 3: dataclasses.replace(JOB, precision="bf16-fp32grad")}  # as torchtitan trains
    plans = [
        planner.predict(llama, small[1], job, Degrees(data=16, zero=zero, shard_over=8)).plan
        for zero, job in jobs.items()
    ]
    megatron = planner.export.export(plans[0], "megatron")
    torchtitan = planner.export.export(plans[1], "torchtitan")
    said = "\n".join(map(str, megatron.files.values()))
    assert "--num-distributed-optimizer-instances 2" in said
    config = "\n".join(map(str, torchtitan.files.values()))
    assert "data_parallel_replicate_degree = 2" in config
    assert "data_parallel_shard_degree = 8" in config
    read = planner.export.read_job(str(torchtitan.files["config.toml"]), "torchtitan", "config.toml").degrees
    assert (read.zero, read.shard_over) == (3, 8)
    for name in ("deepspeed", "jax", "torch", "transformers"):
        with pytest.raises(PlanError):
            planner.export.export(plans[1], name)
    with pytest.raises(PlanError, match="sharded_groups"):
        require_executable(plans[1])


def test_parts_of_groups(small: tuple[planner.Graph, planner.Cluster]) -> None:
    assert [parts_of(small[1], range(16), Neighbours(4, across=across)) for across in (False, True)] == [4, 4]

"""Many configurations at once come out as the judge has each of them."""

from __future__ import annotations

import itertools
import random
from functools import cache

import numpy as np
import pytest

import planner
from planner.hardware import Cluster
from planner.prediction import without_limits
from planner.space import BlockCosts, Configuration, Job, StageChoice, evaluate
from planner.space.evaluate_many import evaluate_many
from planner.space.job_options import allowing
from planner.space.pricer import Pricer

BATCH = 256
SCHEDULES = ("1f1b", "gpipe")


@cache
def pricer(hardware: str, nodes: int | None, overlap: float) -> tuple[Cluster, Job, Pricer]:
    cluster = planner.load_cluster(hardware, nodes=nodes)
    job = without_limits(planner.Job(BATCH, overlap=overlap), cluster)
    return cluster, job, Pricer(planner.load_graph("gpt2", dims={"seq": 256}), cluster, job)


def drawn(rng: random.Random, costs: BlockCosts, devices: int) -> Configuration:
    """Any cut into up to eight stages that has devices and samples."""
    blocks = len(costs.parameter_elements)
    while True:
        count, copies = rng.randint(1, 8), rng.choice((1, 1, 2, 4))
        edges = (0, *sorted(rng.sample(range(1, blocks), count - 1)), blocks)
        replicas = [rng.choice((1, 2, 4)) for _ in range(count)] if rng.random() < 0.5 else [rng.choice((1, 2))] * count
        if copies * sum(replicas) * costs.ranks <= devices:
            break
    stages = tuple(
        StageChoice(a, b, r, rng.random() < 0.5, costs.ranks, costs.sharding)
        for (a, b), r in zip(itertools.pairwise(edges), replicas, strict=True)
    )
    return Configuration(
        stages, copies, costs.micro_batch, BATCH // copies // costs.micro_batch, rng.choice(SCHEDULES),
        rng.randint(0, 3), rng.choice((0, 0, devices // copies)), adjacent=copies > 1 and rng.random() < 0.3,
        whole_stages=rng.random() < 0.2,
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("overlap", [0.0, 0.5])
@pytest.mark.parametrize(("hardware", "nodes"), [("dgx-a100", 1), ("dgx-a100", 2), ("mixed-pool", None)])
def test_each_is_what_the_judge_says(hardware: str, nodes: int | None, overlap: float, ranks: int) -> None:
    cluster, job, prices = pricer(hardware, nodes, overlap)
    if ranks > 1 and len(cluster.devices) > 1:
        ranks = 1  # operators are shared by equal devices only
    rng = random.Random(ranks)
    costs = prices.shardings_of(2, ranks)[0]
    drawn_ones = [drawn(rng, costs, cluster.device_count) for _ in range(120)]
    (found,) = evaluate_many((costs,), cluster, job, drawn_ones)
    for at, configuration in enumerate(drawn_ones):
        right = evaluate(costs, cluster, allowing(job, configuration), configuration)
        fullest = max(right.workers, key=lambda worker: worker.memory.total / worker.capacity_bytes)
        assert found.iteration_s[at] == pytest.approx(right.iteration_s, rel=1e-12)
        assert found.peak_bytes[at] == pytest.approx(fullest.memory.total, rel=1e-12)
        assert found.capacity_bytes[at] == fullest.capacity_bytes
        assert found.fits[at] == right.feasible
    assert found.reasons == ("",) * 120


def test_what_makes_no_sense_takes_for_ever_and_says_why() -> None:
    cluster, job, prices = pricer("dgx-a100", 1, 0.0)
    costs = prices.costs(2)
    one = Configuration((StageChoice(0, 26, 1),), 1, 2, 128, "1f1b")
    two = Configuration((StageChoice(0, 27, 1),), 16, 2, 8, "1f1b")
    good = Configuration((StageChoice(0, 27, 1),), 8, 2, 16, "1f1b")
    (found,) = evaluate_many((costs,), cluster, job, [one, good, two])
    assert np.isinf(found.iteration_s).tolist() == [True, False, True]
    assert found.fits.tolist() == [False, True, False]
    assert "stages end at block 26 of 27" in found.reasons[0]
    assert "16 copies of 1 devices, but there are 8" in found.reasons[2]

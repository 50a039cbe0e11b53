"""Recomputation by layers: what a recomputed stage keeps where the chain can be cut inside a layer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import planner
from planner import Pricer
from planner.hardware import with_headroom
from planner.space import BlockCosts, Configuration, Job, StageChoice, evaluate

TOKENS, WIDTH = 1024, 768
STREAM = TOKENS * WIDTH * 2
"""Bytes of the residual stream of GPT-2 at one sample, in bf16."""


@pytest.fixture(scope="module")
def costs() -> BlockCosts:
    job = Job(global_batch=8, precision="bf16")
    return Pricer(planner.load_graph("gpt2"), planner.load_cluster("dgx-a100"), job).costs(1)


def block(costs: BlockCosts, name: str) -> int:
    return next(at for at, own in enumerate(costs.names) if own.endswith(name))


def test_a_recomputed_stage_keeps_one_stream_a_layer(costs: BlockCosts) -> None:
    first, last = block(costs, "h.0[1/2]"), block(costs, "h.11[2/2]")
    assert last - first == 23
    assert costs.checkpoint_bytes[first, last] == 12 * STREAM
    assert costs.checkpoint_bytes[first, first + 1] == STREAM


def test_a_stage_that_begins_inside_a_layer_keeps_what_enters_there(costs: BlockCosts) -> None:
    first, last = block(costs, "h.3[2/2]"), block(costs, "h.5[1/2]")
    assert costs.checkpoint_bytes[first, first] == STREAM
    assert costs.checkpoint_bytes[first, last] == 3 * STREAM


def middle(costs: BlockCosts) -> float:
    """Activations of a stage of the twelve layers between embedding and head, two micro-batches in flight."""
    first, last = block(costs, "h.0[1/2]"), block(costs, "h.11[2/2]")
    ends = StageChoice(0, first, 1), StageChoice(last + 1, len(costs.names), 1)
    stages = ends[0], StageChoice(first, last + 1, 1, True), ends[1]
    cluster, job = planner.load_cluster("dgx-a100"), Job(global_batch=8, precision="bf16")
    terms = evaluate(costs, cluster, job, Configuration(stages, 1, 1, 8, "1f1b")).stages[1]
    assert (terms.in_flight, terms.unit_bytes) == (2, 12 * STREAM if costs.layer_starts is not None else 24 * STREAM)
    return terms.memory.activations


def test_the_micro_batch_in_work_needs_a_whole_layer(costs: BlockCosts) -> None:
    first = block(costs, "h.0[1/2]")
    assert middle(costs) == pytest.approx(2 * 12 * STREAM + float(costs.saved_bytes[first, first + 1]))


def test_blocks_without_layers_stand_alone(costs: BlockCosts) -> None:
    layers = [name for name in costs.names if ".h." in name]
    alone = dataclasses.replace(costs, layer_starts=None, checkpoint_bytes=np.triu(_inputs(costs)))
    largest = max(float(costs.saved_bytes[b, b]) for b in map(costs.names.index, layers))
    assert middle(alone) == pytest.approx(2 * 24 * STREAM + largest)


def _inputs(costs: BlockCosts) -> np.ndarray:
    """[n, n] one stream for each block of i..j."""
    count = len(costs.names)
    return np.array([[(j - i + 1.0) * STREAM for j in range(count)] for i in range(count)])


def test_the_judge_counts_buffers_and_headroom(costs: BlockCosts) -> None:
    cluster, job = planner.load_cluster("dgx-a100"), Job(global_batch=8, precision="bf16")
    half = len(costs.names) // 2
    one = Configuration((StageChoice(0, len(costs.names), 1),), 1, 1, 8, "1f1b")
    two = Configuration((StageChoice(0, half, 1), StageChoice(half, len(costs.names), 1)), 4, 1, 2, "1f1b")
    for configuration, count in ((one, 0), (two, 3 + 2 + 3)):
        for free in (0.0, 0.05):
            terms = evaluate(costs, with_headroom(cluster, free), job, configuration).stages[0]
            assert terms.memory.reserve == 2_000_000_000 + 220 * count * 2**20
            assert terms.capacity_bytes == np.floor((1 - free) * round(79.15 * 2**30))

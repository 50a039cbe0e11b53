"""A mask that every layer reads is worked out once by a stage, however many of its layers read it."""

from __future__ import annotations

import numpy as np
import pytest

from planner import Job, Pricer, load_cluster, load_graph
from planner.graph import Chain
from planner.sharding import Axis
from planner.space import Configuration, StageChoice, evaluate

JOB = Job(global_batch=8)


def whole(costs_s: np.ndarray) -> float:
    return float(costs_s.sum())


@pytest.fixture(scope="module")
def bert() -> Pricer:
    return Pricer(load_graph("bert-base"), load_cluster("dgx-a100"), JOB)


def masks(chain: Chain) -> list[int]:
    return [b for b, block in enumerate(chain.blocks) if block.side]


def test_twelve_layers_read_the_mask_and_one_pays_for_it(bert: Pricer) -> None:
    readers = masks(bert.chain)
    assert len(readers) == 12
    profile = bert.profiles(8)[0]
    side = list(bert.chain.blocks[readers[0]].side)
    assert profile.forward_s[side].sum() > 0
    # Every operator of the graph once: masks are not priced a second time.
    assert whole(bert.costs(8).forward_s) == pytest.approx(profile.forward_s.sum())
    later = [float(bert.costs(8).forward_s[0, b]) for b in readers[1:]]
    assert later == pytest.approx([later[0]] * 11)
    assert float(bert.costs(8).forward_s[0, readers[0]]) > later[0] + 0.9 * profile.forward_s[side].sum()


def test_shared_among_ranks_it_is_paid_for_once_too(bert: Pricer) -> None:
    floors = bert.floors(8)
    (key,) = {key for _, key in floors if key[0] == (Axis("tensor", 2),)}
    costs = next(c for k in bert.refine(8, key)[0] for c in bert.refine(8, k[1])[1])
    forward_s = costs.forward_s[0, masks(bert.chain)]
    assert forward_s[1:] == pytest.approx([forward_s[1]] * 11)
    assert forward_s[0] > 1.05 * forward_s[1]


def test_a_stage_of_all_blocks_takes_what_the_graph_takes(bert: Pricer) -> None:
    stage = StageChoice(0, len(bert.chain.blocks), 1)
    decision = Configuration((stage,), 1, 8, 1, "1f1b")
    found = evaluate(bert.costs(8), bert.cluster, JOB, decision)
    assert found.stages[0].forward_s == pytest.approx(float(bert.profiles(8)[0].forward_s.sum()))

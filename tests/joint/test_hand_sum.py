"""What the judge says of an MLP on two ranks, added up by hand.

A scaling block and a block of two products. Whole, each product takes 1 s forward and 2 s backward, scaling and the
activation half of that. Two ranks cut the first product by columns and the second by rows (Shoeybi et al. 2019): every
rank does half of the work between them, and sums 8 x 64 elements forward and backward. Bandwidth 10 kB/s, latency 0,
fp32.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from planner.costs import precision
from planner.graph import Chain, ChainBlock
from planner.operators import SavedBytes
from planner.sharding import BoundaryLayout, Setting, inner_costs, mesh_on, sharded_costs
from planner.space import BlockCosts, Configuration, Job, StageChoice, evaluate
from planner.space.blocks import update_s_per_element
from planner.space.sharded import sharded_block_costs
from tests.operators.calls import graph, node
from tests.space.instances import cluster

BYTE_PER_S = 1e4
MACHINE = cluster((4,), (BYTE_PER_S,), memory_bytes=(10**6,))
JOB = Job(global_batch=32, precision="fp32", optimizer="adam", zero=(0,))
ALL_REDUCE_S = 8 * 64 * 4 / BYTE_PER_S
"""Among two ranks: each sends half, then half of the sum."""


def mlp() -> BlockCosts:
    """Costs of one of two ranks for micro-batches of 8."""
    tensors = {
        "x0": "i 8 64",
        "g": "w 64",
        "x": "x 8 64",
        "w0": "w 64 256",
        "h": "x 8 256",
        "r": "x 8 256",
        "w1": "w 256 64",
    }
    nodes = [node("Mul", "x0 g", "x"), node("MatMul", "x w0", "h"), node("Relu", "h", "r"), node("MatMul", "r w1", "y")]
    what = graph({**tensors, "y": "x 8 64"}, nodes)
    blocks = (ChainBlock("scale", (0,), (), "scale"), ChainBlock("mlp", (1, 2, 3), (), "mlp"))
    chain = Chain(what, blocks, ())
    times = np.array([0.5, 1.0, 0.5, 1.0])
    kept = ((), (SavedBytes("x", 8 * 64 * 4),), (SavedBytes("r", 8 * 256 * 4),), (SavedBytes("r", 8 * 256 * 4),))
    prices = SimpleNamespace(
        micro_batch=8, forward_s=times, backward_s=2 * times, workspace_bytes=np.zeros(4), saved=kept,
        at=lambda share, pieces=1: (share * times, share * 2 * times),
    )  # fmt: skip
    place = mesh_on(MACHINE, {"tensor": 2})
    setting = Setting(what, place, item_bytes=4.0, forbidden=("x:*", "MatMul:m", "r:d0"), micro_batches=4)
    inner = inner_costs(chain, prices, setting, boundaries=(BoundaryLayout.REPLICATED,))
    element_s = update_s_per_element(MACHINE.devices[0], precision("fp32"), "adam", 0.0)
    return sharded_block_costs(inner, sharded_costs(inner)[0], element_s, 1)


def test_two_replicas_of_two_ranks() -> None:
    """One stage; 4 micro-batches, two a replica, then the replicas sum their gradients."""
    stage = StageChoice(0, 2, replicas=2, ranks=2, sharding=1)
    verdict = evaluate(mlp(), MACHINE, JOB, Configuration((stage,), 1, 8, 4, "1f1b"))
    terms = verdict.stages[0]
    assert terms.forward_s == pytest.approx(0.5 + (1.0 + 0.5 + 1.0) / 2 + ALL_REDUCE_S)
    assert terms.backward_s == pytest.approx(1.0 + (2.0 + 1.0 + 2.0) / 2 + ALL_REDUCE_S)
    elements = 64 + 64 * 256 / 2 + 256 * 64 / 2
    assert terms.sync_s == pytest.approx(elements * 4 / BYTE_PER_S)
    update_s = elements * (2 * 8 + 4 + 4) / 1e12
    assert terms.update_s == pytest.approx(update_s)
    assert terms.memory.weights == terms.memory.gradients == elements * 4
    assert terms.memory.optimizer == elements * 8
    # x whole on each rank, r cut; two micro-batches of a replica, one of them in flight.
    assert terms.memory.activations == 8 * 64 * 4 + 8 * 256 * 4 / 2
    expected = 2 * (1.75 + 3.5 + 2 * ALL_REDUCE_S) + elements * 4 / BYTE_PER_S + update_s
    assert verdict.iteration_s == pytest.approx(expected)


def test_two_stages_of_two_ranks() -> None:
    """Each rank sends half of x to its like in the next stage, which gathers it; the gradient goes back so."""
    stages = (StageChoice(0, 1, 1, ranks=2, sharding=1), StageChoice(1, 2, 1, ranks=2, sharding=1))
    verdict = evaluate(mlp(), MACHINE, JOB, Configuration(stages, 1, 8, 4, "1f1b"))
    first, second = verdict.stages
    assert (first.forward_s, first.backward_s) == (0.5, 1.0)
    half_s = 8 * 64 * 4 / 2 / BYTE_PER_S
    assert second.receive_s == pytest.approx(half_s + half_s)
    assert second.return_s == pytest.approx(half_s + half_s)
    assert second.forward_s == pytest.approx(1.25 + ALL_REDUCE_S)
    assert second.backward_s == pytest.approx(2.5 + ALL_REDUCE_S)
    slowest_s = 1.25 + 2.5 + 2 * ALL_REDUCE_S + 4 * half_s
    # Four micro-batches; the second stage's update is over before the first stage's last backward.
    update_s = 64 * (2 * 8 + 4 + 4) / 1e12
    assert verdict.iteration_s == pytest.approx(0.5 + 1.0 + slowest_s + 3 * slowest_s + update_s, rel=1e-12)
    assert first.memory.weights == 64 * 4


def test_ranks_are_neighbours_and_slices_follow_one_another() -> None:
    """Too many ranks for the devices are refused."""
    stage = StageChoice(0, 2, replicas=2, ranks=2, sharding=1)
    verdict = evaluate(mlp(), MACHINE, JOB, Configuration((stage,), 2, 8, 2, "1f1b"))
    assert [v.kind for v in verdict.violations] == ["devices"]

"""Axes that deal out samples, experts and steps: memory and seconds of a rank, added up by hand.

Four experts' ranks: two scalings and a dense product of 1,088 weights that every rank holds, and two products of eight
experts (2,048 weights an expert and product), two of which each rank holds. fp32, 10 kB/s, no latency, a second for
each of the eleven operators in either pass, of which a rank does a quarter.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from planner import Degrees, check_plan, load_cluster, load_graph, plan, predict
from planner.costs import precision
from planner.errors import JobError
from planner.graph import Chain, ChainBlock, Graph
from planner.operators import OpCall, graph_specs
from planner.sharding import (
    AxisRole,
    InnerCosts,
    Options,
    Part,
    Setting,
    Strategy,
    axes_text,
    exchange_bytes,
    exchange_s,
    ideal_mesh,
    inner_costs,
    mesh_on,
    reshard,
    sharded_costs,
    strategies,
)
from planner.space import BlockCosts, Configuration, Job, evaluate
from planner.space.blocks import update_s_per_element
from planner.space.evaluate_many import evaluate_many
from planner.space.jobs import meshes_for
from planner.space.pricer import Pricer
from planner.space.sharded import sharded_block_costs
from planner.systems.backends import backends_of, within_limits
from tests.operators.calls import graph, node
from tests.space.instances import cluster

BYTE_PER_S = 1e4
MACHINE = cluster((8,), (BYTE_PER_S,), memory_bytes=(10**6,))
DENSE, EXPERTS = 32 + 32 * 32 + 32, 2 * 8 * 32 * 64


def mixture() -> Graph:
    """Samples [8, 16, 32] through a dense product, then as [experts, rows, 32] through two products of experts."""
    tensors = {
        "x0": "i 8 16 32", "g0": "w 32", "x": "x 8 16 32", "w": "w 32 32",
        "h": "x 8 16 32", "split": "x 8 8 2 32", "turned": "x 8 8 2 32",
        "rows": "x 8 16 32", "up": "w 8 32 64", "wide": "x 8 16 64", "down": "w 8 64 32", "narrow": "x 8 16 32",
        "apart": "x 8 8 2 32", "back": "x 8 8 2 32", "y": "x 8 16 32",
        "g1": "w 32", "z": "x 8 16 32",
    }  # fmt: skip
    nodes = [
        node("Mul", "x0 g0", "x"),
        node("MatMul", "x w", "h"),
        node("Reshape", "h", "split"),
        node("Transpose", "split", "turned", perm=(1, 0, 2, 3)),
        node("Reshape", "turned", "rows"),
        node("MatMul", "rows up", "wide"),
        node("MatMul", "wide down", "narrow"),
        node("Reshape", "narrow", "apart"),
        node("Transpose", "apart", "back", perm=(1, 0, 2, 3)),
        node("Reshape", "back", "y"),
        node("Mul", "y g1", "z"),
    ]
    return graph(tensors, nodes)


def inner() -> InnerCosts:
    """The mixture between two blocks that scale, on an expert axis of four ranks."""
    what = mixture()
    nodes = (0,), tuple(range(1, 10)), (10,)
    blocks = tuple(ChainBlock(f"block {k}", own, (), str(k)) for k, own in enumerate(nodes))
    chain = Chain(what, blocks, ())
    times = np.ones(11)
    prices = SimpleNamespace(
        micro_batch=8, forward_s=times, backward_s=times, workspace_bytes=0 * times, saved=((),) * 11,
        at=lambda share, pieces=1: (share * times, share * times),
    )  # fmt: skip
    options = Options(roles=(AxisRole.EXPERT,))
    place = mesh_on(MACHINE, {"expert": 4})
    return inner_costs(chain, prices, Setting(what, place, item_bytes=4.0, micro_batches=4, options=options))


def costs() -> BlockCosts:
    """Costs of one rank."""
    found = inner()
    element_s = update_s_per_element(MACHINE.devices[0], precision("fp32"), "adam", 0.0)
    return sharded_block_costs(found, sharded_costs(found)[0], element_s, 1)


def test_rows_go_to_their_experts_and_back_in_either_pass() -> None:
    """A rank has 8 x 8 x 2 x 32 / 4 = 1,024 elements of the rows and keeps a quarter of them."""
    each_s = 1024 * 4 * 3 / 4 / BYTE_PER_S
    own = costs()
    assert own.forward_s.sum() == pytest.approx(11 / 4 + 2 * each_s)
    assert own.backward_s.sum() == pytest.approx(11 / 4 + 2 * each_s)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_dense_weights_are_sharded_over_all_ranks_and_experts_over_their_replicas(zero: int) -> None:
    """Two replicas of four ranks: dense weights have eight likes, those of an expert two."""
    own = costs()
    verdict = evaluate(own, MACHINE, Job(32, precision="fp32", zero=(zero,)), _one_stage(own, zero))
    memory, held = verdict.stages[0].memory, DENSE + EXPERTS / 4
    left = (DENSE / 4 + EXPERTS / 4) / 2
    assert verdict.violations == ()
    assert memory.optimizer == 8 * (left if zero else held)
    assert memory.gradients == 4 * (left if zero > 1 else held)
    assert memory.weights == 4 * (left if zero > 2 else held)
    assert verdict.stages[0].update_s == pytest.approx((left if zero else held) * (2 * 8 + 4 + 4) / 1e12)


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_summed_among_the_likes_of_a_group_then_among_replicas(zero: int) -> None:
    """Scatter and gather 1,088 elements among four, then what is left to a rank among two."""
    own = costs()
    verdict = evaluate(own, MACHINE, Job(32, precision="fp32", zero=(zero,)), _one_stage(own, zero))
    inside_s = 2 * 3 / 4 * DENSE * 4 / BYTE_PER_S
    among_s = 2 * 1 / 2 * (DENSE / 4 + EXPERTS / 4) * 4 / BYTE_PER_S
    assert verdict.stages[0].sync_s == pytest.approx(inside_s + among_s)


def test_weights_sharded_in_the_passes_are_gathered_among_both() -> None:
    """ZeRO-3: gathered forward, gathered and scattered backward; nothing overlaps."""
    own, job = costs(), Job(32, precision="fp32", zero=(3,), overlap=0.0)
    terms = evaluate(own, MACHINE, job, _one_stage(own, 3)).stages[0]
    each_s = (3 / 4 * DENSE + 1 / 2 * (DENSE / 4 + EXPERTS / 4)) * 4 / BYTE_PER_S
    assert terms.forward_s == pytest.approx(own.forward_s.sum() + each_s)
    assert terms.backward_s == pytest.approx(own.backward_s.sum() + 2 * each_s)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_many_are_judged_as_one(zero: int) -> None:
    own, job = costs(), Job(32, precision="fp32", zero=(zero,), overlap=0.5)
    alone = evaluate(own, MACHINE, job, _one_stage(own, zero))
    (many,) = evaluate_many((own,), MACHINE, job, [_one_stage(own, zero)])
    assert many.iteration_s[0] == pytest.approx(alone.iteration_s)
    assert many.peak_bytes[0] == pytest.approx(alone.workers[0].memory.total)


def test_a_stage_says_the_axes_of_its_sharding() -> None:
    own = costs()
    wrong = dataclasses.replace(own.stage(0, 3, 2), expert=2)
    job = Job(32, precision="fp32", zero=(0,))
    (violation,) = evaluate(own, MACHINE, job, Configuration((wrong,), 1, 8, 4, "1f1b")).violations
    assert violation.message == "stage 0 has CP 1 and EP 2; its sharding is for CP 1 and EP 4"


def _one_stage(own: BlockCosts, zero: int) -> Configuration:
    return Configuration((own.stage(0, 3, replicas=2),), 1, 8, 4, "1f1b", zero)


def attention_ways(role: AxisRole) -> dict[str, Strategy]:
    """Ways to run a grouped attention of 8 and 4 heads of 16 over 64 steps on an axis of four ranks, by what is cut."""
    tensors = {"q": "x 1 8 64 16", "k": "x 1 4 64 16", "v": "x 1 4 64 16", "y": "x 1 8 64 16"}
    what = graph(tensors, [node("Attention", "q k v", "y", is_causal=1)])
    call = OpCall.of(what, what.nodes[0])
    found = strategies(call, graph_specs(what)[0], ideal_mesh({role.value: 4}), 2.0, Options(roles=(role,)))
    return {strategy.splits[0]: strategy for strategy in found}


@pytest.mark.parametrize(
    ("way", "sent_bytes"),
    [
        ("ring", 3 * (2 * 4 * 64 * 16 // 4 * 2)),  # three hops of a quarter of keys and values
        ("s", 3 * (2 * 4 * 64 * 16 // 4 * 2)),  # the same, gathered
        ("g", 3 / 4 * (2 * 8 + 2 * 4) * 64 * 16 / 4 * 2),  # three quarters of queries, keys, values and results move
    ],
)
def test_bytes_of_the_three_kinds_of_attention_on_a_context_axis(way: str, sent_bytes: float) -> None:
    """Everything lies cut by steps before and after."""
    mesh, strategy = ideal_mesh({"context": 4}), attention_ways(AxisRole.CONTEXT)[way]
    shapes = {0: (1, 8, 64, 16), 1: (1, 4, 64, 16), 2: (1, 4, 64, 16)}
    steps = (Part(2),)
    moves = [move for p, layout in strategy.reads for move in reshard(mesh, shapes[p], 2.0, steps, layout)]
    moves += [move for _, layout in strategy.writes for move in reshard(mesh, shapes[0], 2.0, layout, steps)]
    inside = exchange_bytes(mesh, strategy, backward=False)
    assert inside + sum(move.sent_bytes for move in moves) == sent_bytes


def test_sends_of_a_ring_hide_behind_a_piece_of_the_work() -> None:
    """A second a byte: a hop of 4,096 bytes hides behind a quarter of the work; three hops."""
    mesh, ring = ideal_mesh({"context": 4}), attention_ways(AxisRole.CONTEXT)["ring"]
    assert exchange_s(mesh, ring, backward=False) == 3 * 4096
    assert exchange_s(mesh, ring, backward=False, beside_s=4 * 1000.0) == 3 * 3096
    assert exchange_s(mesh, ring, backward=False, beside_s=4 * 5000.0) == 0
    assert exchange_s(mesh, ring, backward=True, beside_s=4 * 5000.0) == 3 * (2 * 4096 - 5000)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"context_parallel": (3,)}, "CP 3 does not divide the 128 steps of a sample"),
        ({"expert_parallel": (8,)}, "EP 8: the model has no experts"),
        ({"expert_parallel": (0,)}, "expert_parallel is (0,)"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(limits: dict[str, tuple[int, ...]], message: str) -> None:
    what = load_graph("gpt2", dims={"seq": 128})
    with pytest.raises(JobError, match=re.escape(message)):
        plan(what, load_cluster("dgx-h100"), Job(64, **limits))  # type: ignore[arg-type]


def test_a_micro_batch_has_a_sample_for_each_rank_that_samples_are_dealt_to() -> None:
    message = "EP 4 cannot share a micro-batch of 2"
    with pytest.raises(JobError, match=message):
        meshes_for(mixture(), MACHINE, Job(32, expert_parallel=(4,), micro_batches=(1, 2)))
    assert [axes_text(mesh) for mesh in meshes_for(mixture(), MACHINE, Job(32, expert_parallel=(4,)))] == [
        "expert 4", "expert 4 x 2",
    ]  # fmt: skip


def test_a_limit_on_context_ranks_holds_and_its_plan_checks() -> None:
    what, machine = load_graph("gpt2", dims={"seq": 1024}), load_cluster("dgx-h100")
    limits = {"context_parallel": (2,), "tensor_parallel": (2,), "zero": (1,), "backends": ("any",)}
    found = plan(what, machine, Job(16, **limits))  # type: ignore[arg-type]
    assert {(s.ranks, s.context, s.expert) for s in found.configuration.stages} == {(4, 2, 1)}
    assert [(axis.name, axis.size) for axis in found.shardings[0].axes] == [("context", 2), ("tensor", 2)]
    assert check_plan(found, graph=what, cluster=machine).findings == ()


def test_a_rank_that_holds_more_than_the_plan_says_is_found() -> None:
    what, machine = load_graph("gpt2", dims={"seq": 1024}), load_cluster("dgx-h100")
    asked = Degrees(context=4, data=2, zero=1)
    found = predict(what, machine, Job(16), asked).plan
    stage = found.stages[0]
    assert [(own.ranks, own.parameters) for own in stage.rank_replicas] == [(4, stage.held_parameters)]
    optimizer_bytes = found.predictions.stages[0].memory.optimizer_bytes
    assert optimizer_bytes == math.ceil(stage.held_parameters * 12 / 8)
    wrong = dataclasses.replace(found, stages=(dataclasses.replace(stage, rank_replicas=()),))
    assert check_plan(wrong).findings != ()


@pytest.mark.parametrize(
    ("backend", "dealt", "steps"),
    [
        ("megatron", (16, 1, 1), 1), ("megatron", (4, 1, 2), 2), ("megatron", (4, 2, 1), 1),
        ("any", (4, 1, 2), 2), ("any", (4, 2, 1), 1), ("any", (4, 2, 2), 2),
    ],
)  # fmt: skip
def test_a_mesh_is_bounded_by_its_exchanges_in_the_largest_micro_batch(
    backend: str, dealt: tuple[int, int, int], steps: int
) -> None:
    """First those along the axes that deal out, then those along all axes, and never more than at its own size."""
    expert, context, tensor = dealt
    asked = Job(
        32, expert_parallel=(expert,), context_parallel=(context,), tensor_parallel=(tensor,), backends=(backend,)
    )
    job = within_limits(asked, backends_of(asked))
    pricer = Pricer(load_graph("qwen3-30b-a3b", dims={"seq": 2048}), load_cluster("dgx-h100", nodes=2), job)
    for size in (4, 16, 32) if expert == 4 else (16, 32):
        ((bare, key),) = pricer.floors(size)
        floors = [bare]
        for _ in range(steps):
            (((floor, key),), worked_out) = pricer.refine(size, key)
            assert not worked_out
            floors.append(floor)
        exact, _ = pricer.refine(size, key)
        seconds = [floor.forward_s + floor.backward_s for floor in floors]
        seconds += [np.min([costs.forward_s + costs.backward_s for costs, _ in exact], axis=0)]
        assert all((below <= above * (1 + 1e-9)).all() for below, above in itertools.pairwise(seconds))
        assert size < 32 or all(below.sum() < above.sum() for below, above in itertools.pairwise(seconds[:-1]))

"""What a decision becomes when its indices get names."""

from __future__ import annotations

import dataclasses

import pytest

from planner.errors import PlanError
from planner.plans import Boundary, Duplicated, Loss, Requirement, SharedParameter, StageCollective, dumps, summary
from planner.plans.sections import differentiable
from planner.plans.words import module_ranges
from planner.schedules import ActionKind
from planner.space.blocks import loss_outputs
from tests.graph import make_graph
from tests.plans.sample import decision, make_plan


def test_stages_name_their_operators_parameters_and_neighbours() -> None:
    plan = make_plan()
    assert [stage.modules for stage in plan.stages] == [("embed", "layers.0"), ("layers.1-2",), ("layers.3", "head")]
    assert plan.stage_nodes(0) == ("mask", "h0", "a0", "m0", "h1")
    assert plan.stage_nodes(2) == ("mask", "a3", "m3", "h4", "y")
    assert [p.name for p in plan.stage_parameters(2)] == ["w3", "w_head"]
    assert plan.boundaries == (
        Boundary("h1", 0, (1,), (4,), "float32", 16, True),
        Boundary("h3", 1, (2,), (4,), "float32", 16, True),
    )
    assert plan.shared_parameters == (SharedParameter("w_embed", ("w_embed", "w_head"), (0, 2), "sum", 16),)
    assert plan.duplicated == (Duplicated(("mask",), (0, 1, 2)),)
    assert [stage.parameters for stage in plan.stages] == [8, 8, 8]
    assert plan.model.parameters == 20
    assert plan.model.loss is Loss.AT_OUTPUTS


def test_half_precision_halves_what_is_sent_and_summed() -> None:
    plan = make_plan(precision="bf16")
    assert {(b.dtype, b.bytes) for b in plan.boundaries} == {("bfloat16", 8)}
    assert plan.shared_parameters[0].bytes == 8


def test_copies_and_replicas_take_micro_batches_in_one_round() -> None:
    """Two copies on slices of 3 ranks; stage 0 has ranks 0, 1 and 3, 4, stage 1 has 2 and 5."""
    plan = make_plan(chosen=decision((2, 1), (0, 3), copies=2, micro_batches=4))
    assert plan.world_size == 6
    assert plan.stages[0].replicas == ((0,), (3,), (1,), (4,))
    assert plan.stages[1].replicas == ((2,), (5,))
    assert plan.micro_batches.count == 8
    assert plan.micro_batches.gradient_scale == 1 / 8
    assert [plan.ranks_for(0, m) for m in range(5)] == [(0,), (3,), (1,), (4,), (0,)]
    assert [plan.ranks_for(1, m) for m in range(3)] == [(2,), (5,), (2,)]
    assert [plan.stage_of(rank) for rank in range(6)] == [0, 0, 1, 0, 0, 1]
    forwards = {r: [a.micro_batch for a in plan.actions(r) if a.kind is ActionKind.FORWARD] for r in range(6)}
    assert forwards == {0: [0, 4], 1: [2, 6], 2: [0, 2, 4, 6], 3: [1, 5], 4: [3, 7], 5: [1, 3, 5, 7]}
    # The embedding of stage 0 is the head of stage 1: both replicas of a copy and the one behind them sum its gradient.
    tied = StageCollective("all_reduce", "tied gradients", 16, 3, 2)
    assert [stage.collectives for stage in plan.predictions.stages] == [
        (StageCollective("all_reduce", "gradients", 48, 4, 1), tied),
        (StageCollective("all_reduce", "gradients", 48, 2, 1), tied),
    ]


def test_an_idle_rank_at_the_head_of_a_slice_is_said() -> None:
    chosen = dataclasses.replace(decision((1, 1), (0, 3), copies=2), slice_devices=3)
    plan = make_plan(chosen=chosen)
    assert plan.world_size == 6
    assert plan.idle_ranks == (0, 3)
    assert plan.stages[0].replicas == ((1,), (4,))
    assert Requirement.IDLE_RANKS in plan.requires


@pytest.mark.parametrize(
    ("chosen", "flags"),
    [
        (decision((1,), (0,)), set()),
        (decision((4,), (0,), micro_batches=4), {"replicated_stage"}),
        (decision((2, 1), (0, 3)), {"pipeline", "replicated_stage", "unequal_replication"}),
        (decision((1, 1), (0, 3), recompute=True), {"pipeline", "recompute"}),
        (decision((2,), (0,), zero=1), {"replicated_stage", "zero1"}),
    ],
)
def test_flags_say_what_a_backend_must_be_able_to_do(chosen: object, flags: set[str]) -> None:
    plan = make_plan(chosen=chosen)  # type: ignore[arg-type]
    common = {"tied_parameters", "duplicated_nodes"} if "pipeline" in flags else set()
    assert set(plan.requires) == flags | common


def test_a_tensor_that_skips_a_stage_is_one_boundary_to_both_readers() -> None:
    graph = make_graph(
        [
            "[enc] e = MatMul(x, we)",
            "[dec.0] a0 = MatMul(e, w0)",
            "[dec.0] h0 = Add(a0, e)",
            "[dec.1] a1 = MatMul(h0, w1)",
            "[dec.1] h1 = Add(a1, e)",
            "[dec.2] a2 = MatMul(h1, w2)",
            "[dec.2] h2 = Add(a2, e)",
        ]
    )
    plan = make_plan(graph, decision((1, 1, 1, 1), (0, 1, 2, 3), 4))
    assert {(b.tensor, b.from_stage, b.to_stages) for b in plan.boundaries} == {
        ("e", 0, (1, 2, 3)),
        ("h0", 1, (2,)),
        ("h1", 2, (3,)),
    }
    assert {Requirement.SKIP_EDGES} <= set(plan.requires)


def test_a_value_that_only_steers_carries_no_gradient() -> None:
    graph = make_graph(["e = MatMul(x, we)", "c = MatMul(x, wb)", "y = CastLike(c, e)"])
    assert differentiable(graph) & {"e", "c", "x"} == {"c"}
    compared = make_graph(["e = MatMul(x, we)", "b = Less(e, x)", "y = MatMul(b, wb)"])
    assert "e" not in differentiable(compared)


def test_a_loss_in_the_graph_is_where_gradients_start() -> None:
    graph = make_graph(["a = MatMul(x, wa)", "b = MatMul(a, wb)", "loss = SoftmaxCrossEntropyLoss(a, x)"])
    graph = dataclasses.replace(graph, outputs=("loss", "b"))
    assert loss_outputs(graph) == ("loss",)
    assert differentiable(graph) & {"a", "b"} == {"a"}


def test_runners_up_and_trivial_plans_are_kept_with_their_reasons() -> None:
    second, one = make_plan().alternatives
    assert (second.label, second.iteration_s, second.infeasible) == ("runner-up", 0.6, ())
    assert one.infeasible == ("stage 0 needs 20.0 GiB, a device has 16.0 GiB",)


def test_coverage_counts_and_names_fallbacks() -> None:
    coverage = make_plan().coverage
    assert (coverage.by_rule, coverage.by_fallback, coverage.fallback_ops) == (14, 1, {"MatMul": 1})


def test_a_decision_that_does_not_cover_the_chain_or_fit_the_cluster_is_refused() -> None:
    with pytest.raises(PlanError, match="do not cover 6 blocks"):
        make_plan(chosen=decision((1, 1), (0, 3), 5))
    with pytest.raises(PlanError, match="takes 9 devices of 8"):
        make_plan(chosen=decision((9,), (0,), micro_batches=9))


def test_the_same_input_gives_the_same_bytes() -> None:
    assert dumps(make_plan()) == dumps(make_plan())


@pytest.mark.parametrize(
    ("names", "ranges"),
    [
        (["embed", "l.0", "l.1", "l.2", "head"], ("embed", "l.0-2", "head")),
        (["l.0[1/2]", "l.0[2/2]", "l.1[1/2]"], ("l.0", "l.1[1/2]")),
        (["l.3[2/4]", "l.3[3/4]", "l.4"], ("l.3[2-3/4]", "l.4")),
        (["l.1", "l.3", "k.4"], ("l.1", "l.3", "k.4")),
    ],
)
def test_neighbouring_modules_are_told_as_ranges(names: list[str], ranges: tuple[str, ...]) -> None:
    assert module_ranges(names) == ranges


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (decision((1,), (0,)), "1 stage, micro-batch 1 x 6, 1f1b"),
        (decision((2, 2), (0, 3), copies=2), "2 stages x 2 replicas, 2 copies, micro-batch 1 x 6, 1f1b"),
        (decision((2, 1), (0, 3), zero=1), "2 stages x 2-1 replicas, micro-batch 1 x 6, 1f1b, ZeRO-1"),
        (decision((1, 1), (0, 3), recompute=True), "2 stages, micro-batch 1 x 6, 1f1b, recompute"),
    ],
)
def test_decisions_in_a_line(chosen: object, text: str) -> None:
    assert summary(chosen) == text  # type: ignore[arg-type]

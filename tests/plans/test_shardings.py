"""What a plan says of groups of ranks: every tensor's layout by name, splits, collectives, experts, boundaries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import get_args, get_type_hints

import pytest

from planner.errors import PlanError
from planner.plans import (
    BlockSeries,
    GroupCollective,
    Holding,
    Plan,
    Requirement,
    Sharding,
    StageCollective,
    dealt,
    dumps,
    loads,
    rebuild,
    validate,
)
from planner.plans.model import repeats, skeletons, template
from planner.plans.shardings import transposed
from planner.sharding import Axis, BoundaryLayout, Reason, Strategy, TensorChoice, WeightChoice, layout_text
from tests.plans.sample import decision, make_plan
from tests.plans.sharded_sample import Sample, language, leanest_by_sequence, mixture, sharded_plan
from tests.shared_data import shared_path


def names_lead_to_layouts(sample: Sample) -> None:
    """Every tensor, weight and operator of every block is found under the model's own name, as it was decided."""
    plan = sample.plan
    for stage in plan.stages:
        made: dict[str, str] = {}
        for block in range(*stage.blocks):
            for name, choice in sample.point(block).decision.items():
                if isinstance(choice, Strategy):
                    key = name.removeprefix("op:")
                    split = plan.operator_split(key, stage.index)
                    assert split is not None
                    assert key in made or (split.operator, split.splits) == (key, choice.splits)
                    made[key] = "split"
                    continue
                place = plan.layout_of(name, stage.index)
                assert place is not None
                parts = (choice.weight, choice.gradient, choice.optimizer) if isinstance(choice, WeightChoice) else (
                    choice.value, choice.gradient or (), ()
                )  # fmt: skip
                assert name in made or (place.value, place.gradient, place.optimizer) == tuple(map(layout_text, parts))
                made[name] = "place"


@pytest.mark.parametrize("sample", [language, mixture])
def test_every_tensor_of_every_layer_is_found_by_name(sample: Callable[[], Sample]) -> None:
    names_lead_to_layouts(sample())


@pytest.mark.parametrize(
    ("file", "dims"),
    [("gpt2_124m_metadata", {}), ("bert_base_dyn", {"batch": 1, "seq": 128}), ("t5_base", {}), ("resnet50", {})],
)
def test_names_of_exported_models_are_found(file: str, dims: dict[str, int]) -> None:
    sample = sharded_plan(str(shared_path(f"onnx/{file}.onnx")), (4,), nodes=1, dims=dims)
    names_lead_to_layouts(sample)
    assert loads(dumps(sample.plan)) == sample.plan
    assert validate(sample.plan, sample.graph, sample.cluster) == []


@pytest.mark.parametrize("sample", [language, mixture])
def test_the_file_gives_back_the_very_decision(sample: Callable[[], Sample]) -> None:
    """Strategies with their gradients, shares and exchanges follow from the splits and layouts in the file."""
    found = sample()
    (rebuilt,) = rebuild(loads(dumps(found.plan)), found.graph, found.cluster)
    for entry in rebuilt.sharding.blocks:
        assert rebuilt.decision(entry) == dict(found.point(entry.first[0]).decision)


def test_the_schema_knows_every_reason_and_treatment() -> None:
    hints = get_type_hints(GroupCollective), get_type_hints(Sharding)
    assert set(get_args(hints[0]["reason"])) == {"layout", *Reason}
    assert set(get_args(get_args(hints[1]["boundaries"])[0])) == set(BoundaryLayout)


def test_a_block_that_repeats_is_written_once() -> None:
    plan = language().plan
    (sharding,) = plan.shardings
    assert sum(len(entry.members()) for entry in sharding.blocks) == len(plan.block_table) == 27
    assert len(sharding.blocks) == 6
    assert len(dumps(mixture().plan)) < 90_000


def test_groups_ranks_and_what_they_hold() -> None:
    plan = language().plan
    assert [stage.replicas for stage in plan.stages] == [(tuple(range(8)),), (tuple(range(8, 16)),)]
    assert plan.shardings[0].axes == (Axis("tensor", 8),)
    assert all(stage.sharding == plan.shardings[0].name for stage in plan.stages)
    assert all(stage.parameters / 8 <= stage.rank_parameters < stage.parameters for stage in plan.stages)
    weights = [p.memory.weights_bytes for p in plan.predictions.stages]
    assert weights == [2 * stage.rank_parameters for stage in plan.stages]
    assert plan.actions(0) == plan.actions(7) != plan.actions(8)


def test_a_product_cut_by_columns_then_one_cut_by_rows() -> None:
    plan = language().plan
    up = plan.operator_split("transformer.h.3.mlp.c_fc.matmul")
    down = plan.operator_split("transformer.h.3.mlp.c_proj.matmul")
    assert up is not None
    assert down is not None
    assert (up.splits, up.reads, up.writes, up.share) == (("n",), ("R", "S1"), ("S2",), 0.125)
    assert (down.splits, down.reads, down.writes, down.share) == (("k",), ("S2", "S0"), ("P",), 0.125)
    (entry,) = [
        e for e in plan.shardings[0].blocks if any(o.operator == "transformer.h.0.mlp.gelu" for o in e.operators)
    ]
    sums = [c for c in entry.collectives if c.of.startswith("transformer.h.0.mlp.c_proj.") and c.phase == "forward"]
    assert [c.payload_bytes for c in sums if c.kind in ("all_reduce", "reduce_scatter")] == [1024 * 768 * 2]
    assert {c.level for c in entry.collectives} == {language().cluster.levels[0].name}


def test_boundaries_say_what_each_rank_sends() -> None:
    (boundary,) = language().plan.boundaries
    assert boundary.shape == (1, 1024, 768)
    assert (boundary.layout, boundary.received) == ("S1", ("S1",))
    assert boundary.rank_bytes == boundary.bytes / 8


def test_requirements_name_what_a_backend_must_do() -> None:
    assert {Requirement.TENSOR_PARALLEL, Requirement.SEQUENCE_PARALLEL} <= set(language().plan.requires)
    assert {Requirement.EXPERT_PARALLEL, Requirement.VOCABULARY_PARALLEL} <= set(mixture().plan.requires)
    assert not {Requirement.TENSOR_PARALLEL, Requirement.EXPERT_PARALLEL} & set(make_plan().requires)


def test_experts_are_dealt_to_ranks() -> None:
    plan = mixture().plan
    found = {h.what: h for entry in plan.shardings[0].blocks for h in entry.holdings}
    assert found["experts"].count == 8
    weight = "model.layers.5.mlp.experts.transpose_1"
    held = [plan.held(weight, rank) for rank in range(16)]
    assert all(held)
    assert {i for each in held if each for i in each} == set(range(8))
    assert plan.held("model.norm.weight", 0) is None


@pytest.mark.parametrize(
    ("axes", "position", "expected"),
    [
        (("b",), 5, range(4, 8)),
        (("a",), 5, range(4, 8)),
        (("a", "b"), 5, range(20, 24)),
        (("b", "a"), 5, range(12, 16)),
    ],
)
def test_positions_along_axes(axes: tuple[str, ...], position: int, expected: range) -> None:
    """Position 5 of a 2 x 4 mesh is (1, 1)."""
    mesh = (Axis("a", 2), Axis("b", 4))
    holding = Holding("experts", "w", 0, axes, 32, 4)
    assert dealt(holding, mesh, position) == expected


def test_the_last_ranks_hold_what_is_left() -> None:
    holding, mesh = Holding("rows", "w", 0, ("a",), 6, 4), (Axis("a", 2),)
    assert [dealt(holding, mesh, k) for k in (0, 1)] == [range(4), range(4, 6)]


def test_weights_read_transposed_are_answered_as_they_are_stored() -> None:
    plan = mixture().plan
    stored = plan.layout_of("model.layers.2.self_attn.o_proj.weight")
    read = plan.layout_of("model.layers.2.self_attn.o_proj.transpose")
    assert stored is not None
    assert read is not None
    assert read.parameters == ("model.layers.2.self_attn.o_proj.weight",)
    assert read.dims == (1, 0)
    assert transposed(read.value, (1, 0)) == stored.value
    assert transposed("S0~3S1RP", (1, 0)) == "S1~3S0RP"


def test_recomputed_stages_and_copies() -> None:
    sample = sharded_plan("gpt2", (4,), copies=2, recompute=True)
    plan = sample.plan
    assert plan.stages[1].replicas == ((4, 5, 6, 7), (12, 13, 14, 15))
    assert [plan.ranks_for(1, m) for m in range(3)] == [(4, 5, 6, 7), (12, 13, 14, 15), (4, 5, 6, 7)]
    assert validate(plan, sample.graph, sample.cluster) == []
    held = plan.stages[1].rank_parameters
    assert plan.predictions.stages[1].collectives[0].bytes == held * 2
    assert plan.predictions.stages[1].collectives[0].groups == 4


def test_gradients_of_tied_weights_are_summed_by_equal_ranks() -> None:
    """The table is cut in eight in both stages: 50257 x 768 / 8 elements of 2 bytes, eight groups of two ranks."""
    for stage in language().plan.predictions.stages:
        assert stage.collectives == (StageCollective("all_reduce", "tied gradients", 50257 * 768 // 8 * 2, 2, 8),)


def test_an_unsharded_plan_says_nothing_of_shardings() -> None:
    plan = make_plan()
    assert '"shardings"' not in dumps(plan)
    assert plan.layout_of("h1") is None
    assert plan.operator_split("h1") is None


def test_a_decision_without_its_sharding_is_refused() -> None:
    wide = dataclasses.replace(decision((1,), (0,)).stages[0], ranks=4, sharding=3)
    chosen = dataclasses.replace(decision((1,), (0,)), stages=(wide,))
    with pytest.raises(PlanError, match="groups of 4 ranks; sharding 3 is for none"):
        make_plan(chosen=chosen)


def test_rows_of_names_that_follow_a_template() -> None:
    rows = [("l.0", "x"), ("l.1", "x"), ("l.2", "x"), ("l.4", "x"), ("m.5", "x")]
    outlines = skeletons((row, ()) for row in rows)
    assert [repeats(outlines, start, 1) for start in range(5)] == [3, 2, 2, 1, 1]
    assert repeats(skeletons([(("a{1}",), ()), (("a{2}",), ())]), 0, 1) == 1
    assert repeats(skeletons([(("a1",), "wide"), (("a2",), "narrow")]), 0, 1) == 1
    assert template("l.3.a", "l.5.a") == "l.{3+2i}.a"
    series = BlockSeries(3, 2, 3, ("l.{0+1i}", "x"))
    assert list(series.named()) == [(3, ("l.0", "x")), (5, ("l.1", "x")), (7, ("l.2", "x"))]


def test_the_same_decision_gives_the_same_bytes() -> None:
    again = sharded_plan("gpt2", (8,), pick=leanest_by_sequence)
    assert dumps(again.plan) == dumps(language().plan)
    assert isinstance(again.plan, Plan)
    assert isinstance(language().point(2).decision["transformer.add"], TensorChoice)

"""Which splits operators offer: heads, vocabularies, uneven sizes, fused projections, and what nobody may cut."""

from __future__ import annotations

import pytest

from planner.operators import RULES, OpCall, graph_specs, spec
from planner.sharding import Options, Strategy, exchange_bytes, exchange_s, ideal_mesh, layout_text, strategies
from planner.sharding.formulate import interleaved_cuts
from tests.operators.calls import call, graph, node
from tests.sharding import coupled_cases
from tests.sharding.plain_cases import CASES


def _found(what: OpCall, sizes: tuple[int, ...], **options: object) -> dict[tuple[str, ...], Strategy]:
    chosen = Options(**options)  # type: ignore[arg-type]
    return {s.splits: s for s in strategies(what, spec(what), ideal_mesh(sizes), 2.0, chosen)}


def _texts(strategy: Strategy) -> tuple[list[str], list[str]]:
    return [layout_text(x) for _, x in strategy.reads], [layout_text(x) for _, x in strategy.writes]


GROUPED = call("Attention", ["x 2 32 64 8", "x 2 8 64 8", "x 2 8 64 8"], ["x 2 32 64 8"])


def test_grouped_heads_limit_one_axis_but_not_two() -> None:
    assert ("g",) in _found(GROUPED, (8,))
    assert ("g",) not in _found(GROUPED, (16,)), "eight key-value heads do not go to sixteen ranks"
    both = _found(GROUPED, (8, 4))["g", "r"]
    assert _texts(both) == (["S1S1", "S1R", "S1R"], ["S1S1"])
    assert [layout_text(x) for _, x in both.read_gradients] == ["S1S1", "S1P", "S1P"]
    assert both.share == pytest.approx(1 / 32)


def test_ring_attention_sends_keys_and_values_around() -> None:
    ring = _found(GROUPED, (4,))["ring",]
    local = 2 * (2 * 8 * 16 * 8) * 2  # key and value of a quarter of the steps, bf16
    assert exchange_bytes(ideal_mesh((4,)), ring, backward=False) == 3 * local
    assert exchange_bytes(ideal_mesh((4,)), ring, backward=True) == 3 * 2 * local
    assert exchange_s(ideal_mesh((4,)), ring, backward=False) == 3 * local


def test_a_vocabulary_is_cut_into_masked_partial_sums() -> None:
    table = call("Gather", ["w 24 8", "i:int64 6"], ["x 6 8"])
    cut = _found(table, (4,))["v",]
    assert _texts(cut) == (["S0", "R"], ["P"])
    assert layout_text(dict(cut.read_gradients)[0]) == "S0"
    assert layout_text(dict(cut.write_gradients)[0]) == "R"


def test_uneven_sizes_are_refused_or_cost_their_padding() -> None:
    table = call("Gather", ["w 50257 8", "i:int64 6"], ["x 6 8"])
    assert ("v",) not in _found(table, (8,))
    padded = _found(table, (8,), padded=True)["v",]
    assert padded.share == pytest.approx(6283 / 50257)


def test_a_fused_projection_is_cut_in_thirds() -> None:
    thirds = call("Split", ["x 2 4 24"], ["x 2 4 8"] * 3, axis=2)
    assert _texts(_found(thirds, (2,))["d2",]) == (["S2~3"], ["S2"] * 3)
    assert ("d2",) not in _found(thirds, (2,), interleaved=False)
    tensors = {"x": "x 2 4 8", "w": "w 8 24", "b": "w 24", "y": "x 2 4 24", "z": "x 2 4 24"}
    tensors |= dict.fromkeys("qkv", "x 2 4 8")
    what = graph(tensors, [node("MatMul", "x w", "y"), node("Add", "y b", "z"), node("Split", "z", "q k v", axis=2)])
    tags = interleaved_cuts(what, range(3), graph_specs(what))
    assert {name: [str(p) for p in parts] for name, parts in tags.items()} == {
        "z": ["S2~3"], "y": ["S2~3"], "w": ["S1~3"], "b": ["S0~3"],
    }  # fmt: skip


def test_data_parallelism_is_a_cut_of_the_batch() -> None:
    product = call("MatMul", ["x 16 4 8", "w 8 8"], ["x 16 4 8"])
    batch = _found(product, (4,))["b0",]
    assert _texts(batch) == (["S0", "R"], ["S0"])
    assert [layout_text(x) for _, x in batch.read_gradients] == ["S0", "P"]


def test_an_unknown_operator_runs_whole() -> None:
    only = _found(call("acme.Frobnicate", ["x 4 4"], ["x 4 4"]), (4,))
    assert list(only) == [("",)]
    assert only["",].share == 1.0


def test_axes_of_one_rank_do_nothing() -> None:
    product = call("MatMul", ["x 4 8", "w 8 8"], ["x 4 8"])
    assert {s[0] for s in _found(product, (1, 2))} == {""}


NOT_EXECUTED = {
    "concat_sequence", "container", "data_dependent", "dynamic_quantize", "max_unpool", "roi_pool", "shape_arithmetic",
}  # fmt: skip
"""Rules whose only cuts are of the batch, or that have none, and that are too long to write out here."""
SAME_NEST = {
    "bernoulli", "bias_softmax", "conv_integer", "fill", "group_norm_channels_last",
    "gru", "matmul_nbits", "qlinear_conv", "quantize", "random_numbers", "rnn",
    "simplified_layer_norm", "skip_rms_norm", "tensor_scatter", "window_table",
}  # fmt: skip
"""Rules whose loop nest is that of a rule which is executed (or that read nothing)."""


def test_every_rule_is_executed_or_listed() -> None:
    cases = [make() for make in CASES.values()]
    cases += [coupled_cases.softmax(), coupled_cases.layer_norm(), coupled_cases.batch_norm()]
    cases += [coupled_cases.mean_variance_norm(), coupled_cases.group_norm(), coupled_cases.rms_norm()]
    cases += [coupled_cases.group_norm(4, 4, "InstanceNormalization"), coupled_cases.lp_norm()]
    cases += [
        coupled_cases.skip_layer_norm(),
        coupled_cases.embed_layer_norm(),
        coupled_cases.cross_entropy(),
        coupled_cases.reduction("ReduceMax"),
    ]
    cases += [coupled_cases.convolution(), coupled_cases.attention()]
    cases += [coupled_cases.pooling(op) for op in ("MaxPool", "AveragePool", "LpPool")]
    executed = {RULES.get(case.call.op).build.__name__ for case in cases}
    every = {rule.build.__name__ for _, rule in RULES.items() if rule.build is not None}
    assert every - executed == NOT_EXECUTED | SAME_NEST

"""Scans in chunks, and attention within a window: work by hand, what is kept for backward."""

from __future__ import annotations

import pytest

from planner.operators import spec
from planner.operators.types import OpSpec
from tests.operators.calls import call

TOKENS = 2 * 64


def _kept(found: OpSpec) -> list[tuple[str, int, int]]:
    return [(s.source, s.position, s.byte_count) for s in found.saved]


def test_a_state_space_scan_keeps_its_operands_its_result_and_the_sum_of_decays() -> None:
    # 8 heads of width 4 in 2 groups, states of 16 numbers, chunks of 32 tokens
    shapes = ["x 2 64 32", "x 2 64 32", "x 2 64 32", "x 2 64 8", "w 8", "w 8", "w 8"]
    found = spec(call("shardplan.StateSpaceScan", shapes, ["x 2 64 32"], num_heads=8, num_groups=2, chunk_size=32))
    by_token = 2 * (2 * 16 * 32 + 8 * 4 * 32 + 8 * 16 * 4 + 8 * 16 * 4)
    assert found.matrix_flops == TOKENS * by_token
    assert found.input_grad_matrix_flops == 2 * TOKENS * by_token
    assert found.details["recompute_matrix_flops"] == TOKENS * 2 * (2 * 16 * 32 + 8 * 16 * 4)
    assert _kept(found) == [*(("input", i, 0) for i in range(4)), ("output", 0, 0), ("extra", 0, 4 * TOKENS * 8)]


@pytest.mark.parametrize(
    ("rule", "by_token", "kept"),
    [
        ("gated", 4 * 2 * (16 * 4 + 16 * 6 + 4 * 6) + 2 * 2 * 4 * 6, 0),
        ("gated_delta", 4 * 2 * (16 * 4 + 16 * 6 + 4 * 6) + 2 * 2 * (4 * 6 + 16 * (4 + 4 + 6) + 4 * 6), 2 * 16),
    ],
)
def test_linear_attention_of_four_query_heads_and_two_states(rule: str, by_token: int, kept: int) -> None:
    # keys of 4, values of 6, chunks of 16 tokens
    shapes = ["x 2 64 16", "x 2 64 8", "x 2 64 12", None, "x 2 64 2", "x 2 64 2"]
    sizes = {"q_num_heads": 4, "kv_num_heads": 2, "chunk_size": 16}
    found = spec(call("LinearAttention", shapes, ["x 2 64 24"], update_rule=rule, **sizes))
    assert found.matrix_flops == TOKENS * by_token
    extra = [("extra", 0, 4 * TOKENS * kept)] if kept else []
    assert _kept(found) == [*(("input", i, 0) for i in (0, 1, 2, 4, 5)), *extra]


@pytest.mark.parametrize(
    ("window", "keys"), [({}, 64), ({"left_window_size": 15}, 16), ({"left_window_size": 100}, 64)]
)
def test_a_window_bounds_the_keys_that_a_query_sees(window: dict[str, int], keys: int) -> None:
    shapes = ["x 2 4 64 8", "x 2 2 64 8", "x 2 2 64 6"]
    found = spec(call("Attention", shapes, ["x 2 4 64 6"], opset=25, is_causal=1, **window))
    assert found.matrix_flops == 2 * 2 * 4 * 64 * keys * (8 + 6)


def test_a_sink_of_each_head_is_a_weight_and_costs_no_product() -> None:
    shapes = ["x 2 64 32", "x 2 64 16", "x 2 64 16", None, None, "c:int32 2", "c:int32", *[None] * 4, "w 4"]
    sizes = {"num_heads": 4, "kv_num_heads": 2, "local_window_size": 16}
    found = spec(call("com.microsoft.GroupQueryAttention", shapes, ["x 2 64 32"], **sizes))
    assert found.matrix_flops == 2 * 2 * 4 * 64 * 16 * (8 + 8)
    assert any(access.position == 11 for nest in found.nests for access in nest.reads)

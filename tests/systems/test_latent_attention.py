"""Latent attention and experts within the limits of frameworks: one key that no head divides, experts without TP."""

from __future__ import annotations

import functools

import pytest

import models
import planner
from planner.graph import Graph
from planner.importers import graph_from_proto
from planner.sharding.limits import STEP_SPLITS
from tests.joint.test_models import four
from tests.space.instances import cluster

CONFIG = {
    "model_type": "deepseek_v3", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip


@functools.cache
def latent() -> Graph:
    """A dense and a sparse layer."""
    return graph_from_proto(models.build_config(CONFIG, seq=64)[0], name="latent")


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("byte_per_s", [1e9, 1e11])
def test_the_key_that_heads_share_is_whole_on_all_ranks(framework: str, ranks: int, byte_per_s: float) -> None:
    job = planner.Job(global_batch=8, micro_batches=(1,), tensor_parallel=(ranks,), backends=(framework,))
    plan = planner.plan(latent(), four(byte_per_s, 10**9), job)
    assert plan.runs_on == (framework,)
    splits = {
        split
        for sharding in plan.shardings
        for entry in sharding.blocks
        for operator in entry.operators
        for split in operator.splits
    }
    assert "g" in splits  # heads
    assert not splits.intersection(STEP_SPLITS)


@pytest.mark.parametrize("experts", [4, 8])
def test_experts_alone_are_planned_where_a_single_sample_is_too_few_for_their_ranks(experts: int) -> None:
    job = planner.Job(
        global_batch=32, precision="bf16", tensor_parallel=(1,), expert_parallel=(experts,), backends=("megatron",)
    )
    plan = planner.plan(latent(), cluster((experts,), (1e11,), memory_bytes=(10**9,)), job)
    stage = plan.configuration.stages[0]
    assert (stage.expert, stage.ranks) == (experts, experts)
    assert plan.configuration.micro_batch % experts == 0

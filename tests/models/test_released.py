"""Types of models that are only told apart by keys: the released sizes give the released numbers of parameters."""

from __future__ import annotations

from typing import Any

import pytest

import models
from tests.models.graphs import parameter_count

SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"
)  # fmt: skip
TIED = {"tie_word_embeddings": True}
RELEASED: tuple[tuple[str, int, tuple[int, ...], dict[str, Any]], ...] = (
    ("smollm3", 3_075_098_624, (2048, 36, 16, 4, 11008, 128256), TIED),
    ("seed_oss", 36_151_104_512, (5120, 64, 80, 8, 27648, 155136), {"attention_bias": True, "head_dim": 128}),
    ("granite", 8_170_848_256, (4096, 40, 32, 8, 12800, 49155), TIED | {"residual_multiplier": 0.22}),
    ("phi3", 3_821_079_552, (3072, 32, 32, 32, 8192, 32064), {"sliding_window": 2047}),
    ("phi", 2_779_683_840, (2560, 32, 32, 32, 10240, 51200), {}),
    ("phimoe", 41_873_153_344, (4096, 32, 32, 8, 6400, 32064), {"attention_bias": True, "lm_head_bias": True}),
    ("olmo2", 7_298_617_344, (4096, 32, 32, 32, 11008, 100352), {}),
    ("olmo3", 7_298_011_136, (4096, 32, 32, 32, 11008, 100278), {}),
    ("olmoe", 6_919_161_856, (2048, 16, 16, 16, 1024, 50304), {"num_experts": 64, "num_experts_per_tok": 8}),
    (
        "qwen2_moe", 57_409_011_712, (3584, 28, 28, 4, 18944, 151936),
        {"moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "num_experts": 64}
        | {"num_experts_per_tok": 8},
    ),
    ("qwen2_5_vl_text", 7_615_616_512, (3584, 28, 28, 4, 18944, 152064), {}),
    ("glm", 9_399_951_360, (4096, 40, 32, 2, 13696, 151552), {"head_dim": 128}),
    ("glm4", 32_566_194_176, (6144, 61, 48, 2, 23040, 151552), {"head_dim": 128}),
    (
        "minimax_m2", 228_700_000_000, (3072, 62, 48, 8, 1536, 200064),
        {"head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
    ),
    (
        "ernie4_5_moe", 21_825_437_888, (2560, 28, 20, 4, 12288, 103424),
        {"moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2},
    ),
    ("cohere", 34_980_831_232, (8192, 40, 64, 64, 22528, 256000), {}),
    ("starcoder2", 7_173_923_840, (4608, 32, 36, 4, 18432, 49152), {}),
    (
        "stablelm", 12_143_185_920, (5120, 40, 32, 8, 13824, 100352),
        {"qk_layernorm": True, "use_parallel_residual": True},
    ),
    ("internlm2", 7_737_708_544, (4096, 32, 32, 8, 14336, 92544), {}),
    (
        "falcon", 6_921_720_704, (),
        {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024},
    ),
    (
        "falcon", 41_303_293_952, (),
        {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "vocab_size": 65024}
        | {"new_decoder_architecture": True, "num_kv_heads": 8},
    ),
    ("gptj", 6_050_882_784, (), {"vocab_size": 50400, "n_embd": 4096, "n_head": 16, "n_layer": 28}),
    (
        "mamba2", 2_702_599_680, (), TIED
        | {"hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50288, "num_heads": 80, "n_groups": 1},
    ),
    (
        "roberta", 355_412_057, (),
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
        | {"max_position_embeddings": 514},
    ),
)  # fmt: skip
"""By type: parameters of the checkpoint, its sizes in the order of `SIZES`, and other keys."""


@pytest.mark.parametrize(("model_type", "parameters", "sizes", "others"), RELEASED)
def test_released_sizes_give_the_released_number_of_parameters(
    model_type: str, parameters: int, sizes: tuple[int, ...], others: dict[str, Any]
) -> None:
    config = {"model_type": model_type, **dict(zip(SIZES, sizes, strict=False)), **others}
    model, notes = models.build_config(config, seq=64)
    assert parameter_count(model) == pytest.approx(parameters, rel=5e-5)
    assert notes == ()


def _operators(config: dict[str, Any], op_type: str) -> int:
    model, _ = models.build_config(config, seq=8)
    return sum(node.op_type == op_type for node in model.graph.node)


TINY = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 100,
}  # fmt: skip


def test_layers_without_positions_and_shared_normalisations_are_built() -> None:
    # Three of four layers turn queries and keys.
    assert _operators(TINY | {"model_type": "smollm3"}, "RotaryEmbedding") == 6
    listed = {"model_type": "smollm3", "no_rope_layers": [0, 0, 1, 0]}
    assert _operators(TINY | listed, "RotaryEmbedding") == 2
    # Windows in three of four layers of Cohere 2, positions only there; one normalisation a layer, and the last.
    assert _operators(TINY | {"model_type": "cohere2", "sliding_window": 4}, "RotaryEmbedding") == 6
    assert _operators(TINY | {"model_type": "cohere2"}, "LayerNormalization") == 5
    sequential = {"model_type": "stablelm", "use_parallel_residual": False}
    assert _operators(TINY | sequential, "LayerNormalization") == 9


def test_layer_types_and_rope_parameters_of_newer_files_are_read() -> None:
    config = TINY | {"model_type": "qwen3", "layer_types": ["full_attention"] * 4}
    assert models.build_config(config, seq=8)[1] == ()
    model, notes = models.build_config(
        TINY | {"model_type": "glm", "rope_parameters": {"partial_rotary_factor": 0.25, "rope_type": "default"}}, seq=8
    )
    assert notes == ()
    turned = [node for node in model.graph.node if node.op_type == "RotaryEmbedding"]
    dims = {attribute.i for node in turned for attribute in node.attribute if attribute.name == "rotary_embedding_dim"}
    assert dims == {128 // 4}  # GLM's heads are 128 wide


def test_what_a_model_sees_with_is_left_out_and_said() -> None:
    _, notes = models.build_config(TINY | {"model_type": "qwen2_vl", "vision_config": {"depth": 32}}, seq=8)
    assert notes == ("only the language model is built; left out: vision_config",)

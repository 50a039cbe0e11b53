"""Hugging Face configurations as models: the right sizes, what is said of the rest, and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import models
from planner import ModelError, UsageError, load_graph
from tests.models.graphs import parameter_count

Writer = Callable[..., Path]

QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK = {
    "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "quantization_config": {"quant_method": "fp8"}, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024, "vocab_size": 262144,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}  # fmt: skip
GEMMA4 = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True,
    "text_config": {
        "attention_k_eq_v": True, "enable_moe_block": False, "final_logit_softcapping": 30.0, "global_head_dim": 512,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376,
        "hidden_size_per_layer_input": 0, "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10, "model_type": "gemma4_text",
        "num_attention_heads": 32, "num_experts": None, "num_global_key_value_heads": 4, "num_hidden_layers": 60,
        "num_key_value_heads": 16, "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        "sliding_window": 1024, "use_double_wide_mlp": False, "vocab_size": 262144,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
}  # fmt: skip
GEMMA4_PARAMETERS = (
    262144 * 5376 + 60 * (4 * 5376 + 3 * 5376 * 21504) + 50 * (5376 * 256 * (32 + 16 + 16 + 32) + 2 * 256)
    + 10 * (5376 * 512 * (32 + 4 + 32) + 2 * 512) + 5376
)  # fmt: skip
"""Words; 60 layers with four normalisations and three matrices; in 50 of them queries, keys, values and output of 32,
16, 16 and 32 heads, in 10 queries, keys and output of 32, 4 and 32, and norms of heads; a last normalisation."""
NANO = {
    "model_type": "nemotron_h", "attention_bias": False, "chunk_size": 128, "conv_kernel": 4, "expand": 2,
    "head_dim": 128, "hidden_size": 2688, "intermediate_size": 1856, "layer_norm_epsilon": 1e-05,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1,
    "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2, "num_logits_to_keep": 1,
    "partial_rotary_factor": 1.0, "rope_theta": 10000, "routed_scaling_factor": 2.5, "ssm_state_size": 128,
    "sliding_window": None, "tie_word_embeddings": False, "time_step_limit": [0.0, float("inf")], "topk_group": 1,
    "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "attn_pdrop": 0.1, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768,
    "n_head": 12, "n_layer": 12, "n_positions": 1024, "layer_norm_epsilon": 1e-05, "vocab_size": 50257,
    "task_specific_params": {"text-generation": {"do_sample": True}},
}  # fmt: skip
TINY = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "vocab_size": 100,
}  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Writer:
    """Writes a configuration into a folder named after a model."""

    def write(document: Any, folder: str = "Some-Model") -> Path:
        path = tmp_path / folder / "config.json"
        path.parent.mkdir()
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return write


def _notes(path: Path, **dims: int) -> list[str]:
    return [note.message for note in load_graph(path, dims=dims).report.notes if note.code == "configuration"]


@pytest.mark.parametrize(
    ("config", "parameters", "notes"),
    [
        (QWEN3_MOE, 30_532_122_624, ()),
        (DEEPSEEK, 671_026_419_200 + 11_610_068_224, ("predictors of further tokens are built",)),
        (GEMMA3, 11_765_788_416, ("only the language model is built; left out: vision_config",)),
        (GEMMA4, GEMMA4_PARAMETERS, ("only the language model is built; left out: vision_config",)),
        (NANO, 31_577_940_288, ()),
        (GPT2, 124_439_808, ()),
    ],
)
def test_released_configurations_are_the_released_models(
    config: dict[str, Any], parameters: int, notes: tuple[str, ...]
) -> None:
    # DeepSeek-V3's predictor: attention 187,107,328, router 1,835,264, 257 experts of 44,040,192, eh_proj 102,760,448,
    # five normalisations of 7168.
    assert 187_107_328 + 1_835_264 + 257 * 44_040_192 + 102_760_448 + 5 * 7168 == 11_610_068_224
    model, said = models.build_config(config, seq=64)
    assert parameter_count(model) == parameters
    assert len(said) == len(notes)
    assert all(note.startswith(start) for note, start in zip(said, notes, strict=True))


@pytest.mark.parametrize("name", models.model_types())
def test_options_of_a_type_name_each_of_its_keys_once(name: str) -> None:
    assert sorted(models.options(name).values()) == sorted(models.model_types()[name].keys)


def test_a_file_is_a_model(written: Writer) -> None:
    graph = load_graph(written(TINY | {"max_position_embeddings": 2048}), dims={"batch": 3, "seq": 16})
    assert graph.name == "Some-Model"
    assert graph.tensors["input_ids"].shape == (3, 16)
    assert sum(p.elements for p in graph.parameters) == 2 * 100 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64


def test_a_sequence_is_assumed_and_said(written: Writer) -> None:
    path = written(TINY | {"max_position_embeddings": 512})
    assert _notes(path) == ["a sequence of 512 is assumed; another one is given by --dim seq=N"]
    assert _notes(path, seq=32) == []


def test_keys_that_are_not_understood_are_named_and_others_are_not(written: Writer) -> None:
    path = written(
        TINY | {"bos_token_id": 1, "mamba_gate": 3, "absent": None, "off": False, "_private": 1, "alibi": True}
    )
    assert _notes(path, seq=8) == ["keys that are not understood and have no effect: alibi, mamba_gate"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size' (add the keys; they are --hidden of `models build`)"),
        ({"model_type": "lama"}, "no builder for model_type 'lama' (did you mean 'llama'"),
        ({"model_type": None}, "lacks the key 'model_type'"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two' (give a value of type int)"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0 (give a positive number)"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000 (give 10000 or less)"),
        ({"hidden_size": 10**30}, "hidden_size is inf"),
        (
            {**DEEPSEEK, "num_nextn_predict_layers": 2_000_000},
            "num_nextn_predict_layers is 2000000 (give 10000 or less)",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not known (known: silu,"),
    ],
)
def test_what_cannot_be_built_is_refused_with_file_and_key(
    change: dict[str, Any], message: str, written: Writer
) -> None:
    path = written(TINY | change)
    with pytest.raises(ModelError) as caught:
        load_graph(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


ODD = (0, -1, 3, 17, 10**13, 1.5, float("inf"), "x", [], [-1], ["a"], {}, True)
TYPES = {
    "llama": {},
    "qwen3_next": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "head_dim": 8,
                   "shared_expert_intermediate_size": 6, "layer_types": ["linear_attention", "full_attention"]},
    "gemma2": {"layer_types": ["full_attention", "sliding_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0], "moe_layers": [1]},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6},
    "nemotron_h": {"hybrid_override_pattern": "M*", "mamba_num_heads": 8},
    "gpt_neox": {},
    "bert": {},
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_odd_values_are_built_or_refused(name: str) -> None:
    config = TINY | TYPES[name] | {"model_type": name}
    models.build_config(config, seq=8)
    for key in models.model_types()[name].keys:
        for value in ODD:
            with contextlib.suppress(models.ModelBuildError):
                models.build_config(config | {key: value}, seq=8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TINY | {"num_attention_heads": 3, "head_dim": 5}, "rotary positions of base 10000.0 over 5 elements"),
        (TINY | {"model_type": "bert", "num_attention_heads": 5}, "64 is not a multiple of 5 heads"),
        (TINY | {"model_type": "gemma2", "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        (TINY | {"model_type": "gemma2", "layer_types": [1, 2]}, "give a list of names"),
        (TINY | {"model_type": "llama4_text", "no_rope_layers": [1]}, "1 entries for 2 layers"),
        (TINY | {"model_type": "nemotron_h", "hybrid_override_pattern": "M"}, "1 letters for 2 layers"),
        (TINY | {"model_type": "nemotron_h", "hybrid_override_pattern": "ME"}, "holds 'E', which has no sizes"),
        ({"model_type": "resnet", "blocks": [1, 2]}, "give 4 numbers from 1, 10000 together"),
        ({"model_type": "dlrm", "tables": [5], "width": 4, "bottom": [8, 3], "top": [1]}, "tables of width 4"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(models.ModelBuildError) as caught:
        models.build_config(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"model_type": "llama",', "config.json:1:24: not JSON"),
        ('{"model_type": ' + "[" * 100_000, "config.json:1:79: nested deeper than 64 levels"),
        ('{"model_type"\x00', "config.json:1:14: not a text file: it holds a null byte"),
    ],
)
def test_a_damaged_file_is_refused(text: str, message: str, written: Writer) -> None:
    with pytest.raises(ModelError, match=message):
        load_graph(written(text))


def test_a_dimension_that_a_configuration_does_not_have(written: Writer) -> None:
    with pytest.raises(UsageError, match="did you mean 'seq'"):
        load_graph(written(TINY), dims={"sequ": 4})


def test_sizes_of_ones_own_change_a_model_or_make_one() -> None:
    half = models.changed("llama3-8b", {"layers": "16"})
    assert parameter_count(models.build_config(half, seq=8)[0]) == 8_030_261_248 - 16 * 218_112_000
    own = models.changed("vgg", {"groups": "1,1,2,2,2", "num-labels": "10"})
    assert parameter_count(models.build_config(own)[0]) == 132_863_336 - 990 * 4097
    assert models.changed("qwen", {"tie-word-embeddings": "true"})["model_type"] == "qwen2"


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        ("llama", {"layer": "4"}, "llama has no option --layer (did you mean 'layers'"),
        ("llama3-8b", {"bacth": "4"}, "did you mean 'batch'"),
        ("llama", {"layers": "4.5"}, "num_hidden_layers cannot be '4.5' (give a value of type int)"),
        ("llama", {"tie-word-embeddings": "yes"}, "give true or false"),
        ("lama", {}, "no builder for model_type 'lama'"),
    ],
)
def test_options_that_a_type_does_not_have(base: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(models.ModelBuildError) as caught:
        models.changed(base, options)
    assert message in str(caught.value)


def _documentation() -> str:
    return (Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()


def test_the_documentation_names_every_type_and_family() -> None:
    cells = {line.split("|")[1].strip() for line in _documentation().splitlines() if line.startswith("|")}
    named = {name.strip() for cell in cells for name in cell.split(",")}
    own = {"resnet", "vgg", "alexnet", "gnmt", "dlrm"}  # types that no config.json has
    assert {*models.families(), *models.model_types()} - own <= named
    assert set(models.families()) <= named


def test_the_code_of_the_documentation_runs() -> None:
    (code,) = (part.partition("```")[0] for part in _documentation().split("```python")[1:])
    names: dict[str, Any] = {}
    exec(code, names)
    assert parameter_count(names["model"]) == 8_030_261_248 - 16 * 218_112_000
    assert names["notes"] == ()


@pytest.mark.parametrize(
    "name",
    ["llama", "deepseek_v3", "gemma2", "qwen3_next", "nemotron_h", "llama4_text", "bert", "gpt_neox", "vit"],
)
def test_sizes_have_limits_before_anything_is_built(name: str) -> None:
    """Whole numbers beyond the largest width, and numbers of layers beyond the largest depth."""
    config = {**TINY, **TYPES.get(name, {}), "model_type": name}
    for key, entry in models.model_types()[name].keys.items():
        if entry.kind is not int:
            continue
        for value in (1 << 40, (1 << 24) + 1):
            with pytest.raises(models.ModelBuildError, match=f"{key} is {value}"):
                models.build_config(config | {key: value}, seq=8 if models.model_types()[name].reads_sequence else None)
        if key.endswith(("layer", "layers")):
            with pytest.raises(models.ModelBuildError, match="give 10000 or less"):
                models.build_config(config | {key: 10_001}, seq=8)


def test_lists_and_rotated_widths_have_limits() -> None:
    for config, message in (
        (
            {"model_type": "dlrm", "tables": [5] * 4097, "width": 4, "bottom": [8, 4], "top": [1]},
            "tables has 4097 items",
        ),
        ({"model_type": "resnet", "blocks": [5000, 5000, 1, 1]}, "give 4 numbers from 1, 10000 together"),
        (TINY | {"head_dim": 1 << 17}, "over 131072 elements of a head (give a positive base and an even number of"),
    ):
        with pytest.raises(models.ModelBuildError) as caught:
            models.build_config(config)
        assert message in str(caught.value)

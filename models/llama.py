"""LLaMA, and families whose layers differ from LLaMA's by a few sizes or one block.

- Mistral, Mixtral, Qwen2, Qwen3 with and without experts;
- Qwen3-Next: gated DeltaNet in three of four layers, gated attention in the fourth, many small experts. Attention
  rotates a quarter of each head. RMSNorm's scale is written as one weight, where Qwen3-Next adds 1 to it;
- Llama 4: one of many experts a token beside a shared one, layers without positions, the others in chunks of tokens.
  A chunk is written as a window of the same length, which has the same work. A router's weight multiplies an expert's
  result, where Llama 4 multiplies its input;
- GPT-OSS: experts with biases, attention with sinks, a short window in every other layer. The clamps inside the
  experts' activation and its factor 1.702 are left out: no weight and no product depends on them;
- GPT-NeoX and Pythia: LayerNorm, biases, a quarter of each head rotated, attention and feed-forward side by side;
- Phi, GPT-J, Cohere, StableLM, Falcon: the same with one normalisation for both; StarCoder 2 and Nemotron-4: LayerNorm
  in layers one after the other; OLMo 2 and 3 normalise what a block makes, GLM 4 also what it reads.

`types.toml` states which of these a type does; `stacked` builds what it states. Implementations that join queries, keys
and values, or both inner matrices, into one weight (Phi-3, Falcon) are written with one weight each.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ._attention import Attention, Rotary
from ._config import Config, ModelBuildError, size_from, typed
from ._decoder import NORMS, Block, DecoderSize, Experts, FeedForward, Layer, transformer_layer
from ._layers import ACTIVATIONS, NORMALISATIONS
from ._moe import MoE
from ._scan import DeltaNet


def named(c: Config, key: str, known: Collection[str]) -> str:
    """The value of a key, one of some names.

    Raises:
        ModelBuildError: it is none of them.
    """
    name: str = c[key]
    if name not in known:
        raise ModelBuildError(f"{key} {name!r} is not known", f"known: {', '.join(known)}")
    return name


def activation(c: Config, key: str = "hidden_act") -> str:
    """Name of the activation in a configuration.

    Raises:
        ModelBuildError: the activation is unknown.
    """
    return named(c, key, ACTIVATIONS)


def head_width(c: Config) -> int:
    """Width of one attention head."""
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def rotary_of(c: Config) -> Rotary:
    """The rotary embedding of a configuration, over the first `rotary_dim` elements or a share of each head."""
    width = c.get("rotary_dim") or int(head_width(c) * c.get("partial_rotary_factor", 1.0))
    return Rotary(float(c["rope_theta"]), width)


def attention_of(c: Config, **changes: Any) -> Attention:  # noqa: ANN401
    """The attention of a configuration; `changes` replaces fields."""
    fields = {
        "heads": c["num_attention_heads"],
        "kv_heads": c.get("num_key_value_heads") or c["num_attention_heads"],
        "head_dim": head_width(c),
        "rotary": rotary_of(c) if "rope_theta" in c else None,
        "bias": c["attention_bias"],
        "out_bias": c.get("attention_out_bias", c["attention_bias"]),
        "qk_norm": c.get("use_qk_norm", False),
        "wide_norm": c.get("use_wide_qk_norm", False),
        "scale": c.get("attention_multiplier", 0.0),
    }
    return Attention(**(fields | changes))


def feed_forward_of(c: Config) -> FeedForward:
    """The feed-forward layer of a configuration, four times as wide as the hidden state if it does not say."""
    width = c["intermediate_size"] or 4 * c["hidden_size"]
    return FeedForward(width, activation(c), c.get("gated_mlp", True), c.get("mlp_bias", False))


def decoder_of(c: Config, layers: tuple[Layer, ...], **changes: Any) -> DecoderSize:  # noqa: ANN401
    """A decoder of these layers, with the sizes that all configurations share; `changes` replaces fields."""
    fields = {
        "epsilon": float(c["rms_norm_eps"]),
        "tied": c["tie_word_embeddings"],
        "norm": named({"norm_type": "rms_norm", **c}, "norm_type", NORMALISATIONS),
        "parallel": c.get("use_parallel_residual", False),
        "head_bias": c.get("lm_head_bias", False),
        "embedding_scale": c.get("embedding_multiplier", 1.0),
        "residual_scale": c.get("residual_multiplier", 1.0),
        "logits_scale": c.get("logit_scale", 1.0) / c.get("logits_scaling", 1.0),
    }
    return DecoderSize(c["hidden_size"], c["vocab_size"], layers, **(fields | changes))


def kinds_of_layers(c: Config, kinds: Collection[str], every: int) -> tuple[bool, ...]:
    """For each layer, whether its type is among `kinds`: by `layer_types`, else all but every `every`-th layer.

    Raises:
        ModelBuildError: `layer_types` has the wrong length or names an unknown type.
    """
    listed, count, known = c["layer_types"], c["num_hidden_layers"], (*kinds, "full_attention")
    if listed is None:
        return tuple((i + 1) % every != 0 for i in range(count))
    unknown = [kind for kind in listed if kind not in known]
    if unknown:
        raise ModelBuildError(f"layer_types holds {unknown[0]!r}", f"known: {', '.join(known)}")
    if len(listed) != count:
        raise ModelBuildError(f"layer_types has {len(listed)} entries for {count} layers", "give one for each layer")
    return tuple(kind in kinds for kind in listed)


def local_layers(c: Config, every: int) -> tuple[bool, ...]:
    """For each layer, whether it attends within a window; see `kinds_of_layers`."""
    return kinds_of_layers(c, ("sliding_attention", "chunked_attention"), every)


def windowed_layers(c: Config) -> tuple[bool, ...]:
    """For each layer, whether it attends within the window.

    By `layer_types`; else all but every `sliding_window_pattern`-th; else those from `max_window_layers` on if
    `use_sliding_window` (Qwen); else all.
    """
    if c["layer_types"] is not None or "sliding_window_pattern" in c:
        return local_layers(c, c.get("sliding_window_pattern", 1))
    first = c.get("max_window_layers", 0) if c.get("use_sliding_window", True) else c["num_hidden_layers"]
    return tuple(i >= first for i in range(c["num_hidden_layers"]))


def rotated_layers(c: Config) -> tuple[bool, ...]:
    """For each layer, whether it has rotary positions: by `no_rope_layers`, else all but every so-many-th.

    Raises:
        ModelBuildError: `no_rope_layers` has the wrong length.
    """
    listed, every, count = c.get("no_rope_layers"), c.get("no_rope_layer_interval"), c["num_hidden_layers"]
    if listed and len(listed) != count:
        raise ModelBuildError(f"no_rope_layers has {len(listed)} entries for {count} layers", "give one for each layer")
    return tuple(bool(listed[i]) if listed else not every or (i + 1) % every != 0 for i in range(count))


def stacked(c: Config, feeds: Sequence[Block], **changes: Any) -> DecoderSize:  # noqa: ANN401
    """A decoder of attention and the given feed-forward blocks, one a layer; `changes` replaces fields."""
    attention, window = attention_of(c), c.get("sliding_window") or 0
    norms = named({"norms": "before", **c}, "norms", NORMS)
    if norms == "shared" and not c["use_parallel_residual"]:
        norms = "before"
    layers = []
    for feed, is_local, is_rotated in zip(feeds, windowed_layers(c), rotated_layers(c), strict=True):
        rotary = attention.rotary if is_rotated and (is_local or not c.get("rope_in_windows_only")) else None
        mixer = replace(attention, window=window if is_local else 0, rotary=rotary)
        layers.append(transformer_layer(mixer, feed, norms=norms))
    return decoder_of(c, tuple(layers), **changes)


def _dense(c: Config) -> DecoderSize:
    return stacked(c, (feed_forward_of(c),) * c["num_hidden_layers"])


def _sparse(c: Config) -> DecoderSize:
    """Experts in every layer, or those that `sparse_layers` chooses; a shared one beside them if it has a width."""
    top_k, width = c["num_experts_per_tok"], c["moe_intermediate_size"]
    moe = MoE(c["num_experts"], top_k, gated=True, renormalise=c["norm_topk_prob"])
    shared = c.get("shared_expert_intermediate_size")
    beside = FeedForward(shared, activation(c)) if shared else None
    experts = Experts(moe, width, activation(c), beside, c.get("shared_expert_gate", False))
    return stacked(c, sparse_layers(c, feed_forward_of(c), experts))


def sparse_layers(c: Config, dense: FeedForward | Experts, sparse: Experts) -> tuple[FeedForward | Experts, ...]:
    """The feed-forward block of each layer: experts in every `decoder_sparse_step`-th, except in `mlp_only_layers`."""
    step, only = c["decoder_sparse_step"], set(c["mlp_only_layers"])
    return tuple(sparse if i not in only and (i + 1) % step == 0 else dense for i in range(c["num_hidden_layers"]))


def _gpt_oss(c: Config) -> DecoderSize:
    moe = MoE(c["num_local_experts"], c["num_experts_per_tok"], gated=True, bias=True)
    experts = Experts(moe, c["intermediate_size"], activation(c))
    full, local = (attention_of(c, sinks=True, window=window) for window in (0, c["sliding_window"] or 0))
    layers = tuple(transformer_layer(local if is_local else full, experts) for is_local in local_layers(c, 2))
    return decoder_of(c, layers)


def _llama4(c: Config) -> DecoderSize:
    width, act, step = c["intermediate_size"], activation(c), c["interleave_moe_layer_step"]
    moe = MoE(c["num_local_experts"], c["num_experts_per_tok"], gated=True, renormalise=False, sigmoid=True)
    experts = Experts(moe, width, act, FeedForward(width, act))
    dense = FeedForward(c["intermediate_size_mlp"], act)
    attention = attention_of(c)
    near = replace(attention, window=c["attention_chunk_size"] or 0, qk_norm=False, qk_unit=c["use_qk_norm"])
    far = replace(attention, qk_norm=False, rotary=None)
    layers, sparse = [], c["moe_layers"]
    for i, is_rotated in enumerate(rotated_layers(c)):
        is_sparse = i in sparse if sparse is not None else (i + 1) % step == 0
        layers.append(transformer_layer(near if is_rotated else far, experts if is_sparse else dense))
    return decoder_of(c, tuple(layers))


def _qwen3_next(c: Config) -> DecoderSize:
    moe = MoE(c["num_experts"], c["num_experts_per_tok"], gated=True, renormalise=c["norm_topk_prob"])
    shared = FeedForward(c["shared_expert_intermediate_size"], activation(c))
    experts = Experts(moe, c["moe_intermediate_size"], activation(c), shared, shared_gate=True)
    attention = attention_of(c, qk_norm=True, gated=True)
    scan = size_from(DeltaNet, c)
    layers = tuple(
        transformer_layer(scan, block, name="linear_attn") if scans else transformer_layer(attention, block)
        for scans, block in zip(
            kinds_of_layers(c, ("linear_attention",), c["full_attention_interval"]),
            sparse_layers(c, feed_forward_of(c), experts),
            strict=True,
        )
    )
    return decoder_of(c, layers)


def _falcon(c: Config) -> DecoderSize:
    new = c["new_decoder_architecture"]
    kv_heads = c["num_kv_heads"] if new else 1 if c["multi_query"] else c["num_attention_heads"]
    norms = "before" if new and c["num_ln_in_parallel_attn"] != 1 else "shared"
    return _dense({**c, "num_key_value_heads": kv_heads, "norms": norms})


_DENSE = (
    "llama", "mistral", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_vl", "smollm3", "seed_oss", "granite",
    "phi3", "internlm2", "olmo2", "olmo3", "glm", "glm4", "cohere", "cohere2", "ernie4_5", "gpt_neox", "gptj", "phi",
    "stablelm", "starcoder2", "nemotron",
)  # fmt: skip
_SPARSE = ("mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "olmoe", "granitemoe", "granitemoeshared")
MODEL_TYPES = {
    **typed(dict.fromkeys(_DENSE, _dense) | dict.fromkeys(_SPARSE, _sparse) | {"falcon": _falcon}),
    **typed({"gpt_oss": _gpt_oss, "llama4_text": _llama4, "llama4": _llama4}),
    **typed({"qwen3_next": _qwen3_next}, DeltaNet),
}

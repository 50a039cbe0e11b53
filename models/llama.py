"""LLaMA, and families whose layers differ from LLaMA's by a few sizes or one block.

- Mistral, Mixtral, Qwen2, Qwen3 with and without experts;
- Qwen3-Next: gated DeltaNet in three of four layers, gated attention in the fourth, many small experts. Attention
  rotates a quarter of each head. RMSNorm's scale is written as one weight, where Qwen3-Next adds 1 to it;
- Llama 4: one of many experts a token beside a shared one, layers without positions, the others in chunks of tokens.
  A chunk is written as a window of the same length, which has the same work. A router's weight multiplies an expert's
  result, where Llama 4 multiplies its input;
- GPT-OSS: experts with biases, attention with sinks, a short window in every other layer. The clamps inside the
  experts' activation and its factor 1.702 are left out: no weight and no product depends on them;
- GPT-NeoX and Pythia: LayerNorm, biases, a quarter of each head rotated, attention and feed-forward side by side.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from ._attention import Attention, Rotary
from ._config import Config, ModelBuildError, size_from, typed
from ._decoder import DecoderSize, Experts, FeedForward, Layer, transformer_layer
from ._layers import ACTIVATIONS
from ._moe import MoE
from ._scan import DeltaNet


def activation(c: Config, key: str = "hidden_act") -> str:
    """Name of the activation in a configuration.

    Raises:
        ModelBuildError: the activation is unknown.
    """
    name: str = c[key]
    if name not in ACTIVATIONS:
        raise ModelBuildError(f"{key} {name!r} is not known", f"known: {', '.join(ACTIVATIONS)}")
    return name


def head_width(c: Config) -> int:
    """Width of one attention head."""
    return int(c["head_dim"] or c["hidden_size"] // c["num_attention_heads"])


def rotary_of(c: Config) -> Rotary:
    """The rotary embedding of a configuration, over the part of each head that `partial_rotary_factor` gives."""
    return Rotary(float(c["rope_theta"]), int(head_width(c) * c.get("partial_rotary_factor", 1.0)))


def attention_of(c: Config, **changes: Any) -> Attention:  # noqa: ANN401
    """The attention of a configuration; `changes` replaces fields."""
    fields = {
        "heads": c["num_attention_heads"],
        "kv_heads": c["num_key_value_heads"] or c["num_attention_heads"],
        "head_dim": head_width(c),
        "rotary": rotary_of(c) if "rope_theta" in c else None,
        "bias": c["attention_bias"],
    }
    return Attention(**(fields | changes))


def feed_forward_of(c: Config) -> FeedForward:
    """The gated feed-forward layer of a configuration."""
    return FeedForward(c["intermediate_size"], activation(c), bias=c.get("mlp_bias", False))


def decoder_of(c: Config, layers: tuple[Layer, ...], **changes: Any) -> DecoderSize:  # noqa: ANN401
    """A decoder of these layers, with the sizes that all configurations share; `changes` replaces fields."""
    fields = {"epsilon": float(c["rms_norm_eps"]), "tied": c["tie_word_embeddings"]}
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


def _dense(c: Config) -> DecoderSize:
    """LLaMA and Mistral: equal layers, all with Mistral's window."""
    attention = attention_of(c, out_bias=c["attention_bias"], window=c.get("sliding_window") or 0)
    return decoder_of(c, (transformer_layer(attention, feed_forward_of(c)),) * c["num_hidden_layers"])


def _qwen(c: Config, *, qk_norm: bool, feed: tuple[FeedForward | Experts, ...]) -> DecoderSize:
    """Qwen: attention windows, if used, begin at layer `max_window_layers`."""
    windowed = c["num_hidden_layers"] if not c["use_sliding_window"] else c["max_window_layers"]
    plain = attention_of(c, qk_norm=qk_norm)
    local = attention_of(c, qk_norm=qk_norm, window=c["sliding_window"] or 0)
    layers = tuple(transformer_layer(local if i >= windowed else plain, block) for i, block in enumerate(feed))
    return decoder_of(c, layers)


def _qwen_dense(c: Config) -> DecoderSize:
    return _qwen(c, qk_norm=c["qk_norm"], feed=(feed_forward_of(c),) * c["num_hidden_layers"])


def sparse_layers(c: Config, dense: FeedForward | Experts, sparse: Experts) -> tuple[FeedForward | Experts, ...]:
    """The feed-forward block of each layer: experts in every `decoder_sparse_step`-th, except in `mlp_only_layers`."""
    step, only = c["decoder_sparse_step"], set(c["mlp_only_layers"])
    return tuple(sparse if i not in only and (i + 1) % step == 0 else dense for i in range(c["num_hidden_layers"]))


def _qwen_sparse(c: Config) -> DecoderSize:
    moe = MoE(c["num_experts"], c["num_experts_per_tok"], gated=True, renormalise=c["norm_topk_prob"])
    experts = Experts(moe, c["moe_intermediate_size"], activation(c))
    return _qwen(c, qk_norm=True, feed=sparse_layers(c, feed_forward_of(c), experts))


def _mixtral(c: Config) -> DecoderSize:
    moe = MoE(c["num_local_experts"], c["num_experts_per_tok"], gated=True)
    experts = Experts(moe, c["intermediate_size"], activation(c))
    attention = attention_of(c, window=c["sliding_window"] or 0)
    return decoder_of(c, (transformer_layer(attention, experts),) * c["num_hidden_layers"])


def _neox(c: Config) -> DecoderSize:
    c = {**c, "num_key_value_heads": None, "head_dim": None, "partial_rotary_factor": c["rotary_pct"]}
    c |= {"rope_theta": c["rotary_emb_base"], "rms_norm_eps": c["layer_norm_eps"]}
    attention = attention_of(c, out_bias=c["attention_bias"])
    feed_forward = FeedForward(c["intermediate_size"], activation(c), gated=False, bias=True)
    layers = (transformer_layer(attention, feed_forward),) * c["num_hidden_layers"]
    return decoder_of(c, layers, layer_norm=True, parallel=c["use_parallel_residual"])


def _gpt_oss(c: Config) -> DecoderSize:
    moe = MoE(c["num_local_experts"], c["num_experts_per_tok"], gated=True, bias=True)
    experts = Experts(moe, c["intermediate_size"], activation(c))
    full, local = (
        attention_of(c, out_bias=c["attention_bias"], sinks=True, window=window)
        for window in (0, c["sliding_window"] or 0)
    )
    layers = tuple(transformer_layer(local if is_local else full, experts) for is_local in local_layers(c, 2))
    return decoder_of(c, layers)


def _llama4(c: Config) -> DecoderSize:
    width, act, step = c["intermediate_size"], activation(c), c["interleave_moe_layer_step"]
    moe = MoE(c["num_local_experts"], c["num_experts_per_tok"], gated=True, renormalise=False, sigmoid=True)
    experts = Experts(moe, width, act, FeedForward(width, act))
    dense = FeedForward(c["intermediate_size_mlp"], act)
    attention = attention_of(c, out_bias=c["attention_bias"])
    near = replace(attention, window=c["attention_chunk_size"] or 0, qk_unit=c["use_qk_norm"])
    far = replace(attention, rotary=None)
    layers, sparse = [], c["moe_layers"]
    if len(c["no_rope_layers"] or ()) not in (0, c["num_hidden_layers"]):
        raise ModelBuildError(
            f"no_rope_layers has {len(c['no_rope_layers'])} entries for {c['num_hidden_layers']} layers",
            "give one for each layer",
        )
    for i in range(c["num_hidden_layers"]):
        is_sparse = i in sparse if sparse is not None else (i + 1) % step == 0
        layers.append(transformer_layer(near if _has_rotary(c, i) else far, experts if is_sparse else dense))
    return decoder_of(c, tuple(layers))


def _has_rotary(c: Config, layer: int) -> bool:
    """True if a layer has rotary positions."""
    listed = c["no_rope_layers"]
    return bool(listed[layer]) if listed else (layer + 1) % c["no_rope_layer_interval"] != 0


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


MODEL_TYPES = {
    **typed({"llama": _dense, "mistral": _dense, "qwen2": _qwen_dense, "qwen3": _qwen_dense, "mixtral": _mixtral}),
    **typed({"qwen3_moe": _qwen_sparse, "gpt_oss": _gpt_oss, "llama4_text": _llama4, "llama4": _llama4}),
    **typed({"qwen3_next": _qwen3_next}, DeltaNet),
    **typed({"gpt_neox": _neox}),
}

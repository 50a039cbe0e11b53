"""LLaMA and what follows it closely: Mistral, Mixtral, Qwen2, Qwen3 with and without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._attention import Attention, Rotary
from ._config import Config, Key, ModelBuildError, ModelType, required
from ._decoder import DecoderSize, Experts, FeedForward, Layer, transformer_layer
from ._layers import ACTIVATIONS
from ._moe import MoE

DECODER: Mapping[str, Key] = {
    "hidden_size": required(),
    "num_hidden_layers": required(),
    "num_attention_heads": required(),
    "intermediate_size": required(),
    "vocab_size": required(),
    "num_key_value_heads": Key(int),
    "head_dim": Key(int),
    "hidden_act": Key(str, "silu"),
    "rms_norm_eps": Key(float, 1e-6),
    "rope_theta": Key(float, 10_000.0),
    "attention_bias": Key(bool, False),
    "tie_word_embeddings": Key(bool, False),
    "max_position_embeddings": Key(int),
}
"""Keys that all decoders have."""

SPARSE: Mapping[str, Key] = {
    "num_experts_per_tok": required(),
    "norm_topk_prob": Key(bool, True),
    "decoder_sparse_step": Key(int, 1),
    "mlp_only_layers": Key(list, []),
}
"""Keys of decoders with experts."""


def activation(c: Config, key: str = "hidden_act") -> str:
    """The activation that a configuration names.

    Raises:
        ModelBuildError: it is none of those that are known.
    """
    name: str = c[key]
    if name not in ACTIVATIONS:
        raise ModelBuildError(f"{key} {name!r} is not known", f"known: {', '.join(ACTIVATIONS)}")
    return name


def head_width(c: Config) -> int:
    """Width of one attention head."""
    return int(c["head_dim"] or c["hidden_size"] // c["num_attention_heads"])


def rotary_of(c: Config) -> Rotary:
    """The rotary positions of a configuration, over whole heads or the part that `partial_rotary_factor` says."""
    return Rotary(float(c["rope_theta"]), int(head_width(c) * c.get("partial_rotary_factor", 1.0)))


def attention_of(c: Config, **changes: Any) -> Attention:  # noqa: ANN401
    """The attention of a configuration, with fields that a family has otherwise."""
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
    """A decoder of these layers, with the sizes that all configurations state alike."""
    fields = {"epsilon": float(c["rms_norm_eps"]), "tied": c["tie_word_embeddings"]}
    return DecoderSize(c["hidden_size"], c["vocab_size"], layers, **(fields | changes))


def _dense(c: Config) -> DecoderSize:
    """LLaMA: every layer alike; Mistral's window is on all of them."""
    attention = attention_of(c, out_bias=c["attention_bias"], window=c.get("sliding_window") or 0)
    return decoder_of(c, (transformer_layer(attention, feed_forward_of(c)),) * c["num_hidden_layers"])


def _qwen(c: Config, *, qk_norm: bool, feed: tuple[FeedForward | Experts, ...]) -> DecoderSize:
    """Qwen: the window, where it is used, begins at some layer."""
    windowed = c["num_hidden_layers"] if not c["use_sliding_window"] else c["max_window_layers"]
    plain = attention_of(c, qk_norm=qk_norm)
    local = attention_of(c, qk_norm=qk_norm, window=c["sliding_window"] or 0)
    layers = tuple(transformer_layer(local if i >= windowed else plain, block) for i, block in enumerate(feed))
    return decoder_of(c, layers)


def _qwen_dense(c: Config) -> DecoderSize:
    return _qwen(c, qk_norm=c["qk_norm"], feed=(feed_forward_of(c),) * c["num_hidden_layers"])


def sparse_layers(c: Config, dense: FeedForward | Experts, sparse: Experts) -> tuple[FeedForward | Experts, ...]:
    """The feed-forward part of each layer: experts in every so many, but not where a list says so."""
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


_WINDOW = {"sliding_window": Key(int)}
_QWEN = {**DECODER, **_WINDOW, "use_sliding_window": Key(bool, False), "max_window_layers": Key(int, 0)}
_QWEN2 = {**_QWEN, "attention_bias": Key(bool, True), "qk_norm": Key(bool, False)}
_QWEN3 = {**_QWEN, "head_dim": Key(int, 128), "qk_norm": Key(bool, True)}

MODEL_TYPES = {
    "llama": ModelType("llama", {**DECODER, "mlp_bias": Key(bool, False)}, _dense),
    "mistral": ModelType("llama", {**DECODER, **_WINDOW}, _dense),
    "qwen2": ModelType("qwen", _QWEN2, _qwen_dense),
    "qwen3": ModelType("qwen", _QWEN3, _qwen_dense),
    "mixtral": ModelType(
        "moe",
        {**DECODER, **_WINDOW, "num_local_experts": Key(int, 8), "num_experts_per_tok": Key(int, 2)},
        _mixtral,
    ),
    "qwen3_moe": ModelType(
        "moe", {**_QWEN, **SPARSE, "num_experts": required(), "moe_intermediate_size": required()}, _qwen_sparse
    ),
}

"""Qwen3-Next: gated DeltaNet in three of four layers, gated attention in the fourth, many small experts.

Attention turns a quarter of each head. RMSNorm's scale is written as one weight, where Qwen3-Next adds 1 to it.
"""

from __future__ import annotations

from ._config import Config, Key, ModelBuildError, ModelType, required
from ._decoder import DecoderSize, Experts, FeedForward, transformer_layer
from ._moe import MoE
from ._scan import DeltaNet
from .llama import DECODER, SPARSE, activation, attention_of, decoder_of, feed_forward_of, sparse_layers

_SCAN = "linear_attention"


def _size(c: Config) -> DecoderSize:
    moe = MoE(c["num_experts"], c["num_experts_per_tok"], gated=True, renormalise=c["norm_topk_prob"])
    always = FeedForward(c["shared_expert_intermediate_size"], activation(c))
    experts = Experts(moe, c["moe_intermediate_size"], activation(c), always, weighed=True)
    attention = attention_of(c, qk_norm=True, gated=True)
    scan = DeltaNet(
        c["linear_num_key_heads"],
        c["linear_num_value_heads"],
        c["linear_key_head_dim"],
        c["linear_value_head_dim"],
        c["linear_conv_kernel_dim"],
    )
    layers = tuple(
        transformer_layer(scan, block, name="linear_attn") if scans else transformer_layer(attention, block)
        for scans, block in zip(_scanning(c), sparse_layers(c, feed_forward_of(c), experts), strict=True)
    )
    return decoder_of(c, layers)


def _scanning(c: Config) -> tuple[bool, ...]:
    """Whether each layer has a DeltaNet."""
    kinds, count = c["layer_types"], c["num_hidden_layers"]
    if kinds is None:
        return tuple((i + 1) % c["full_attention_interval"] != 0 for i in range(count))
    if len(kinds) != count or set(kinds) - {_SCAN, "full_attention"}:
        raise ModelBuildError(
            f"layer_types does not name {count} layers", f"give {_SCAN} or full_attention for each layer"
        )
    return tuple(kind == _SCAN for kind in kinds)


_KEYS = {
    **DECODER,
    **SPARSE,
    "head_dim": Key(int, 256),
    "partial_rotary_factor": Key(float, 0.25),
    "num_experts": required(),
    "moe_intermediate_size": required(),
    "shared_expert_intermediate_size": required(),
    "full_attention_interval": Key(int, 4),
    "layer_types": Key(list, items=str),
    "linear_num_key_heads": Key(int, 16),
    "linear_num_value_heads": Key(int, 32),
    "linear_key_head_dim": Key(int, 128),
    "linear_value_head_dim": Key(int, 128),
    "linear_conv_kernel_dim": Key(int, 4),
}

MODEL_TYPES = {"qwen3_next": ModelType("qwen", _KEYS, _size)}

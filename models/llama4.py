"""Llama 4: one of many experts a token beside a shared one, layers without positions, the others in chunks of tokens.

Chunks are written as a window of as many tokens: the same work. A router's weight multiplies what an expert makes,
where Llama 4 multiplies what it reads.
"""

from __future__ import annotations

from dataclasses import replace

from ._config import Config, Key, ModelBuildError, ModelType
from ._decoder import DecoderSize, Experts, FeedForward, transformer_layer
from ._moe import MoE
from .llama import DECODER, activation, attention_of, decoder_of


def _size(c: Config) -> DecoderSize:
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
        layers.append(transformer_layer(near if _turned(c, i) else far, experts if is_sparse else dense))
    return decoder_of(c, tuple(layers))


def _turned(c: Config, layer: int) -> bool:
    """Whether a layer has rotary positions."""
    listed = c["no_rope_layers"]
    return bool(listed[layer]) if listed else (layer + 1) % c["no_rope_layer_interval"] != 0


_KEYS = {
    **DECODER,
    "intermediate_size_mlp": Key(int, 16_384),
    "num_local_experts": Key(int, 16),
    "num_experts_per_tok": Key(int, 1),
    "interleave_moe_layer_step": Key(int, 1),
    "moe_layers": Key(list),
    "attention_chunk_size": Key(int, 8192),
    "no_rope_layers": Key(list),
    "no_rope_layer_interval": Key(int, 4),
    "use_qk_norm": Key(bool, True),
    "head_dim": Key(int, 128),
    "rope_theta": Key(float, 500_000.0),
    "rms_norm_eps": Key(float, 1e-5),
}

MODEL_TYPES = {"llama4_text": ModelType("llama4", _KEYS, _size), "llama4": ModelType("llama4", _KEYS, _size)}

"""GPT-OSS: experts with biases, attention with sinks, a short window in every other layer.

The clamps inside the experts' activation and its factor 1.702 are left out: no weight and no product depends on them.
"""

from __future__ import annotations

from ._config import Config, Key, ModelType
from ._decoder import DecoderSize, Experts, transformer_layer
from ._moe import MoE
from .gemma import local_layers
from .llama import DECODER, activation, attention_of, decoder_of


def _size(c: Config) -> DecoderSize:
    moe = MoE(c["num_local_experts"], c["num_experts_per_tok"], gated=True, bias=True)
    experts = Experts(moe, c["intermediate_size"], activation(c))
    whole, local = (
        attention_of(c, out_bias=c["attention_bias"], sinks=True, window=window)
        for window in (0, c["sliding_window"] or 0)
    )
    layers = tuple(transformer_layer(local if is_local else whole, experts) for is_local in local_layers(c, 2))
    return decoder_of(c, layers)


_KEYS = {
    **DECODER,
    "num_local_experts": Key(int, 128),
    "num_experts_per_tok": Key(int, 4),
    "attention_bias": Key(bool, True),
    "head_dim": Key(int, 64),
    "rope_theta": Key(float, 150_000.0),
    "rms_norm_eps": Key(float, 1e-5),
    "sliding_window": Key(int, 128),
    "layer_types": Key(list, items=str),
}

MODEL_TYPES = {"gpt_oss": ModelType("gpt_oss", _KEYS, _size)}
